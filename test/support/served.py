"""A real server asked by plain HTTP: replies, where their prompts came from, and its numbers."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmark.harness.server import ServerProcess
from support.core import MODELS
from support.profiles import FREE_LOADING
from support.waiting import HANGS_S, until

ROOT = Path(__file__).resolve().parents[2]
ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python")}


def start(log: Path, *flags: str, env: Mapping[str, str] | None = None) -> ServerProcess:
    """A server of a small model whose device holds 640 tokens. env: besides ENV."""
    argv = (
        "--model-path", str(MODELS / "llama-mha"), "--dtype", "float32", "--skip-server-warmup",
        "--max-total-tokens", "640", "--hc-profile", str(FREE_LOADING), "--hc-forms", "kv",
        "--hc-host-size-gb", "0.2", *flags,
    )  # fmt: skip
    return ServerProcess("sglang_hc.launch_server", argv, {**ENV, **(env or {})}, log)


def post(server: ServerProcess, path: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(
        server.url + path, data, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=HANGS_S) as reply:
        return reply.read().decode()


def generate(server: ServerProcess, tokens: list[int], new: int) -> tuple[list[int], int]:
    """(tokens, how many of the prompt came from below the host tier)."""
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling}
    reply = json.loads(post(server, "/generate", body))
    details = reply["meta_info"]["cached_tokens_details"] or {}
    return reply["output_ids"], details.get("storage", 0)


def numbers(server: ServerProcess) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/server_info", timeout=HANGS_S) as reply:
        return json.load(reply)["internal_states"][0]["hc"]


def wait_for(what: Callable[[], object]) -> None:
    """Ask a server until something is true."""
    until(what, pause=0.1)
