"""A real server whose scheduler is killed; the next server goes on from its disk."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import psutil
import pytest

from support.served import generate, numbers, start, wait_for

pytestmark = pytest.mark.server

PROMPT = random.Random(8).choices(range(3, 900), k=300)


def test_a_killed_scheduler_costs_no_token(models: None, tmp_path: Path) -> None:
    disk = ("--hc-disk", f"{tmp_path / 'd'}:1")
    with start(tmp_path / "log", *disk) as server:
        first, _ = generate(server, PROMPT, 40)
        history = PROMPT + first
        blocks = len(history) // 64
        wait_for(lambda: numbers(server).get("disk_saved_blocks", 0) >= blocks)
        wanted, stored = generate(server, history, 16)
        assert stored == 0, "it was never forgotten"
        below = psutil.Process(server.pid).children(recursive=True)
        (scheduler,) = [one for one in below if "scheduler" in "".join(one.cmdline())]
        scheduler.send_signal(signal.SIGKILL)
    with start(tmp_path / "log2", *disk) as server:
        assert generate(server, history, 16) == (wanted, blocks * 64)
