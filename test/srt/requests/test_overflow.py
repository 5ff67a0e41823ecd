"""Which prompts the tokenizer process cuts, and the head of a chat: what its template puts before
the first turn, whatever is said later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sglang_hc.errors import ConfigError
from sglang_hc.srt.requests.namespaces import pack_key
from sglang_hc.srt.requests.overflow import (
    check_window,
    count_head,
    cut_prompt,
    own_ids,
    read_field,
    tell,
)
from sglang_hc.srt.scheduling.hooks import build_scheduler
from sglang_hc.tree.namespaces import Namespace

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
WISH = {"hc_overflow": {"keep_first": "system"}, "other": 1}


class Serving:
    """Stands for OpenAIServingChat: one token per character.

    tools_last: the template puts the tools before the last message, as Mistral's does.
    """

    def __init__(self, tools_last: bool = False) -> None:
        self.tools_last = tools_last

    def _process_messages(self, request: Any, is_multimodal: bool) -> Any:
        tools = f"[{request.tools[0].function.name}]" if request.tools else ""
        said = [f"<{m.role}>{m.content}" for m in request.messages]
        parts = [*said[:-1], tools, said[-1]] if self.tools_last else [tools, *said]
        return SimpleNamespace(prompt_ids=list(map(ord, "".join(parts) + "<assistant>")))


def kept(messages: list[dict[str, Any]], serving: Serving | None = None, **more: Any) -> Any:
    """The `hc_overflow` that reaches the tokenizer for a chat of these messages."""
    request = ChatCompletionRequest(model="m", messages=messages, **more)
    adapted = SimpleNamespace(sampling_params={"custom_params": dict(WISH)})
    count_head((adapted, request), serving or Serving(), request)
    custom = adapted.sampling_params["custom_params"]
    assert custom["other"] == 1
    return custom["hc_overflow"]


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


@given(st.text(min_size=1), st.lists(st.text(min_size=1), min_size=1, max_size=4), st.booleans())
def test_every_turn_has_the_same_head(system: str, turns: list[str], tools: bool) -> None:
    more = {"tools": [TOOL]} if tools else {}
    head = ("[look_up]" if tools else "") + f"<system>{system}<user>"
    messages = [said("system", system)]
    for turn in turns:
        messages.append(said("user", turn))
        assert kept(messages, **more) == {"keep_first": len(head)}
        messages.append(said("assistant", turn))


def test_what_the_template_puts_before_a_chat_without_a_system_prompt_is_kept() -> None:
    assert kept([said("user", "1")]) == {"keep_first": len("<user>")}


def test_only_the_first_messages_of_the_system_are_its_prompt() -> None:
    messages = [said("system", "a"), said("developer", "b"), said("user", "c"), said("system", "d")]
    assert kept(messages) == {"keep_first": len("<system>a<developer>b<user>")}


def test_tools_that_move_with_the_last_message_are_not_in_the_head() -> None:
    messages = [said("system", "a"), said("user", "b")]
    head = {"keep_first": len("<system>a")}
    assert kept(messages, Serving(tools_last=True), tools=[TOOL]) == head


def test_without_rendered_messages_nothing_can_be_counted() -> None:
    left = kept([said("user", "b")], input_ids=[1, 2, 3])
    assert left == {"keep_first": "system"}
    with pytest.raises(ValueError, match="send them to /v1/chat/completions, or give the head as"):
        read_field(left)


def test_other_wishes_stay() -> None:
    request = ChatCompletionRequest(model="m", messages=[said("user", "b")])
    for custom in (None, {}, {"hc_overflow": "off"}, {"hc_overflow": {"keep_first": 5}}):
        adapted = SimpleNamespace(sampling_params={"custom_params": custom})
        count_head((adapted, request), Serving(), request)
        assert adapted.sampling_params["custom_params"] == custom


LIMIT, STEP = 448, 192
"""Longest prompt that is not cut, and what a longer one loses, by the manager below."""


def manager(mode: str = "recompute") -> Any:
    """Stands for a TokenizerManager whose window is 512 tokens."""
    config = {"overflow": mode} if mode == "off" else {"overflow": mode, "overflow_reserve": 64}
    return SimpleNamespace(
        server_args=SimpleNamespace(_hc_config=config), max_req_input_len=512 - 4
    )


def asked(length: int, **more: Any) -> GenerateReqInput:
    request = GenerateReqInput(input_ids=list(range(length)), sampling_params={}, **more)
    request.normalize_batch_and_arguments()
    return request


def left(request: GenerateReqInput | EmbeddingReqInput, mode: str = "recompute") -> list[int]:
    """What is left of the prompt of a request."""
    own_ids(manager(mode), request)
    cut_prompt(manager(mode), request, request.input_ids)
    assert isinstance(request.input_ids, list)
    return request.input_ids


def test_a_prompt_of_token_ids_is_cut() -> None:
    assert left(asked(LIMIT)) == list(range(LIMIT))
    kept = [*range(64), *range(64 + STEP, LIMIT + 1)]
    assert left(asked(LIMIT + 1)) == kept == left(asked(LIMIT + 1), "reembed")
    assert left(asked(LIMIT + 1), "off") == list(range(LIMIT + 1))


@pytest.mark.parametrize(
    "more",
    [
        {"image_data": "picture.png"},
        {"audio_data": "sound.wav"},
        {"video_data": "film.mp4"},
        {"session_params": {"id": "s"}},
        {"input_embeds": [[0.5]]},
        {"positional_embed_overrides": object()},
    ],
)
def test_a_prompt_that_is_more_than_token_ids_is_left_to_sglang(more: dict[str, Any]) -> None:
    request = asked(LIMIT + 1)
    for name, value in more.items():
        setattr(request, name, value)
    assert left(request) == list(range(LIMIT + 1))


def test_embeddings_of_a_prompt_are_left_to_sglang() -> None:
    """A request that asks for an embedding generates nothing."""
    request = EmbeddingReqInput(input_ids=list(range(LIMIT + 1)), sampling_params={})
    request.normalize_batch_and_arguments()
    assert left(request) == list(range(LIMIT + 1))


@pytest.mark.parametrize("mode", ["recompute", "reembed"])
def test_what_a_caller_handed_in_stays_as_it_is(mode: str) -> None:
    """Its options too, which all prompts of a batch share. One list may be several prompts."""
    history, options = list(range(LIMIT + 1)), {"custom_params": {"other": 1}}
    batch = GenerateReqInput(input_ids=[history, history, [5]], sampling_params=options)
    batch.normalize_batch_and_arguments()
    assert [len(left(batch[i], mode)) for i in range(3)] == [LIMIT + 1 - STEP] * 2 + [1]
    assert [set(batch[i].sampling_params["custom_params"]) for i in range(3)] == [
        {"other", "hc_cut"}, {"other", "hc_cut"}, {"other"},
    ]  # fmt: skip
    assert history == list(range(LIMIT + 1)) and options == {"custom_params": {"other": 1}}


def test_what_a_cut_leaves_stays_its_clients() -> None:
    names = []
    for salt in ("a", "b"):
        request = asked(LIMIT + 1, cache_salt=salt, extra_key="k")
        pack_key(manager("reembed"), request, None)
        left(request, "reembed")
        names.append(Namespace.of(request.extra_key))
        assert names[-1].client == Namespace(salt, "k") and names[-1].cut is not None
        assert request.cache_salt is None
    assert names[0] != names[1]


def test_replies_to_a_prompt_that_was_cut_say_so() -> None:
    """SGLang finds a request's state when it is told to wait, while that is there."""
    request, asked_for = asked(LIMIT + 1), list[Any]()

    def wait(self: Any, obj: Any, raw: Any) -> AsyncIterator[Any]:
        asked_for.append((obj, raw))
        return replies()

    async def replies() -> AsyncIterator[Any]:
        yield {"text": "a"}
        yield {"text": "ab", "meta_info": {"id": "r"}}

    async def all_of(found: AsyncIterator[Any]) -> list[Any]:
        return [one async for one in found]

    whole = tell(wait, manager(), request, None)
    assert asked_for == [(request, None)]
    assert asyncio.run(all_of(whole))[1] == {"text": "ab", "meta_info": {"id": "r"}}
    left(request)
    _, said = asyncio.run(all_of(tell(wait, manager(), request, None)))
    assert said["meta_info"]["id"] == "r" and said["meta_info"]["hc_overflow"] == {
        "prompt_tokens": LIMIT + 1,
        "kept_first": 64,
        "dropped": [64, 64 + STEP],
        "mode": "recompute",
    }


@pytest.mark.parametrize(("mode", "reserve"), [("recompute", 320), ("off", 321)])
def test_a_window_with_room_for_a_cut_is_served(mode: str, reserve: int) -> None:
    """Of 512 tokens: a head, a step and a block behind it, of 64 each."""
    check_window(SmallWindow(mode, reserve))


def test_a_scheduler_whose_window_has_no_room_for_a_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--hc-overflow recompute: .*give a smaller reserve"):
        build_scheduler(lambda scheduler: None, SmallWindow("recompute", 321))


class SmallWindow:
    """Stands for a scheduler whose window is 512 tokens."""

    max_req_input_len = 512 - 4

    def __init__(self, mode: str, reserve: int) -> None:
        self.server_args = SimpleNamespace(
            _hc_config={"overflow": mode}
            if mode == "off"
            else {"overflow": mode, "overflow_reserve": reserve}
        )
