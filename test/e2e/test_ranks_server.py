"""`--tp-size 2` and `--pp-size 2` on a real server, alone and with `--dp-size 2`: what clients see,
what each rank counted, and its disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.harness.server import ServerProcess
from sglang_hc.store.disk.folders import ModelFolder, fingerprint_of, model_folders, store_root
from sglang_hc.store.disk.format import part_of
from sglang_hc.tools.cli.main import main
from support.disk_store import spoil_pages
from support.prompts import in_directory, prompt
from support.ranked_core import CORES
from support.served import (
    ask_replica,
    first_turn,
    generate,
    numbers,
    post,
    replicas,
    replicas_remember,
    start,
    wait_for,
)

pytestmark = [pytest.mark.server, pytest.mark.slow]

PROMPT = prompt(8, 300)


@pytest.mark.parametrize("kind", CORES)
def test_a_server_of_two_ranks(models: None, tmp_path: Path, kind: str) -> None:
    folder, trace = tmp_path / "d", tmp_path / "trace.jsonl"
    flags, env = (f"--{kind}-size", "2", "--hc-disk", f"{folder}:2"), CORES[kind].env
    with start(tmp_path / "log", *flags, "--hc-trace", str(trace), env=env) as server:
        saved = first_turn(server, PROMPT, "disk_saved_blocks")
        assert 0.09 * 2**30 < numbers(server)["host_bytes"] <= 0.1 * 2**30, "half for each rank"
        post(server, "/flush_cache?timeout=60")
        assert generate(server, saved.history, 16) == saved.answer
        restored = "restored_tokens"
        wait_for(lambda: len({one.get(restored) for one in numbers(server)["ranks"]}) == 1)
        assert numbers(server)[restored] >= saved.blocks * 64
    traces = [trace.with_name(f"{trace.name}.{kind}{rank}") for rank in (0, 1)]
    assert all(path.stat().st_size > 0 for path in traces)
    with start(tmp_path / "log2", *flags, env=env) as server:
        assert generate(server, saved.history, 16) == saved.answer
    assert main(["fsck", str(folder)]) == 0


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
        histories, kept = replicas_remember(server)
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
