"""`--hc-overflow reembed` over HTTP: streams, structured output, pins and keys of clients."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_hc.tools.bench.server import ServerProcess
from support.served import ask, get, numbers, post, posting, refusal, start
from support.waiting import HANGS_S

pytestmark = pytest.mark.server

FLAGS = (
    "--hc-open-routes",
    *("--context-length", "512", "--hc-overflow", "reembed", "--hc-overflow-drop", "0.34"),
    *("--hc-overflow-reserve", "64", "--enable-metrics", "--grammar-backend", "outlines"),
)
LIMIT, STEP = 446, 128


@pytest.fixture(scope="module")
def server(models: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start(tmp_path_factory.mktemp("moved") / "log", *FLAGS) as process:
        yield process


def history(server: ServerProcess, seed: int, **options: Any) -> list[int]:
    """A prompt that is too long, of a conversation whose first turn was served."""
    rng = random.Random(seed)
    tokens = [rng.randrange(3, 900) for _ in range(LIMIT + 60)]
    ask(server, tokens[:LIMIT], 1, **options)
    return tokens


def test_a_stream_goes_on_from_moved_state(server: ServerProcess) -> None:
    tokens = history(server, 1)
    body = {"model": "any", "prompt": tokens, "max_tokens": 12, "temperature": 0}
    plain = post(server, "/v1/completions", body)
    request = posting(server, "/v1/completions", body | {"stream": True})
    with urllib.request.urlopen(request, timeout=HANGS_S) as reply:
        assert reply.headers["x-hc-dropped-tokens"] == str(STEP)
        lines = [line[6:] for line in reply.read().decode().split("\n") if line[:6] == "data: "]
    said = "".join(json.loads(line)["choices"][0]["text"] for line in lines if line != "[DONE]")
    assert said == plain["choices"][0]["text"] and len(said.split()) > 3


def test_structured_output_goes_on_from_moved_state(server: ServerProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"kept": {"type": "boolean"}},
        "required": ["kept"],
    }
    for seed, options in ((6, {"json_schema": json.dumps(schema)}), (7, {})):
        tokens = history(server, seed)
        reply = ask(server, tokens, 40, {"ignore_eos": False, **options})
        said = reply["meta_info"]
        assert said["hc_overflow"]["mode"] == "reembed"
        assert said["cached_tokens"] == (LIMIT - STEP) // 64 * 64
        if options:
            assert json.loads(reply["text"])["kept"] in (True, False)
        else:
            assert "kept" not in reply["text"], "the model says it without a grammar"


def test_a_reply_says_that_state_has_moved(server: ServerProcess) -> None:
    tokens, before = history(server, 2, extra_key="mine"), numbers(server)
    said = ask(server, tokens, extra_key="mine")["meta_info"]
    assert said["hc_overflow"]["mode"] == "reembed"
    # The head, and all whole blocks of the first turn that are behind the cut.
    assert said["cached_tokens"] == (LIMIT - STEP) // 64 * 64
    counted = numbers(server)
    assert counted["overflow_moved_tokens"] - before.get("overflow_moved_tokens", 0) == 192
    assert counted["overflow_recomputed_tokens"] > before.get("overflow_recomputed_tokens", 0)
    # A prompt that merely equals what the cut left does not get what has moved.
    equal = tokens[:64] + tokens[64 + STEP :]
    said = ask(server, equal, extra_key="mine")["meta_info"]
    assert "hc_overflow" not in said and said["cached_tokens"] == 64


def test_pins_behind_a_cut_belong_to_the_clients_key(server: ServerProcess) -> None:
    tokens = history(server, 4, extra_key="tenant")
    ask(server, tokens, extra_key="tenant")
    wish = {"session": "s", "ttl_s": 60, "input_ids": tokens, "extra_key": "tenant"}
    assert post(server, "/hc/pin", wish)["blocks"] >= 5
    assert [pin["session"] for pin in get(server, "/hc/pins?extra_key=tenant")["pins"]] == ["s"]


@pytest.mark.parametrize("wrong", [-1, 2**40])
def test_a_wrong_id_in_a_prompt_that_would_be_cut_is_answered_with_400(
    server: ServerProcess, wrong: int
) -> None:
    tokens = [5] * 70 + [wrong] + [5] * 600
    status, said = refusal(server, "/generate", {"input_ids": tokens})
    assert status == 400 and f"the token id {wrong}, which is not in" in said
