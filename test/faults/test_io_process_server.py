"""A real server whose I/O process, and then scheduler, are killed; the next server goes on."""

from __future__ import annotations

import json
import random
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_hc.bench.server import ServerProcess
from support.core import MODELS
from support.profiles import FREE_LOADING

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python")}
PROMPT = [random.Random(8).randrange(3, 900) for _ in range(300)]


def start(folder: Path, log: Path) -> ServerProcess:
    flags = (
        "--model-path", str(MODELS / "llama-mha"), "--dtype", "float32", "--skip-server-warmup",
        "--max-total-tokens", "640", "--hc-profile", str(FREE_LOADING), "--hc-forms", "kv",
        "--hc-host-size-gb", "0.2", "--hc-disk", f"{folder}:1",
    )  # fmt: skip
    return ServerProcess("sglang_hc.launch_server", flags, ENV, log)


def post(server: ServerProcess, path: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(
        server.url + path, data, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read().decode()


def generate(server: ServerProcess, tokens: list[int], new: int) -> tuple[list[int], int]:
    """(tokens, how many of the prompt came from the disk)."""
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling}
    reply = json.loads(post(server, "/generate", body))
    details = reply["meta_info"]["cached_tokens_details"] or {}
    return reply["output_ids"], details.get("storage", 0)


def numbers(server: ServerProcess) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/server_info", timeout=60) as reply:
        return json.load(reply)["internal_states"][0]["hc"]


def wait_for(what: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.1)


def io_process(server: ServerProcess) -> psutil.Process:
    below = psutil.Process(server.pid).children(recursive=True)
    found = [p for p in below if "sglang_hc.store.io_process" in p.cmdline()]
    assert len(found) == 1
    return found[0]


def is_gone(process: psutil.Process) -> bool:
    """Whoever inherited it may not have looked yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_killed_processes_cost_no_token(models: None, tmp_path: Path) -> None:
    with start(tmp_path / "d", tmp_path / "log") as server:
        first, _ = generate(server, PROMPT, 40)
        history = PROMPT + first
        wait_for(lambda: numbers(server).get("disk_saved_blocks", 0) >= len(history) // 64)
        wanted, stored = generate(server, history, 16)
        assert stored == 0, "it was never forgotten"

        io_process(server).send_signal(signal.SIGKILL)
        assert generate(server, PROMPT, 40)[0] == first
        wait_for(lambda: numbers(server).get("io_restarts"))
        assert numbers(server)["io_losses"] == 1
        post(server, "/flush_cache")
        assert generate(server, history, 16) == (wanted, len(history) // 64 * 64)

        orphan = io_process(server)
        scheduler = orphan.parent()
        assert scheduler is not None
        scheduler.send_signal(signal.SIGKILL)
        wait_for(lambda: is_gone(orphan))
    with start(tmp_path / "d", tmp_path / "log2") as server:
        reply, stored = generate(server, history, 16)
        assert reply == wanted
        assert stored >= 0.95 * (len(history) // 64 * 64)
        last = io_process(server)
    wait_for(lambda: is_gone(last))
