"""What came to a disk or left it by itself, told to whoever keeps a list of what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hc.store.process.opening import open_io
from support.disk_store import make_path
from support.io_process import MEMORY, close, disk_spec, names, save, until


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_list_made_of_the_changes_is_what_is_there(tmp_path: Path, kind: str) -> None:
    io = open_io(kind, MEMORY, disk_spec(tmp_path / "d"))
    old = make_path(3)
    save(io, old)
    close(io)

    io = open_io(kind, MEMORY, disk_spec(tmp_path / "d"))
    assert io.blocks is not None
    assert io.blocks.changes() == dict.fromkeys(names(old), True)
    assert io.blocks.changes() == {}
    mine = dict.fromkeys(names(old))
    for seed in range(1, 13):  # more than the budget holds
        blocks = make_path(8, seed=seed)
        save(io, blocks)
        mine |= dict.fromkeys(names(blocks))
    until(lambda: io.counts["disk_evicted_blocks"] + 0 * len(io.blocks.poll()) > 0, io)
    gone: set[bytes] = set()

    def told() -> bool:
        gone.update(name for name, here in io.blocks.changes().items() if not here)
        here = {name for name in mine if io.blocks.contains([name])}
        return set(mine) - gone == here

    until(told, io)
    assert 0 < len(gone) < len(mine)
    io.blocks.erase(1000, None, ())
    until(lambda: not io.blocks.poll() and not io.blocks.levels()["disk_blocks"], io)
    assert not any(here for here in io.blocks.changes().values())
    close(io)
