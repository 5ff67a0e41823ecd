"""Two tensor-parallel ranks, or two stages of a pipeline, and the disk that they share: a new
server goes on where the last one stopped, and what happens to one rank's parts of blocks costs
cache on both, never a token.

Each engine keeps a reference conversation on the device, in a namespace of its own.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from sglang_hc.store.disk.folders import model_folders, store_root
from sglang_hc.tools.disk.fsck import check
from support.disk_store import Faults, failing, open_with, spoil_pages, store_of
from support.prompts import on_disk
from support.ranked_core import CORES, RankedCore, run_ranks
from support.ranked_turns import (
    BLOCKS,
    Turns,
    check_tokens,
    engine,
    go_on,
    talk,
    talk_and_stop,
)

HIT_BY = 1
"""The rank that faults happen to."""


@pytest.mark.parametrize(
    ("kind", "form", "model"),
    [
        ("tp", "hidden:2,kv:2", "llama-gqa"),
        pytest.param("tp", "hidden", "llama-gqa", marks=pytest.mark.slow),
        pytest.param("tp", "kv", "llama-gqa", marks=pytest.mark.slow),
        pytest.param("tp", "kv", "deepseek-v2", marks=pytest.mark.slow),
        pytest.param("pp", "recompute:1,hidden:3", "llama-gqa", marks=pytest.mark.slow),
        pytest.param("pp", "hidden", "llama-gqa", marks=pytest.mark.slow),
        pytest.param("pp", "kv", "llama-gqa", marks=pytest.mark.slow),
    ],
)
def test_the_next_server_goes_on_from_both_parts(
    models: None, tmp_path: Path, kind: str, form: str, model: str
) -> None:
    folder = tmp_path / "d"
    server = (kind, form, model, *on_disk(folder))
    found = run_ranks(talk_and_stop, *server)
    check_tokens([turns for turns, _ in found])
    assert all(turns.stored == BLOCKS for turns, _ in found)
    parts = [Path(part.path).name for part in model_folders(store_root(str(folder)))]
    assert len(parts) == 2 and parts[0][:32] == parts[1][:32], "two parts of one model"
    assert all(report.blocks and not report.findings for report in check([str(folder)], False))
    later = run_ranks(go_on, *server)
    check_tokens(later)
    assert later[0].said == found[0][1] and later[0].stored == BLOCKS


def spoil(core: RankedCore) -> None:
    """Every page of one rank's parts on the disk loses a bit."""
    if core.rank == HIT_BY:
        (directory,) = store_of(core).directories
        for path in map(Path, map(directory.path, directory.folder.block_ids())):
            spoil_pages(path)


def meet_faults(rank: int, port: int, kind: str, folder: str) -> dict[str, Turns]:
    faults = Faults()
    if rank == HIT_BY:
        open_with(faults)
    core = engine(rank, port, kind, "hidden:2,kv:2", "llama-gqa", *on_disk(folder))
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
    return found


def end_pauses(core: RankedCore) -> None:
    disk = core.tree.tiers.disk._io
    disk._reading.succeeded()
    disk._saving.succeeded()
    store = store_of(core)
    for directory in store.directories:
        directory.breaker.succeeded()
        store.evictors[directory].look(count=False)


@pytest.mark.parametrize("kind", CORES)
def test_what_one_rank_cannot_read_or_write_both_recompute(
    models: None, tmp_path: Path, kind: str
) -> None:
    found = run_ranks(meet_faults, kind, str(tmp_path / "d"))
    for name in found[0]:
        turns = [of_rank[name] for of_rank in found]
        check_tokens(turns)
        assert turns[0].stored == (BLOCKS if name.startswith("well") else 0)
    for name, counter, outcome in (
        ("damaged", "disk_read_damaged", "damaged"),
        ("full", "disk_write_no_space", "no_space"),
        ("unreadable", "disk_read_io_error", "io_error"),
    ):
        first, second = (of_rank[name].counted for of_rank in found)
        assert first[counter] == second[counter] > 0, "it counts for all"
        assert first[f"rank{HIT_BY}_block_{outcome}"] > 0
        assert not first.get(f"rank{1 - HIT_BY}_block_{outcome}"), "the other rank's disk is well"
