"""The head of a chat: what its template puts before the first turn, whatever is said later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_hc.srt.overflow import count_head, read_field

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
