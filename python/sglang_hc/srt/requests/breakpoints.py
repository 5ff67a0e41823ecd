"""Cache breakpoints inside of a chat: `cache_control` of blocks of system prompt, tools and
messages, as Anthropic's clients send them, and others after them on the OpenAI route.

What lies before a breakpoint is retained: 5 minutes, or an hour. Only the chat template knows where
it ends in tokens. For one at the end of the chat that is the prompt; for one in the system prompt
or the tools the head that both never change; for any other the chat up to there is rendered once
more, and what both renderings begin with is retained. Of several with one time the last counts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, NamedTuple

from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments, fields
from sglang_hc.srt.requests.agents import Retain, add, seconds_of
from sglang_hc.srt.requests.overflow import head_tokens

logger = logging.getLogger(__name__)

ANTHROPIC = "/v1/messages"

MOST_BREAKPOINTS = 4
"""Of one request, as with Anthropic."""

HEAD = -1
"""Number of the message to which breakpoints of system prompt and tools belong."""


class Breakpoint(NamedTuple):
    """message, block: its place. seconds: how long what lies before it is wanted."""

    message: int
    block: int
    seconds: float


def read(result: tuple[Any, Any], self: Any, request: Any, raw_request: Any = None) -> None:
    """AFTER OpenAIServingChat._convert_to_internal_request: a retention for the breakpoints of a
    chat. ValueError becomes HTTP status 400."""
    body = fields.body_of(raw_request)
    if not isinstance(body, dict) or config_of(arguments.of(self.tokenizer_manager)) is None:
        return
    points = breakpoints_of(body)
    obj = result[0]
    for point in furthest(points):
        tokens = _tokens_before(self, obj.input_ids, point, body, request, raw_request)
        if tokens:
            add(obj, [Retain(point.seconds, tokens=tokens)])


def breakpoints_of(body: dict[str, Any]) -> list[Breakpoint]:
    """Those of a body of JSON, in their order. Raises ValueError that names the place."""
    found = []
    for place, message, block, item in _blocks(body):
        control = item.get("cache_control")
        if control is not None:
            found.append(Breakpoint(message, block, seconds_of(control, f"{place}.cache_control")))
    if len(found) > MOST_BREAKPOINTS:
        raise ValueError(
            f"cache_control: {len(found)} blocks have one; at most {MOST_BREAKPOINTS} may"
        )
    return found


def furthest(points: list[Breakpoint]) -> list[Breakpoint]:
    """Of each time the last one, as far as none behind it lasts as long; the shortest last."""
    found: list[Breakpoint] = []
    for point in sorted(points, key=lambda one: (one.message, one.block), reverse=True):
        if not found or point.seconds > found[-1].seconds:
            found.append(point)
    return found[::-1]


def _blocks(body: dict[str, Any]) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """(name of its place, message, block, the block) of all that may have a breakpoint."""
    for name in ("tools", "system"):
        for number, item in _items(body.get(name)):
            yield f"{name}.{number}", HEAD, HEAD, item
    for message, sent in _items(body.get("messages")):
        for block, item in _items(sent.get("content")):
            place = f"messages.{message}.content.{block}"
            yield place, message, block, item
            for number, inner in _items(item.get("content")):  # of a tool's result
                yield f"{place}.content.{number}", message, block, inner


def _items(value: object) -> list[tuple[int, dict[str, Any]]]:
    several = value if isinstance(value, list) else ()
    return [(number, one) for number, one in enumerate(several) if isinstance(one, dict)]


def _tokens_before(
    serving: Any, prompt: Any, point: Breakpoint, body: dict[str, Any], request: Any, raw: Any
) -> int:
    """Tokens of the prompt before a breakpoint; 0 where nobody knows, or has other inputs."""
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], int):
        return 0
    messages = body["messages"] if point.message != HEAD else ()
    content = messages[point.message]["content"] if messages else ()
    if messages and point[:2] == (len(messages) - 1, len(content) - 1):
        return len(prompt)
    try:
        before = messages[: point.message + 1]
        if all(one["role"] in ("system", "developer") for one in before):
            return head_tokens(serving, request)
        last = before[-1] | {"content": content[: point.block + 1]}
        shorter = _chat_of(body | {"messages": [*before[:-1], last]}, raw)
        begin = serving._process_messages(shorter, is_multimodal=False).prompt_ids
    except Exception:  # a template may refuse a chat that ends there
        logger.debug("sglang-hc: a cache breakpoint is ignored", exc_info=True)
        return 0
    same = takewhile(lambda pair: pair[0] == pair[1], zip(begin, prompt, strict=False))
    return sum(1 for _ in same)


def _chat_of(body: dict[str, Any], raw: Any) -> ChatCompletionRequest:
    """SGLang's chat request of a body of its route."""
    if not raw.url.path.endswith(ANTHROPIC):
        return ChatCompletionRequest.model_validate(body)
    serving = raw.app.state.anthropic_serving
    return serving._convert_to_chat_completion_request(
        AnthropicMessagesRequest.model_validate(body)
    )
