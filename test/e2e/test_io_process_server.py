"""A real server whose I/O process, and then scheduler, are killed; the next server goes on."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import psutil
import pytest

from sglang_hc.tools.bench.server import ServerProcess
from support.served import generate, numbers, post, start, wait_for
from support.waiting import is_over

pytestmark = pytest.mark.server

PROMPT = random.Random(8).choices(range(3, 900), k=300)


def io_process(server: ServerProcess) -> psutil.Process:
    below = psutil.Process(server.pid).children(recursive=True)
    found = [p for p in below if "sglang_hc.store.process.worker" in p.cmdline()]
    assert len(found) == 1
    return found[0]


def test_killed_processes_cost_no_token(models: None, tmp_path: Path) -> None:
    disk = ("--hc-disk", f"{tmp_path / 'd'}:1")
    with start(tmp_path / "log", *disk) as server:
        first, _ = generate(server, PROMPT, 40)
        history = PROMPT + first
        wait_for(lambda: numbers(server).get("disk_saved_blocks", 0) >= len(history) // 64)
        wanted, stored = generate(server, history, 16)
        assert stored == 0, "it was never forgotten"

        io_process(server).send_signal(signal.SIGKILL)
        assert generate(server, PROMPT, 40)[0] == first
        wait_for(lambda: numbers(server).get("io_restarts"))
        assert numbers(server)["io_losses"] == 1
        post(server, "/flush_cache?timeout=60")
        assert generate(server, history, 16) == (wanted, len(history) // 64 * 64)

        orphan = io_process(server)
        scheduler = orphan.parent()
        assert scheduler is not None
        scheduler.send_signal(signal.SIGKILL)
        wait_for(lambda: is_over(orphan.pid))
    with start(tmp_path / "log2", *disk) as server:
        reply, stored = generate(server, history, 16)
        assert reply == wanted
        assert stored >= 0.95 * (len(history) // 64 * 64)
        last = io_process(server)
    wait_for(lambda: is_over(last.pid))
