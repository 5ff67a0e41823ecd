"""`--tp-size 2` and `--pp-size 2` on a real server: what clients see, what each rank counted, and
its disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hc.tools.cli.main import main
from support.prompts import prompt
from support.ranked_core import CORES
from support.served import first_turn, generate, numbers, post, start, wait_for

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
