"""A real server asked by plain HTTP: replies, where their prompts came from, and its numbers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmark.harness.server import ServerProcess
from support.core import MODELS
from support.profiles import FREE_LOADING
from support.prompts import prompt
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


def _read(request: str | urllib.request.Request) -> Any:
    """An answer: what its JSON says, or its text."""
    with urllib.request.urlopen(request, timeout=HANGS_S) as reply:
        text = reply.read().decode()
    return json.loads(text) if text.startswith(("{", "[")) else text


def get(server: ServerProcess, path: str) -> Any:
    return _read(server.url + path)


def posting(server: ServerProcess, path: str, body: Any = None) -> urllib.request.Request:
    """Lone surrogates are sent as escapes, as a client may."""
    data = json.dumps({} if body is None else body).encode()
    return urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})


def post(server: ServerProcess, path: str, body: Any = None) -> Any:
    return _read(posting(server, path, body))


def delete(server: ServerProcess, path: str, body: Any) -> Any:
    request = posting(server, path, body)
    request.method = "DELETE"
    return _read(request)


def refusal(server: ServerProcess, path: str, body: Any) -> tuple[int, str]:
    """Status and text of the answer to a request that must not be served."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        post(server, path, body)
    return raised.value.code, raised.value.read().decode()


def ask(
    server: ServerProcess, tokens: list[int], new: int = 8, sampling: Any = None, **options: Any
) -> dict[str, Any]:
    """SGLang's reply to a prompt. sampling: parameters besides. options: of the request."""
    parameters = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True, **(sampling or {})}
    body = {"input_ids": tokens, "sampling_params": parameters, **options}
    reply: dict[str, Any] = post(server, "/generate", body)
    return reply


def chat(server: ServerProcess, number: int, **fields: Any) -> int:
    """Cached tokens of a chat of its own."""
    messages = [{"role": "user", "content": f"{number} bottles of state. " * 12}]
    body = {"model": "m", "max_tokens": 2, "temperature": 0, "messages": messages, **fields}
    usage = post(server, "/v1/chat/completions", body)["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))


def message(server: ServerProcess, number: int, control: Any = None, **fields: Any) -> int:
    """The same by Anthropic's route; the first of two blocks has the cache control."""
    first = {"type": "text", "text": f"{number} crates of state. " * 12, "cache_control": control}
    content = [first, {"type": "text", "text": "And nothing else? " * 12}]
    body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    usage = post(server, "/v1/messages", body | fields)["usage"]
    return int(usage.get("cache_read_input_tokens") or 0)


def generate(server: ServerProcess, tokens: list[int], new: int) -> tuple[list[int], int]:
    """(tokens, how many of the prompt came from below the host tier)."""
    reply = ask(server, tokens, new)
    details = reply["meta_info"]["cached_tokens_details"] or {}
    return reply["output_ids"], details.get("storage", 0)


class Saved(NamedTuple):
    """A history that lies below host memory as whole blocks, and the 16 tokens that follow it."""

    history: list[int]
    blocks: int
    wanted: list[int]

    @property
    def answer(self) -> tuple[list[int], int]:
        """What `generate` gives for it on a server that goes on from below."""
        return self.wanted, self.blocks * 64


def first_turn(server: ServerProcess, prompt: list[int], counter: str) -> Saved:
    """A first turn, when each rank has counted all of its blocks as saved."""
    history = prompt + generate(server, prompt, 40)[0]
    blocks = len(history) // 64

    def is_saved() -> bool:
        found = numbers(server)
        return all(one.get(counter, 0) >= blocks for one in found.get("ranks", [found]))

    wait_for(is_saved)
    wanted, stored = generate(server, history, 16)
    assert stored == 0, "it was never forgotten"
    return Saved(history, blocks, wanted)


def ask_replica(
    server: ServerProcess, tokens: list[int], replica: int
) -> tuple[list[int], dict[str, int]]:
    """24 greedy tokens of one replica, and where the prompt came from."""
    reply = ask(server, tokens, 24, routed_dp_rank=replica)
    return reply["output_ids"], reply["meta_info"]["cached_tokens_details"] or {}


def replicas_remember(server: ServerProcess) -> tuple[list[list[int]], list[list[int]]]:
    """A conversation of each of two replicas leaves its device and comes back from host memory as
    if it had not. Returns their histories, and the replies to these."""
    histories, kept = [], []
    for replica in (0, 1):
        tokens = prompt(replica, 300)
        histories.append(tokens + ask_replica(server, tokens, replica)[0])
        wanted, found = ask_replica(server, histories[-1], replica)
        assert found.get("device", 0) > 300
        kept.append(wanted)
    for replica in (0, 1):
        for seed in range(10, 16):
            ask_replica(server, prompt(seed, 300), replica)
    for replica, history in enumerate(histories):
        tokens, found = ask_replica(server, history, replica)
        assert tokens == kept[replica], "the tokens of a replica that never forgot"
        assert found.get("device", 0) == 0 and found.get("host", 0) > 300
    return histories, kept


def replicas(server: ServerProcess) -> list[dict[str, Any]]:
    """What each replica counted."""
    return [state["hc"] for state in get(server, "/server_info")["internal_states"]]


def numbers(server: ServerProcess) -> dict[str, Any]:
    return replicas(server)[0]


def wait_for(what: Callable[[], object]) -> None:
    """Ask a server until something is true."""
    until(what, pause=0.1)
