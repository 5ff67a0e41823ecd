"""Two tensor-parallel ranks, or two stages of a pipeline, and their disks: a new server goes on
where the last one stopped, and what happens to one rank's disk costs cache on both, never a token.

Each engine keeps a reference conversation on the device, in a namespace of its own.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.tools.disk.fsck import check
from support.disk_store import Faults, FaultyBackend, failing
from support.ranked_core import CORES, KINDS, RankedCore, run_ranks
from support.ranked_turns import BLOCKS, FLAGS, Turns, check_tokens, go_on, talk, talk_and_stop

HIT_BY = 1
"""The rank that faults happen to."""


def engine(rank: int, port: int, kind: str, form: str, folder: str, *flags: str) -> RankedCore:
    model = "deepseek-v2" if "deepseek" in folder else "llama-gqa"
    disk = ("--hc-disk", f"{folder}:1")
    return KINDS[kind](rank, port, "--hc-forms", form, *disk, *FLAGS, *flags, model=model)


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
def test_the_next_server_goes_on_from_both_disks(
    models: None, tmp_path: Path, kind: str, form: str, name: str
) -> None:
    folder = tmp_path / name
    found = run_ranks(first_server, kind, form, str(folder))
    check_tokens([turns for turns, _ in found])
    assert all(turns.stored == BLOCKS for turns, _ in found)
    assert sorted(part.name for part in folder.iterdir()) == [f"{kind}2-0", f"{kind}2-1"]
    assert all(report.blocks and not report.findings for report in check([str(folder)], False))
    later = run_ranks(second_server, kind, form, str(folder))
    check_tokens(later)
    assert later[0].said == found[0][1] and later[0].stored == BLOCKS


def spoil(core: RankedCore, kind: str, folder: str) -> None:
    """Every block on one rank's disk loses a byte."""
    if core.rank == HIT_BY:
        for slab in Path(folder, f"{kind}2-{HIT_BY}", "sglang-hc").glob("slab-*.dat"):
            content = bytearray(slab.read_bytes())
            for place in range(4096 + 700, len(content), 4096):
                content[place] ^= 1
            slab.write_bytes(content)


def meet_faults(rank: int, port: int, kind: str, folder: str) -> dict[str, Turns]:
    from sglang_hc.store.disk import DiskStore

    faults, opened = Faults(), DiskStore.open
    if rank == HIT_BY:
        DiskStore.open = lambda *args, **options: opened(
            *args, backend=FaultyBackend(faults), **options
        )
    scrub = ("--hc-scrub-mb-s", "0")  # it would find damage before a request does
    core = engine(rank, port, kind, "hidden:2,kv:2", folder, *scrub)
    found = {"well": talk(core, "well")}
    found["damaged"] = talk(core, "damaged", lambda: spoil(core, kind, folder))
    faults.on_write = faults.on_allocate = failing(errno.ENOSPC)
    found["full"] = talk(core, "full")
    faults.on_write = faults.on_allocate = lambda path: None
    agreed = core.tree.tiers.disk._io
    for breaker in (agreed._breaker, *(d.breaker for d in agreed._inner._store.directories)):
        breaker.succeeded()  # its pause is over
    faults.on_read = failing(errno.EIO)
    found["unreadable"] = talk(core, "unreadable")
    return found


@pytest.mark.parametrize("kind", CORES)
def test_what_one_rank_cannot_read_or_write_both_recompute(
    models: None, tmp_path: Path, kind: str
) -> None:
    found = run_ranks(meet_faults, kind, str(tmp_path / "d"))
    for name in found[0]:
        turns = [of_rank[name] for of_rank in found]
        check_tokens(turns)
        assert turns[0].stored == (BLOCKS if name == "well" else 0)
    for name, counter, outcome in (
        ("damaged", "disk_read_damaged", "damaged"),
        ("full", "disk_write_no_space", "no_space"),
        ("unreadable", "disk_read_io_error", "io_error"),
    ):
        first, second = (of_rank[name].counted for of_rank in found)
        assert first[counter] == second[counter] > 0, "it counts for all"
        assert first[f"rank{HIT_BY}_block_{outcome}"] > 0
        assert not first.get(f"rank{1 - HIT_BY}_block_{outcome}"), "the other rank's disk is well"


def lose_the_process(
    rank: int, port: int, kind: str, folder: str
) -> tuple[Turns, Turns, dict[str, Any]]:
    import psutil

    core = engine(rank, port, kind, "kv", folder, "--hc-io", "process")

    def kill() -> None:
        if rank == HIT_BY:
            below = psutil.Process(os.getpid()).children(recursive=True)
            (worker,) = [p for p in below if "sglang_hc.store.process.worker" in p.cmdline()]
            worker.send_signal(signal.SIGKILL)
            worker.wait()

    during = talk(core, "killed", kill)
    core.tree.tiers.disk._io._breaker.succeeded()  # its pause is over
    return during, talk(core, "after"), core.tree.stats()


@pytest.mark.slow
@pytest.mark.parametrize("kind", CORES)
def test_one_ranks_io_process_dies(models: None, tmp_path: Path, kind: str) -> None:
    found = run_ranks(lose_the_process, kind, str(tmp_path / "d"))
    for turn in (0, 1):
        check_tokens([of_rank[turn] for of_rank in found])
    assert [after.stored for _, after, _ in found] == [BLOCKS] * 2, "the disk is used again"
    assert [stats.get("io_losses", 0) for _, _, stats in found] == [0, 1]
    assert [stats.get("io_restarts", 0) for _, _, stats in found] == [0, 1]
