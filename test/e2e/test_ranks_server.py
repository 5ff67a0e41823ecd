"""`--tp-size 2` and `--pp-size 2` on a real server: what clients see, what each rank counted, and
its disk."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.server import ServerProcess
from sglang_hc.tools.cli.main import main
from support.ranked_core import CORES
from support.served import generate, numbers, post, start, wait_for

pytestmark = [pytest.mark.server, pytest.mark.slow]

PROMPT = random.Random(8).choices(range(3, 900), k=300)


def ranks(server: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = numbers(server)["ranks"]
    return found


@pytest.mark.parametrize("kind", CORES)
def test_a_server_of_two_ranks(models: None, tmp_path: Path, kind: str) -> None:
    folder, trace = tmp_path / "d", tmp_path / "trace.jsonl"
    flags, env = (f"--{kind}-size", "2", "--hc-disk", f"{folder}:2"), CORES[kind].env
    with start(tmp_path / "log", *flags, "--hc-trace", str(trace), env=env) as server:
        first, _ = generate(server, PROMPT, 40)
        history = PROMPT + first
        blocks = len(history) // 64
        wait_for(lambda: all(one.get("disk_saved_blocks", 0) >= blocks for one in ranks(server)))
        assert 0.09 * 2**30 < numbers(server)["host_bytes"] <= 0.1 * 2**30, "half for each rank"
        wanted, stored = generate(server, history, 16)
        assert stored == 0, "it was never forgotten"

        post(server, "/flush_cache?timeout=60")
        assert generate(server, history, 16) == (wanted, blocks * 64)
        wait_for(lambda: len({one.get("restored_tokens") for one in ranks(server)}) == 1)
        assert numbers(server)["restored_tokens"] >= blocks * 64
    traces = [trace.with_name(f"{trace.name}.{kind}{rank}") for rank in (0, 1)]
    assert all(path.stat().st_size > 0 for path in traces)
    with start(tmp_path / "log2", *flags, env=env) as server:
        reply, stored = generate(server, history, 16)
        assert reply == wanted and stored == blocks * 64
    assert main(["fsck", str(folder)]) == 0
