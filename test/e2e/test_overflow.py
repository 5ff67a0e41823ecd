"""Conversations that outgrow the context window, on a real server that cuts them."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmark.harness.server import ServerProcess
from support.core import MODELS
from support.served import ask, get, numbers, post, posting, refusal, start
from support.waiting import HANGS_S

pytestmark = pytest.mark.server

WINDOW, RESERVE, KEPT_FIRST, STEP = 510, 64, 64, 128
"""Of a context of 512 tokens: SGLang keeps two for itself; the step is a third of what is cut."""

LIMIT = WINDOW - RESERVE
NEW = 16
FLAGS = (
    *("--context-length", "512", "--hc-overflow-drop", "0.34"),
    *("--hc-overflow-reserve", str(RESERVE), "--enable-metrics"),
)


@pytest.fixture(scope="module")
def server(models: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("overflow") / "log"
    with start(log, *FLAGS, "--hc-overflow", "recompute") as process:
        yield process


@pytest.fixture(scope="module")
def moving(models: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("moved") / "log"
    flags = ("--hc-overflow", "reembed", "--hc-open-routes", "--grammar-backend", "outlines")
    with start(log, *FLAGS, *flags) as process:
        yield process


def test_the_reply_says_what_was_left_out(server: ServerProcess) -> None:
    tokens = random.Random(2).choices(range(3, 900), k=LIMIT + 1)
    body = {"model": "any", "prompt": tokens, "max_tokens": 8, "stream": False}
    request = posting(server, "/v1/completions", body)
    with urllib.request.urlopen(request, timeout=HANGS_S) as reply:
        assert reply.headers["x-hc-dropped-tokens"] == str(STEP)
        assert json.load(reply)["usage"]["prompt_tokens"] == LIMIT + 1 - STEP
    whole = ask(server, tokens[:LIMIT], NEW, extra_key="whole")
    assert "hc_overflow" not in whole["meta_info"]
    assert whole["meta_info"]["prompt_tokens"] == LIMIT


def test_each_prompt_of_a_batch_is_cut(server: ServerProcess) -> None:
    long = random.Random(6).choices(range(3, 900), k=2 * LIMIT)
    sampling = {"max_new_tokens": 16, "temperature": 0}
    body = {"input_ids": [long[:600], long[:100], long[1:]], "sampling_params": sampling}
    said = [reply["meta_info"] for reply in post(server, "/generate", body)]
    cuts = [reply.get("hc_overflow") for reply in said]
    assert [cut and cut["prompt_tokens"] for cut in cuts] == [600, None, 2 * LIMIT - 1]
    for cut, reply in zip(cuts[::2], said[::2], strict=True):
        assert cut["kept_first"] == KEPT_FIRST and cut["mode"] == "recompute"
        first, end = cut["dropped"]
        assert first == KEPT_FIRST and (end - first) % STEP == 0
        assert cut["prompt_tokens"] - (end - first) == reply["prompt_tokens"] <= LIMIT


def test_a_request_may_choose(server: ServerProcess) -> None:
    tokens = random.Random(3).choices(range(3, 900), k=600)
    longer = {"custom_params": {"hc_overflow": {"keep_first": 100}}}
    cut = ask(server, tokens, NEW, longer)["meta_info"]["hc_overflow"]
    assert cut["kept_first"] == 128
    off = {"max_new_tokens": NEW, "custom_params": {"hc_overflow": "off"}}
    body = {"input_ids": tokens, "sampling_params": off}
    status, said = refusal(server, "/generate", body)
    assert status == 400 and "longer than the model's context length" in said


def test_a_chat_keeps_its_system_prompt(server: ServerProcess) -> None:
    """Longer than the server's head, it is kept whole, and by every turn alike."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "llama-mha")
    rng = random.Random(5)

    def said(role: str, count: int) -> dict[str, str]:
        words = (rng.choice(("the", "of", "and", "to", "in")) for _ in range(count))
        return {"role": role, "content": " ".join(words)}

    messages = [said("system", 90), said("user", 300)]
    head = tokenizer.apply_chat_template(messages[:1], tokenize=True, return_dict=False)
    assert KEPT_FIRST < len(head) < 128
    cuts = []
    for _ in range(2):
        body = {
            **{"model": "any", "messages": messages, "max_tokens": 8, "return_meta_info": True},
            "custom_params": {"hc_overflow": {"keep_first": "system"}},
        }
        reply = post(server, "/v1/chat/completions", body)
        cuts.append(reply["choices"][0]["meta_info"].get("hc_overflow"))
        messages += [said("assistant", 60), said("user", 60)]
    assert cuts[0] is None
    assert cuts[1]["kept_first"] == 128 == cuts[1]["dropped"][0]


