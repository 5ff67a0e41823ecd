"""`"keep_first": "system"`: a chat whose system prompt and tools are never cut.

Only the chat template knows where the system prompt and the tools stand. So they are rendered with
two made-up conversations behind them; the tokens with which both renderings begin are the head. It
depends on nothing that is said later, so it is the same in all turns of a conversation.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from sglang_hc.srt.overflow import FIELD, SYSTEM
from sglang_hc.srt.pins import custom_params


def count_head(result: tuple[Any, Any], self: Any, request: Any, raw_request: Any = None) -> None:
    """AFTER OpenAIServingChat._convert_to_internal_request: the head becomes a number of tokens.

    A prompt that came as token ids beside its messages was not rendered from them: it is left to
    be refused (`overflow.read_field`).
    """
    sampling = result[0].sampling_params
    custom = custom_params(sampling)
    if custom.get(FIELD) != {"keep_first": SYSTEM}:
        return
    if request.input_ids is None:
        tokens = head_tokens(self, request)
        sampling["custom_params"] = custom | {FIELD: {"keep_first": tokens}}


def head_tokens(serving: Any, request: Any) -> int:
    """Tokens that the template puts before the first message that is not the system's.

    serving: an OpenAIServingChat. request: a ChatCompletionRequest whose template options are set.
    """
    from sglang.srt.entrypoints.openai.protocol import (
        ChatCompletionMessageGenericParam,
        ChatCompletionMessageUserParam,
    )

    first = list(takewhile(lambda m: m.role in ("system", "developer"), request.messages))
    answer = ChatCompletionMessageGenericParam(role="assistant", content="2")
    once = [ChatCompletionMessageUserParam(role="user", content="1")]
    twice = [ChatCompletionMessageUserParam(role="user", content="3"), answer, *once]

    def rendered(talk: list[Any]) -> list[int]:
        changes = {"messages": [*first, *talk], "continue_final_message": False}
        probe = request.model_copy(update=changes)
        ids: list[int] = serving._process_messages(probe, is_multimodal=False).prompt_ids
        return ids

    pairs = zip(rendered(once), rendered(twice), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
