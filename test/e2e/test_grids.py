"""Grids of ranks: two stages of two tensor-parallel ranks each, and two replicas of two ranks or
stages."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmark.harness.server import ServerProcess
from sglang_hc.store.disk.folders import (
    ModelFolder,
    fingerprint_of,
    model_folders,
    store_root,
)
from sglang_hc.store.disk.format import part_of
from sglang_hc.tools.disk.fsck import check
from support.conversations import check_same_tokens
from support.decisions import Note, note_decisions
from support.disk_store import spoil_pages
from support.exactness import BOUND
from support.prompts import in_directory, on_disk, prompt
from support.ranked_core import CORES, run_ranks
from support.ranked_turns import (
    BLOCKS,
    Turns,
    both_on_rank,
    check_tokens,
    engine,
    go_on,
    prompts,
    talk,
    worst_of_stage,
)
from support.served import ask_replica, post, replicas, start, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.long]

RANKS = 4
HIT_BY = "pp2-1/tp2-1"
"""The rank whose parts of blocks are damaged."""


@pytest.mark.parametrize(
    ("model", "form"),
    [
        ("llama-gqa", "hidden:2,kv:2"),
        ("llama-mha", "hidden"),
        ("qwen3", "recompute:1,kv:3"),
        ("deepseek-v2", "kv"),
    ],
)
def test_each_form_on_two_stages_of_two_ranks(models: None, model: str, form: str) -> None:
    found = run_ranks(both_on_rank, "grid", model, form, ranks=RANKS)
    assert len({str(rank.kept["tokens"]) for rank, _ in found}) == 1
    for rank, info in found:
        assert rank.stats["layer_plan"] == (form if ":" in form else f"{form}:4")
        check_same_tokens(rank)
        assert worst_of_stage(rank) <= BOUND["float32"]
        assert [counted["restored_tokens"] for counted in info["ranks"]] == (
            [info["restored_tokens"]] * RANKS
        )


def part_folder(disk: Path, part: str) -> ModelFolder:
    """Where the parts of one rank lie."""
    found = model_folders(store_root(str(disk)))
    (one,) = [f for f in found if part_of(fingerprint_of(f)[0], part) in fingerprint_of(f)]
    return one


def spoil(disk: Path, part: str) -> None:
    """Every part of a block that one rank stored loses a bit of each page."""
    folder = part_folder(disk, part)
    for path in map(Path, map(folder.block_path, folder.block_ids())):
        spoil_pages(path, header=False)


def on_grid(
    rank: int, port: int, folder: str, *server: str
) -> tuple[Turns, Turns, list[int], list[Note]]:
    core = engine(rank, port, *server)
    notes: list[Note] = []
    note_decisions(core.tree.tiers, notes)
    well = talk(core, "well")
    damaged = talk(core, "damaged", lambda: spoil(Path(folder), HIT_BY) if rank == 3 else None)
    left = core.ask_replica(prompts("later")[0], 60).tokens
    core.settle()
    core.tree.release_host_resources()
    return well, damaged, left, notes


def test_the_disks_of_two_stages_of_two_ranks(models: None, tmp_path: Path) -> None:
    """What one rank finds damaged all four recompute; the next server goes on from all disks."""
    folder = tmp_path / "d"
    folder.mkdir()
    server = ("grid", "hidden:2,kv:2", "llama-gqa", *on_disk(folder))
    found = run_ranks(on_grid, str(folder), *server, ranks=RANKS)
    well, damaged = ([of_rank[turn] for of_rank in found] for turn in (0, 1))
    check_tokens(well)
    check_tokens(damaged)
    assert well[0].stored == BLOCKS and damaged[0].stored == 0
    for turns in damaged:
        assert turns.counted["disk_read_damaged"] > 0
    assert [
        damaged[0].counted.get(f"rank{rank}_block_damaged", 0) > 0 for rank in range(RANKS)
    ] == ([False, False, False, True])
    notes = found[0][3]
    assert all(of_rank[3] == notes for of_rank in found) and len(notes) > 30
    for stage, rank in itertools.product((0, 1), repeat=2):
        assert any(part_folder(folder, f"pp2-{stage}/tp2-{rank}").block_ids())
    (report,) = check([str(folder)], False)
    assert report.blocks and not report.findings
    later = run_ranks(go_on, *server, ranks=RANKS)
    check_tokens(later)
    assert later[0].said == found[0][2] and later[0].stored == BLOCKS


def beside_store(rank: int, port: int, folder: str) -> Turns:
    return talk(
        engine(rank, port, "grid", "hidden:2,kv:2", "llama-gqa", *in_directory(folder)), "well"
    )


def test_a_remote_store_of_two_stages_of_two_ranks(models: None, tmp_path: Path) -> None:
    found = run_ranks(beside_store, str(tmp_path), ranks=RANKS)
    check_tokens(found)
    assert found[0].stored == BLOCKS
    keys = {folder.path for folder in model_folders(store_root(str(tmp_path)))}
    assert len(keys) == RANKS, "each rank has its own"


@pytest.mark.server
@pytest.mark.parametrize("kind", CORES)
def test_two_replicas_of_two_ranks(models: None, tmp_path: Path, kind: str) -> None:
    """Ranks agree within their replica: what one rank's part of the disk lost both replicas
    recompute. What is in a remote store is there for both."""
    disk = tmp_path / "disk"
    grid = ("--dp-size", "2", f"--{kind}-size", "2")
    flags = (*grid, "--hc-disk", f"{disk}:2")
    trace = ("--hc-trace", str(tmp_path / "t.jsonl"))
    with start(tmp_path / "log", *flags, *trace, env=CORES[kind].env) as server:
        numbers = replicas(server)
        assert [len(one["ranks"]) for one in numbers] == [2, 2]
        assert all(0.04 * 2**30 < one["host_bytes"] <= 0.05 * 2**30 for one in numbers)
        histories = []
        for replica in (0, 1):
            tokens = prompt(replica, 300)
            histories.append(tokens + ask_replica(server, tokens, replica)[0])
        kept = [ask_replica(server, history, r)[0] for r, history in enumerate(histories)]
        for replica in (0, 1):
            for seed in range(10, 16):
                ask_replica(server, prompt(seed, 300), replica)
        for replica, history in enumerate(histories):
            tokens, found = ask_replica(server, history, replica)
            assert tokens == kept[replica], "the tokens of a replica that never forgot"
            assert found.get("device", 0) == 0 and found.get("host", 0) > 300
        blocks = len(histories[0]) // 64
        wait_for(lambda: have_saved(server, "disk", blocks) == 2)
        post(server, "/flush_cache?timeout=60")
        spoil(disk, f"{kind}2-1")
        for replica, history in enumerate(histories):
            tokens, found = ask_replica(server, history, replica)
            assert tokens == kept[replica]
            assert found.get("storage", 0) == 0
        wait_for(lambda: all("disk_read_damaged" in one for one in replicas(server)))
        for hit in replicas(server):
            assert hit["disk_read_damaged"] == hit["rank1_block_damaged"]
    parts = [part_folder(disk, f"{kind}2-{rank}") for rank in (0, 1)]
    assert parts[0] != parts[1], "both replicas store the parts of a rank in one place"
    names = {path.name for path in tmp_path.glob("t.jsonl.*")}
    assert names == {f"t.jsonl.dp{replica}.{kind}{rank}" for replica in (0, 1) for rank in (0, 1)}
    with start(
        tmp_path / "log2", *flags, *in_directory(tmp_path / "s"), env=CORES[kind].env
    ) as server:
        history = prompt(20, 300)
        history += ask_replica(server, history, 0)[0]
        wanted, _ = ask_replica(server, history, 0)
        wait_for(lambda: have_saved(server, "remote", blocks) == 1)
        tokens, found = ask_replica(server, history, 1)
        assert tokens == wanted and found.get("storage", 0) == blocks * 64
        tokens, found = ask_replica(server, histories[0], 0)
        assert tokens == kept[0] and found.get("storage", 0) == blocks * 64


def have_saved(server: ServerProcess, where: str, blocks: int) -> int:
    """How many replicas have saved so many blocks, each rank its part of them. SGLang lists the
    replicas in the order of their answers."""
    return sum(
        all(one.get(f"{where}_saved_blocks", 0) >= blocks for one in numbers["ranks"])
        for numbers in replicas(server)
    )