@pytest.mark.parametrize(
    ("sampling", "options", "message"),
    [
        (
            {"custom_params": {"hc_overflow": {"keep_first": "system"}}},
            {},
            "send them to /v1/chat/completions, or give the head as a number of tokens",
        ),
        ({"custom_params": {"hc_overflow": 3}}, {}, 'hc_overflow must be \\"off\\" or'),
        ({"custom_params": {"hc_cut": [64, 64]}}, {}, "hc_cut is set by the server"),
        ({"max_new_tokens": 400}, {}, "ask for fewer new tokens or keep a smaller head"),
        ({}, {"return_logprob": True, "logprob_start_len": 0}, "leave out logprob_start_len"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    server: ServerProcess, sampling: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    tokens = random.Random(4).choices(range(3, 900), k=600)
    sampling = {"max_new_tokens": NEW, **sampling}
    body = {"input_ids": tokens, "sampling_params": sampling, **options}
    status, said = refusal(server, "/generate", body)
    assert status == 400 and message in said


# -- state that moves: streams, structured output, pins and keys of clients ------------------------


def history(moving: ServerProcess, seed: int, **options: Any) -> list[int]:
    """A prompt that is too long, of a conversation whose first turn was served."""
    rng = random.Random(seed)
    tokens = [rng.randrange(3, 900) for _ in range(LIMIT + 60)]
    ask(moving, tokens[:LIMIT], 1, **options)
    return tokens


def test_a_stream_goes_on_from_moved_state(moving: ServerProcess) -> None:
    tokens = history(moving, 1)
    body = {"model": "any", "prompt": tokens, "max_tokens": 12, "temperature": 0}
    plain = post(moving, "/v1/completions", body)
    request = posting(moving, "/v1/completions", body | {"stream": True})
    with urllib.request.urlopen(request, timeout=HANGS_S) as reply:
        assert reply.headers["x-hc-dropped-tokens"] == str(STEP)
        lines = [line[6:] for line in reply.read().decode().split("\n") if line[:6] == "data: "]
    said = "".join(json.loads(line)["choices"][0]["text"] for line in lines if line != "[DONE]")
    assert said == plain["choices"][0]["text"] and len(said.split()) > 3


def test_structured_output_goes_on_from_moved_state(moving: ServerProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"kept": {"type": "boolean"}},
        "required": ["kept"],
    }
    for seed, options in ((6, {"json_schema": json.dumps(schema)}), (7, {})):
        tokens = history(moving, seed)
        reply = ask(moving, tokens, 40, {"ignore_eos": False, **options})
        said = reply["meta_info"]
        assert said["hc_overflow"]["mode"] == "reembed"
        assert said["cached_tokens"] == (LIMIT - STEP) // 64 * 64
        if options:
            assert json.loads(reply["text"])["kept"] in (True, False)
        else:
            assert "kept" not in reply["text"], "the model says it without a grammar"


def test_a_reply_says_that_state_has_moved(moving: ServerProcess) -> None:
    tokens, before = history(moving, 2, extra_key="mine"), numbers(moving)
    said = ask(moving, tokens, extra_key="mine")["meta_info"]
    assert said["hc_overflow"]["mode"] == "reembed"
    # The head, and all whole blocks of the first turn that are behind the cut.
    assert said["cached_tokens"] == (LIMIT - STEP) // 64 * 64
    counted = numbers(moving)
    assert counted["overflow_moved_tokens"] - before.get("overflow_moved_tokens", 0) == 192
    assert counted["overflow_recomputed_tokens"] > before.get("overflow_recomputed_tokens", 0)
    # A prompt that merely equals what the cut left does not get what has moved.
    equal = tokens[:64] + tokens[64 + STEP :]
    said = ask(moving, equal, extra_key="mine")["meta_info"]
    assert "hc_overflow" not in said and said["cached_tokens"] == 64


def test_pins_behind_a_cut_belong_to_the_clients_key(moving: ServerProcess) -> None:
    tokens = history(moving, 4, extra_key="tenant")
    ask(moving, tokens, extra_key="tenant")
    wish = {"session": "s", "ttl_s": 60, "input_ids": tokens, "extra_key": "tenant"}
    assert post(moving, "/hc/pin", wish)["blocks"] >= 5
    assert [pin["session"] for pin in get(moving, "/hc/pins?extra_key=tenant")["pins"]] == ["s"]


@pytest.mark.parametrize("wrong", [-1, 2**40])
def test_a_wrong_id_in_a_prompt_that_would_be_cut_is_answered_with_400(
    moving: ServerProcess, wrong: int
) -> None:
    tokens = [5] * 70 + [wrong] + [5] * 600
    status, said = refusal(moving, "/generate", {"input_ids": tokens})
    assert status == 400 and f"the token id {wrong}, which is not in" in said
