"""A disk that is measured and has little room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.restore import measure_disk
from sglang_hc.store.disk import DiskStore
from sglang_hc.store.outcome import Outcome
from support.clock import Clock

LAYOUT = BlockLayout(LayerPlan(0, 0, 4), StateShape(4, 8, (16, 16), "uint8"))


@pytest.mark.parametrize("disks", [1, 2])
def test_the_budget_is_enough_for_all_blocks_and_their_headers(tmp_path: Path, disks: int) -> None:
    """Else they would make room for each other, and could not be read."""
    paths = [str(tmp_path / str(number)) for number in range(disks)]
    samples, _ = measure_disk.disk_samples(paths, LAYOUT, [64, 256, 1024, 4096], 60.0, Clock())
    assert [tokens for tokens, _ in samples] == [64, 256, 1024, 4096]
    assert not any(list(Path(path).iterdir()) for path in paths)


def test_a_disk_with_little_room_gives_the_small_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the blocks of the first two sizes is needed."""
    write = DiskStore.write

    def measured(room: int) -> list[int]:
        def until_full(self: DiskStore, *block: Any) -> Outcome:
            nonlocal room
            room -= 1
            return write(self, *block) if room >= 0 else Outcome.NO_SPACE

        monkeypatch.setattr(DiskStore, "write", until_full)
        samples, _ = measure_disk.disk_samples(
            [str(tmp_path)], LAYOUT, [64, 256, 1024], 60.0, Clock()
        )
        return [tokens for tokens, _ in samples]

    assert measured(16) == [64, 256, 1024]
    assert measured(15) == measured(4) == [64, 256]
    with pytest.raises(OSError, match="could not be written"):
        measured(3)
