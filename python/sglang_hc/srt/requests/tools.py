"""Which tool an answer calls: the kind of pause behind it (`policy.pauses`).

The names of a chat's tools come with it to the scheduler, in its `custom_params`; when it is
answered, the end of the reply is searched for a call of one of them, as the usual formats write it.
A name that is missed, or found in vain, makes an estimate worse and nothing else.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from sglang_hc.policy.learned import LEARNED
from sglang_hc.policy.pauses import MAX_NAME
from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments, fields
from sglang_hc.srt.requests.pins import custom_params

FIELD = "hc_tools"
"""Names of tools, as a list. A client of /generate may send it too."""

MAX_NAMES = 128
"""Of a request. Others are not searched for."""

CALL_TOKENS = 512
"""Tokens at the end of a reply within which a call begins."""

CALL = r'(?:"name"\s*:\s*"|<function=|functions\.|sep｜>|tool_call>\s*|\[)(%s)(?=["(>:<\s])'
"""JSON, XML, the formats of DeepSeek, GLM and Kimi, and Python's."""


def name_tools(result: tuple[Any, Any], self: Any, request: Any, raw_request: Any = None) -> None:
    """AFTER OpenAIServingChat._convert_to_internal_request: the names of a chat's tools, where the
    server learns from them or records its load."""
    config = config_of(arguments.of(self.tokenizer_manager))
    if config is None or not request.tools:
        return
    if config.eviction != LEARNED and config.trace is None:
        return
    sampling = result[0].sampling_params
    names = [tool.function.name for tool in request.tools[:MAX_NAMES]]
    sampling["custom_params"] = custom_params(sampling) | {FIELD: names}


def called_by(req: Any) -> str:
    """The tool that the reply of a request calls last; empty for none."""
    names = custom_params(fields.sampling_of(req)).get(FIELD)
    if not isinstance(names, list):
        return ""
    found = tuple(n for n in names[:MAX_NAMES] if isinstance(n, str) and 0 < len(n) <= MAX_NAME)
    return called_in(fields.end_of_reply(req, CALL_TOKENS), found) if found else ""


def called_in(reply: str, names: tuple[str, ...]) -> str:
    """As `called_by`, of a text."""
    calls = _pattern(names).findall(reply)
    return str(calls[-1]) if calls else ""


@lru_cache(maxsize=64)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(CALL % "|".join(map(re.escape, longest_first)))
