"""Two tensor-parallel ranks, or two stages of a pipeline, and the disk that they share: a new
server goes on where the last one stopped, and what happens to one rank's parts of blocks costs
cache on both, never a token.

Each engine keeps a reference conversation on the device, in a namespace of its own.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.folders import model_folders, store_root
from sglang_hc.tools.disk.fsck import check
from support.disk_store import Faults, FaultyBackend, failing
from support.ranked_core import CORES, KINDS, RankedCore, run_ranks
from support.ranked_turns import BLOCKS, FLAGS, Turns, check_tokens, go_on, talk, talk_and_stop

HIT_BY = 1
"""The rank that faults happen to."""


def engine(rank: int, port: int, kind: str, form: str, folder: str) -> RankedCore:
    model = "deepseek-v2" if "deepseek" in folder else "llama-gqa"
    disk = ("--hc-disk", f"{folder}:1")
    return KINDS[kind](rank, port, "--hc-forms", form, *disk, *FLAGS, model=model)


def first_server(
    rank: int, port: int, kind: str, form: str, folder: str
) -> tuple[Turns, list[int]]:
    return talk_and_stop(engine(rank, port, kind, form, folder))


def second_server(rank: int, port: int, kind: str, form: str, folder: str) -> Turns:
    return go_on(engine(rank, port, kind, form, folder))


@pytest.mark.parametrize(
    ("kind", "form", "name"),
    [
        ("tp", "hidden:2,kv:2", "d"),
        pytest.param("tp", "hidden", "d", marks=pytest.mark.slow),
        pytest.param("tp", "kv", "d", marks=pytest.mark.slow),
        pytest.param("tp", "kv", "deepseek", marks=pytest.mark.slow),
        pytest.param("pp", "recompute:1,hidden:3", "d", marks=pytest.mark.slow),
        pytest.param("pp", "hidden", "d", marks=pytest.mark.slow),
        pytest.param("pp", "kv", "d", marks=pytest.mark.slow),
    ],
)
def test_the_next_server_goes_on_from_both_parts(
    models: None, tmp_path: Path, kind: str, form: str, name: str
) -> None:
    folder = tmp_path / name
    found = run_ranks(first_server, kind, form, str(folder))
    check_tokens([turns for turns, _ in found])
    assert all(turns.stored == BLOCKS for turns, _ in found)
    parts = [Path(part.path).name for part in model_folders(store_root(str(folder)))]
    assert len(parts) == 2 and parts[0][:32] == parts[1][:32], "two parts of one model"
    assert all(report.blocks and not report.findings for report in check([str(folder)], False))
    later = run_ranks(second_server, kind, form, str(folder))
    check_tokens(later)
    assert later[0].said == found[0][1] and later[0].stored == BLOCKS


def own_directories(core: RankedCore) -> Sequence[Directory]:
    found: Sequence[Directory] = core.tree.tiers.disk._io._store._inner._store.directories
    return found


def spoil(core: RankedCore) -> None:
    """Every page of one rank's parts on the disk loses a bit."""
    if core.rank == HIT_BY:
        (directory,) = own_directories(core)
        for path in map(Path, map(directory.path, directory.folder.block_ids())):
            content = bytearray(path.read_bytes())
            for place in range(700, len(content), 4096):
                content[place] ^= 1
            path.write_bytes(content)


def meet_faults(rank: int, port: int, kind: str, folder: str) -> dict[str, Turns]:
    from sglang_hc.store.disk import DiskStore

    faults, opened = Faults(), DiskStore.open
    if rank == HIT_BY:
        DiskStore.open = lambda *args, **options: opened(
            *args, backend=FaultyBackend(faults), **options
        )
    core = engine(rank, port, kind, "hidden:2,kv:2", folder)
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
    for directory in own_directories(core):
        directory.breaker.succeeded()
        disk._store._inner._store.evictors[directory].look_for_room()


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
