"""Two tensor-parallel ranks, two stages of a pipeline or two stages of two ranks each, and the disk
that they share: what happens to one rank's parts of blocks costs cache on all, never a token.

Each engine keeps a reference conversation on the device, in a namespace of its own.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from support.decisions import Note, note_decisions
from support.disk_store import Faults, failing, open_with, spoil_pages, store_of
from support.prompts import on_disk
from support.ranked_core import RankedCore, run_ranks
from support.ranked_turns import (
    BLOCKS,
    Turns,
    check_tokens,
    engine,
    talk,
)

HIT_BY = 1
"""The rank that faults happen to."""


def spoil(core: RankedCore) -> None:
    """Every page of one rank's parts on the disk loses a bit."""
    if core.rank == HIT_BY:
        (directory,) = store_of(core).directories
        for path in map(Path, map(directory.path, directory.folder.block_ids())):
            spoil_pages(path)


def meet_faults(
    rank: int, port: int, kind: str, folder: str
) -> tuple[dict[str, Turns], list[Note]]:
    faults, notes = Faults(), list[Note]()
    if rank == HIT_BY:
        open_with(faults)
    core = engine(rank, port, kind, "hidden:2,kv:2", "llama-gqa", *on_disk(folder))
    note_decisions(core.tree.tiers, notes)
    found = {"well": talk(core, "well")}
    found["damaged"] = talk(core, "damaged", lambda: spoil(core))
    faults.on_write = failing(errno.ENOSPC)
    found["full"] = talk(core, "full")
    faults.on_write = Faults().on_write
    end_pauses(core)
    faults.on_read = failing(errno.EIO)
    found["unreadable"] = talk(core, "unreadable")
    faults.on_read = Faults().on_read
    end_pauses(core)
    found["well again"] = talk(core, "well again")
    return found, notes


def end_pauses(core: RankedCore) -> None:
    disk = core.tree.tiers.disk._io
    disk._reading.succeeded()
    disk._saving.succeeded()
    store = store_of(core)
    for directory in store.directories:
        directory.breaker.succeeded()
        store.evictors[directory].look(count=False)


@pytest.mark.parametrize(
    "kind", ["tp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("pp", "grid"))]
)
def test_what_one_rank_cannot_read_or_write_all_recompute(
    models: None, tmp_path: Path, kind: str
) -> None:
    ranks = run_ranks(meet_faults, kind, str(tmp_path / "d"), ranks=4 if kind == "grid" else 2)
    found, notes = zip(*ranks, strict=True)
    for name in found[0]:
        turns = [of_rank[name] for of_rank in found]
        check_tokens(turns)
        assert turns[0].stored == (BLOCKS if name.startswith("well") else 0)
    for name, counter, outcome in (
        ("damaged", "disk_read_damaged", "damaged"),
        ("full", "disk_write_no_space", "no_space"),
        ("unreadable", "disk_read_io_error", "io_error"),
    ):
        counted = [of_rank[name].counted for of_rank in found]
        assert counted[0][counter] > 0
        assert all(one[counter] == counted[0][counter] for one in counted), "it counts for all"
        for rank in range(len(ranks)):
            is_hit = counted[0].get(f"rank{rank}_block_{outcome}", 0) > 0
            assert is_hit == (rank == HIT_BY), "the disks of the others are well"
    assert all(of_rank == notes[0] for of_rank in notes) and len(notes[0]) > 30
