"""A disk that is measured and has little room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.restore import probe_disk
from sglang_hc.store.disk import DiskStore
from sglang_hc.store.outcome import Outcome
from support.clock import Clock

LAYOUT = BlockLayout(LayerPlan(0, 0, 4), StateShape(4, 8, (16, 16), "uint8"))


@pytest.mark.parametrize("disks", [1, 2])
def test_the_budget_is_enough_for_all_blocks_and_their_headers(tmp_path: Path, disks: int) -> None:
    """Else they would make room for each other, and could not be read."""
    paths = [str(tmp_path / str(number)) for number in range(disks)]
    assert blocks_of(paths) == [1, probe_disk.BLOCKS]
    assert not any(list(Path(path).iterdir()) for path in paths)


def blocks_of(paths: list[str], clock: Callable[[], float] | None = None) -> list[int]:
    return [blocks for blocks, _ in probe_disk.read_seconds(paths, LAYOUT, clock or Clock())]


def test_a_disk_with_little_room_is_read_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for two blocks is needed."""
    write = DiskStore.write

    def measured(room: int) -> list[int]:
        def until_full(self: DiskStore, *block: Any) -> Outcome:
            nonlocal room
            room -= 1
            return write(self, *block) if room >= 0 else Outcome.NO_SPACE

        monkeypatch.setattr(DiskStore, "write", until_full)
        return blocks_of([str(tmp_path)])

    assert measured(5) == [1, 5]
    assert measured(2) == [1, 2]
    with pytest.raises(OSError, match="could not be written"):
        measured(1)


def test_a_disk_that_writes_slowly_is_read_less(tmp_path: Path) -> None:
    clock = Clock()

    def ticking() -> float:
        clock.now += 2 * probe_disk.WRITE_S
        return clock.now

    assert blocks_of([str(tmp_path)], ticking) == [1, 2]


def test_large_blocks_take_no_more_memory_than_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_disk, "MOST_BYTES", 5 * LAYOUT.slot_bytes)
    assert blocks_of([str(tmp_path)]) == [1, 5]
    monkeypatch.setattr(probe_disk, "MOST_BYTES", 1)
    assert blocks_of([str(tmp_path)]) == [1, 2]
