"""A real server whose scheduler is killed; the next server goes on from its disk."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from support.prompts import on_disk, prompt
from support.served import first_turn, generate, start

pytestmark = pytest.mark.server

PROMPT = prompt(8, 300)


def test_a_killed_scheduler_costs_no_token(models: None, tmp_path: Path) -> None:
    disk = on_disk(tmp_path / "d")
    with start(tmp_path / "log", *disk) as server:
        saved = first_turn(server, PROMPT, "disk_saved_blocks")
        below = psutil.Process(server.pid).children(recursive=True)
        (scheduler,) = [one for one in below if "scheduler" in "".join(one.cmdline())]
        scheduler.send_signal(signal.SIGKILL)
    with start(tmp_path / "log2", *disk) as server:
        assert generate(server, saved.history, 16) == saved.answer
