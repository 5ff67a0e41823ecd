"""What is set aside on a disk that is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sglang_hc.store.disk.index_file import FIXED_FILES_BYTES, WAL_MAX_BYTES

from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.restore import measure_disk
from sglang_hc.store.disk import DiskStore
from sglang_hc.store.outcome import Outcome
from support.clock import Clock

LAYOUT = BlockLayout(LayerPlan(0, 0, 4), StateShape(4, 8, (16, 16), "uint8"))


def test_the_room_beside_the_blocks_is_enough_for_what_the_store_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sizes() -> list[int]:
        samples, _ = measure_disk.disk_samples(
            [str(tmp_path)], LAYOUT, [64, 256, 1024], 60.0, Clock()
        )
        return [tokens for tokens, _ in samples]

    assert sizes() == [64, 256, 1024]
    monkeypatch.setattr(measure_disk, "SPARE_BYTES", FIXED_FILES_BYTES + WAL_MAX_BYTES)
    with pytest.raises(OSError, match="could not be read"):  # they made room for each other
        sizes()


def test_a_disk_with_little_room_gives_the_small_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the blocks of the first two sizes is needed."""
    write = DiskStore.write_many

    def measured(room: int) -> list[int]:
        def write_many(self: DiskStore, items: Sequence[Any]) -> list[Outcome]:
            nonlocal room
            room -= len(items)
            return write(self, items) if room >= 0 else [Outcome.NO_SPACE] * len(items)

        monkeypatch.setattr(DiskStore, "write_many", write_many)
        samples, _ = measure_disk.disk_samples(
            [str(tmp_path)], LAYOUT, [64, 256, 1024], 60.0, Clock()
        )
        return [tokens for tokens, _ in samples]

    assert measured(16) == [64, 256, 1024]
    assert measured(15) == measured(4) == [64, 256]
    with pytest.raises(OSError, match="could not be written"):
        measured(3)
