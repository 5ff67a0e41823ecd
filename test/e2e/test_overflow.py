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
from support.served import ask, post, posting, refusal, start
from support.waiting import HANGS_S

pytestmark = pytest.mark.server

WINDOW, RESERVE, KEPT_FIRST, STEP = 510, 64, 64, 128
"""Of a context of 512 tokens: SGLang keeps two for itself; the step is a third of what is cut."""

LIMIT = WINDOW - RESERVE
NEW = 16
FLAGS = (
    *("--context-length", "512", "--hc-overflow", "recompute", "--hc-overflow-drop", "0.34"),
    *("--hc-overflow-reserve", str(RESERVE), "--enable-metrics"),
)


@pytest.fixture(scope="module")
def server(models: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start(tmp_path_factory.mktemp("overflow") / "log", *FLAGS) as process:
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
