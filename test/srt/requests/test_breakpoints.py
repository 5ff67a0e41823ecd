"""Where cache breakpoints of a chat end in tokens, with a template of one token for a letter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_hc.srt.requests import breakpoints
from sglang_hc.srt.requests.agents import Retain, read_retains

FIVE, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


class Serving:
    """Of chats: a message is a role, its letters and an end; then the reply begins."""

    tokenizer_manager = SimpleNamespace(server_args=None)
    supports_inline_system = True

    def __init__(self) -> None:
        self.rendered = 0
        self.refuses = False

    def _process_messages(self, request: Any, is_multimodal: bool) -> Any:
        self.rendered += 1
        if self.refuses:
            raise RuntimeError("roles must alternate")
        ids: list[int] = []
        for message in request.messages:
            content = message.content
            parts = [content] if isinstance(content, str) else [part.text for part in content]
            ids += [ord(message.role[0]) + 1000, *map(ord, "".join(parts)), 2000]
        return SimpleNamespace(prompt_ids=[*ids, 3000])


def block(text: str, control: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": control}


def chat(*contents: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    sent = [{"role": roles[n % 2], "content": one} for n, one in enumerate(contents)]
    return {"model": "m", "max_tokens": 1, "messages": sent}


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Serving:
    monkeypatch.setattr(breakpoints, "config_of", lambda args: object())
    return Serving()


def read(serving: Serving, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
    """The prompt, and what is retained of it."""
    state = SimpleNamespace(anthropic_serving=AnthropicServing(serving))
    app = SimpleNamespace(state=state)
    raw = SimpleNamespace(_json=body, url=SimpleNamespace(path=path), app=app)
    request: Any = breakpoints._chat_of(body, raw)
    assert isinstance(request, ChatCompletionRequest)
    ids = serving._process_messages(request, False).prompt_ids
    made = GenerateReqInput(input_ids=ids, sampling_params={})
    serving.rendered = 0
    breakpoints.read((made, request), serving, request, raw)
    custom = made.sampling_params.get("custom_params", {})
    return ids, read_retains(custom.get("hc_retain", []))


PATHS = ("/v1/chat/completions", "/v1/messages")


@pytest.mark.parametrize("path", PATHS)
def test_at_the_end_it_is_the_prompt_and_nothing_is_rendered(serving: Serving, path: str) -> None:
    ids, found = read(serving, chat("one", "two", [block("three"), block("four", FIVE)]), path)
    assert found == [Retain(300, tokens=len(ids))] and serving.rendered == 0


@pytest.mark.parametrize("path", PATHS)
def test_inside_it_is_what_both_renderings_begin_with(serving: Serving, path: str) -> None:
    body = chat([block("one"), block("two", HOUR), block("more")], "yes", [block("x", FIVE)])
    ids, found = read(serving, body, path)
    assert found == [Retain(3600, tokens=7), Retain(300, tokens=len(ids))]
    assert ids[:7] == [1000 + ord("u"), *map(ord, "onetwo")]
    assert serving.rendered == 1


def test_in_the_system_prompt_it_is_the_head(serving: Serving) -> None:
    body = chat("hello") | {"system": [block("be brief", HOUR)]}
    ids, found = read(serving, body, "/v1/messages")
    head = [1000 + ord("s"), *map(ord, "be brief"), 2000, 1000 + ord("u")]
    assert found == [Retain(3600, tokens=len(head))] and ids[: len(head)] == head
    body = chat("hello")
    body["messages"].insert(0, {"role": "system", "content": [block("be brief", HOUR)]})
    assert read(serving, body)[1] == found


def test_a_template_that_refuses_costs_the_retention_alone(serving: Serving) -> None:
    body = chat([block("one", FIVE), block("two")])
    raw_ids, found = read(serving, body)
    assert found == [Retain(300, tokens=4)]
    render = serving._process_messages

    def once(request: Any, is_multimodal: bool) -> Any:
        made = render(request, is_multimodal)
        serving.refuses = True
        return made

    serving._process_messages = once  # type: ignore[method-assign]
    assert read(serving, body) == (raw_ids, [])
    serving.refuses = False
    system = {"system": [block("be brief", HOUR)]}
    assert read(serving, chat("hello") | system, "/v1/messages")[1] == []


def test_prompts_that_are_no_token_ids_and_servers_without_tiers(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = chat([block("one", FIVE)])
    raw = SimpleNamespace(_json=body, url=SimpleNamespace(path=PATHS[0]))
    for prompt in (None, [], "text"):
        made = SimpleNamespace(input_ids=prompt, sampling_params={})
        breakpoints.read((made, None), serving, None, raw)
        assert made.sampling_params == {}
    with pytest.raises(ValueError, match="messages"):
        breakpoints.read((None, None), serving, None, SimpleNamespace(_json=chat([block("x", 5)])))
    monkeypatch.setattr(breakpoints, "config_of", lambda args: None)
    breakpoints.read((None, None), serving, None, SimpleNamespace(_json=chat([block("x", 5)])))
    breakpoints.read((None, None), serving, None, None)
