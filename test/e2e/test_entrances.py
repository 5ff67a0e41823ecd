"""Values that no server may fall over, sent to every HTTP entrance of a real one with two tokenizer
workers: status 400 or an answer, and the next request is served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.server import ServerProcess
from support import served
from support.core import MODELS
from support.hostile import HOSTILE, Hostile
from support.profiles import FREE_LOADING
from support.waiting import HANGS_S

pytestmark = pytest.mark.server

PROMPT = list(range(5, 85))
ENTRANCES: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": PROMPT, "return_logprob": True, "sampling_params": {}},
    "/v1/completions": {"model": "m", "prompt": PROMPT, "logprobs": 1},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "m", "input": "hi"},
}


def body_of(path: str, hostile: Hostile | None) -> dict[str, Any]:
    """A sound request to an entrance, with one hostile value."""
    body = json.loads(json.dumps(ENTRANCES[path]))
    if path == "/generate":
        body["sampling_params"] = {"max_new_tokens": 2, "temperature": 0}
    else:
        body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 2
    if hostile is not None:
        name, value = hostile.field, hostile.value
        into = body["sampling_params"] if hostile.sampling and path == "/generate" else body
        into["prompt" if name == "input_ids" and path == "/v1/completions" else name] = value
    return body


def status(server: ServerProcess, path: str, body: dict[str, Any]) -> int:
    try:
        with urllib.request.urlopen(served.posting(server, path, body), timeout=HANGS_S) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_no_value_ends_the_server(models: None, tmp_path: Path) -> None:
    assert len(HOSTILE) >= 60
    flags = ("--hc-disk", f"{tmp_path / 'disk'}:0.1", "--tokenizer-worker-num", "2",
             "--enable-priority-scheduling", "--hc-open-routes")  # fmt: skip
    with served.start(tmp_path / "log", *flags) as server:
        wanted, _ = served.generate(server, PROMPT, 4)
        wrong = []
        for path in ENTRANCES:
            for hostile in HOSTILE:
                found = status(server, path, body_of(path, hostile))
                if found != 200 and not 400 <= found < 500:
                    wrong.append(f"{path} {hostile.name}: {found}")
            assert served.generate(server, PROMPT, 4)[0] == wanted
            # A session's name that is no text broke the list.
            assert "pins" in served.get(server, "/hc/pins")
        numbers = served.numbers(server)
    assert wrong == []
    assert "guarded_errors" not in numbers and "refused_requests" not in numbers


# -- an engine in a program of its own -----------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]


def test_an_engine_has_the_tiers_and_no_value_ends_it(models: None, tmp_path: Path) -> None:
    """It takes its options from the environment. State comes back, and each value that comes by its
    Python entrance or by the calls of native gRPC is refused with a sentence or served."""
    options = {"forms": "kv", "host_size_gb": 0.2, "profile": str(FREE_LOADING)}
    options |= {"disk": [f"{tmp_path / 'disk'}:0.1"]}
    options |= {"overflow": "recompute", "overflow_reserve": 64}
    env = {**os.environ, "SGLANG_HC_CONFIG": json.dumps(options), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), str(ROOT / "test")])
    done = subprocess.run(
        [sys.executable, "-m", "support.hostile_engine", str(MODELS / "llama-mha")],
        env=env, capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(said) == 1, done.stdout[-2000:] + done.stderr[-6000:]
    found = json.loads(said[0].removeprefix("RESULT "))
    first, again = found["replies"]
    assert first == again
    assert (found["found"]["device"], found["found"]["host"]) == (0, 199)
    # Both prompts of the batch are cut, and the caller's list, which they are, stays as it is.
    assert found["cuts"] == [[64, 256], [64, 256]] and found["history"] == 700
    assert found["wrong"] == []
    for entrance in ("Engine.generate", "gRPC"):
        assert found["counted"][f"{entrance} refused"] > 50
        assert found["counted"][f"{entrance} served"] >= 4
    numbers = found["numbers"]
    assert numbers["kept_tokens"] > 0
    assert "guarded_errors" not in numbers and "refused_requests" not in numbers
