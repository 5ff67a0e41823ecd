"""What agents say of their prompts' future, in the fields that they send already: soft retention.

    kv_hints                {"protocol_version", "message_id", "actions": [{"action_type", ...}]}
                            of routers: `kv.retain` 1.x as vLLM has it, `kv.demote` 1.x
    nvext.cache_control     {"type": "ephemeral", "ttl": "5m"} of Dynamo's clients
    nvext.agent_hints       `total_requests` times `iat` (ms), the life of a conversation
    cache_control           of Anthropic's clients, for the whole prompt; `breakpoints.py` for parts
    prompt_cache_retention  "in_memory" or "24h" of OpenAI's clients

SGLang drops most of these from its own routes; the parsed body still has them. Each becomes a
`Retain` in the request's `custom_params`, where a client may also write it:

    {"custom_params": {"hc_retain": {"ttl_s": 300, "priority": 100, "tokens": 4096}}}

The scheduler applies them when the request is over, to what it leaves in its own namespace. What is
not of the right form gets status 400; what these conventions leave to others is ignored: unknown
actions, other hints, and kv_hints of a batch with one envelope for each prompt.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_hc.errors import convert, decode_json
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.soft_retention import MAX_RETAIN_S
from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments, fields
from sglang_hc.srt.engine.guard import counters
from sglang_hc.srt.requests.pins import SessionName, custom_params
from sglang_hc.tiers.retention import Retention
from sglang_hc.tree.identity import Prefix

logger = logging.getLogger(__name__)

FIELD = "hc_retain"
MOST_RETAINS = 16
"""Retentions, actions and directives of one request."""

MOST_PRIORITY = 100
SHORT_S = 300.0
"""Of a cache control without a time, and of what OpenAI calls in memory."""

RetainSeconds = Annotated[float, Meta(gt=0, le=MAX_RETAIN_S)]
Priority = Annotated[int, Meta(ge=0, le=MOST_PRIORITY)]


class Retain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long the first `tokens` of prompt and reply are wanted; None for all. priority: of 100;
    with 0 they leave first. session: what the client calls the conversation."""

    ttl_s: RetainSeconds
    priority: Priority = MOST_PRIORITY
    tokens: Annotated[int, Meta(ge=1)] | None = None
    session: SessionName | None = None


class _Directive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    priority: Priority
    start: Annotated[int, Meta(ge=0)] = 0
    end: Annotated[int, Meta(ge=1)] | None = None
    duration: Annotated[float, Meta(ge=0, le=30 * 86400.0)] | None = None
    covers_output: bool = False


class _Directives(msgspec.Struct, frozen=True):
    directives: Annotated[list[_Directive], Meta(max_length=MOST_RETAINS)]


class _Action(msgspec.Struct, frozen=True):
    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any] = {}


class _Envelope(msgspec.Struct, frozen=True):
    protocol_version: str
    message_id: str
    actions: Annotated[list[_Action], Meta(max_length=MOST_RETAINS)] = []


class _Hints(msgspec.Struct, frozen=True):
    total_requests: Annotated[int, Meta(ge=0, le=10**9)] | None = None
    iat: Annotated[float, Meta(ge=0, le=1e12)] | None = None


class _Nvext(msgspec.Struct, frozen=True):
    cache_control: object = None
    agent_hints: _Hints | None = None


# -- in the tokenizer's process ------------------------------------------------------------------


def take_fields(obj: Any, request: Any) -> None:
    """What a client's body asks for becomes fields of the request that SGLang made of it. Raises
    ValueError for users. request: SGLang's HTTP request; None for an engine."""
    if isinstance(obj, GenerateReqInput):
        body = fields.body_of(request)
        found = of_body(body if isinstance(body, dict) else {}, fields.hints_of(obj))
        add(obj, found)


def add(obj: Any, found: Sequence[Retain]) -> None:
    """Of a request on its way, beside what it has."""
    if not found:
        return

    def with_found(sampling: Any) -> dict[str, Any]:
        custom = custom_params(sampling)
        own = custom.get(FIELD)
        known = own if isinstance(own, list) else [] if own is None else [_text(own)]
        more = [_text(msgspec.to_builtins(one)) for one in found]
        return (sampling or {}) | {"custom_params": custom | {FIELD: [*known, *more]}}

    sampling = obj.sampling_params
    if isinstance(sampling, list):
        obj.sampling_params = [with_found(one) for one in sampling]
    else:
        obj.sampling_params = with_found(sampling)


def _text(value: object) -> str:
    """Of one of several: SGLang's wire has no lists of objects in custom_params."""
    return json.dumps(value)


def of_body(body: dict[str, Any], hints: object = None) -> list[Retain]:
    """What the fields of a body ask for, without breakpoints inside of it. hints: `kv_hints` where
    SGLang took it from the body. Raises ValueError that names the field."""
    found = _of_hints(body.get("kv_hints") if hints is None else hints)
    if body.get("nvext") is not None:
        found += _of_nvext(convert(body["nvext"], _Nvext, "nvext"))
    if body.get("cache_control") is not None:
        found.append(Retain(seconds_of(body["cache_control"], "cache_control")))
    retention = body.get("prompt_cache_retention")
    if retention in ("in_memory", "in-memory"):
        found.append(Retain(SHORT_S))
    elif retention == "24h":
        found.append(Retain(MAX_RETAIN_S))
    elif retention is not None:
        raise ValueError('prompt_cache_retention must be "in_memory" or "24h"')
    return found


def seconds_of(control: object, where: str, *, exact: bool = True) -> float:
    """How long a cache control holds, at most MAX_RETAIN_S. exact: it says "5m" or "1h", as
    Anthropic's; else a number of seconds, or one with the unit s, m or h. Raises ValueError that
    begins with `where`."""
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise ValueError(f'{where} must be an object such as {{"type": "ephemeral", "ttl": "5m"}}')
    ttl = control.get("ttl")
    if ttl is None:
        return SHORT_S
    if exact:
        if ttl not in ("5m", "1h"):
            raise ValueError(f'{where}.ttl must be "5m" or "1h"')
        return SHORT_S if ttl == "5m" else MAX_RETAIN_S
    unit = 1
    if isinstance(ttl, str) and (parts := re.fullmatch(r"([0-9]{1,9})([smh]?)", ttl)):
        ttl, unit = int(parts[1]), {"m": 60, "h": 3600}.get(parts[2], 1)
    if not isinstance(ttl, int | float) or isinstance(ttl, bool) or not 0 < ttl < float("inf"):
        raise ValueError(f'{where}.ttl must be a number of seconds, or such as "90s", "5m" or "1h"')
    return float(min(ttl * unit, MAX_RETAIN_S))


def _of_hints(value: object) -> list[Retain]:
    if value is None or isinstance(value, list):
        return []
    plain = value if isinstance(value, dict) else msgspec.to_builtins(value)
    found: list[Retain] = []
    for action in convert(plain, _Envelope, "kv_hints").actions:
        known = action.action_version.split(".")[0] == "1"
        if known and action.action_type == "kv.retain":
            where = f"kv_hints: {action.action_type}"
            for one in convert(action.payload, _Directives, where).directives:
                found += _of_directive(one, where)
        elif known and action.action_type == "kv.demote" and not action.payload:
            found.append(Retain(MAX_RETAIN_S, 0))
    if len(found) > MOST_RETAINS:
        raise ValueError(f"kv_hints has more than {MOST_RETAINS} directives")
    return found


def _of_directive(one: _Directive, where: str) -> list[Retain]:
    """From the first token on: what is behind others cannot be used without them."""
    if one.end is not None and one.end <= one.start:
        raise ValueError(f"{where}: end must be greater than start")
    seconds = MAX_RETAIN_S if one.duration is None else min(one.duration, MAX_RETAIN_S)
    if not one.priority or not seconds:
        return []  # as usual
    return [Retain(seconds, one.priority, None if one.covers_output else one.end)]


def _of_nvext(nvext: _Nvext) -> list[Retain]:
    if nvext.cache_control is not None:
        where = "nvext.cache_control"
        return [Retain(seconds_of(nvext.cache_control, where, exact=False))]
    hints = nvext.agent_hints
    if hints is None or not hints.total_requests or not hints.iat:
        return []
    return [Retain(max(1.0, min(hints.total_requests * hints.iat / 1000, MAX_RETAIN_S)))]


def check_retain(self: Any, obj: Any, input_ids: list[int] | None) -> None:
    """BEFORE TokenizerManager._validate_one_request: ValueError becomes HTTP status 400."""
    value = custom_params(getattr(obj, "sampling_params", None)).get(FIELD)
    if value is not None and config_of(arguments.of(self)) is not None:
        read_retains(value)


def read_retains(value: object) -> list[Retain]:
    """From JSON: an object, or a list of texts of such. Raises ValueError for users."""
    if isinstance(value, dict):
        return [convert(value, Retain, FIELD)]
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f'{FIELD} must be an object such as {{"ttl_s": 300}}')
    if len(value) > MOST_RETAINS:
        raise ValueError(f"{FIELD} has {len(value)} retentions; at most {MOST_RETAINS} are taken")
    return [decode_json(one, Retain, FIELD) for one in value]


# -- in the scheduler's process ------------------------------------------------------------------


def retains_of(req: Any) -> list[Retain]:
    """What a request asked for; it was checked when it came."""
    value = custom_params(fields.sampling_of(req)).get(FIELD)
    if value is None:
        return []
    try:
        return read_retains(value)
    except ValueError as error:
        counters["ignored_fields"] += 1
        logger.warning("sglang-hc: a retention is ignored: %s", error)
        return []


def session_of(req: Any, retains: Sequence[Retain]) -> str | None:
    """What its client calls the conversation of a request."""
    named = (one.session for one in retains if one.session is not None)
    return next(named, None) or fields.session_of(req)


def apply(
    retention: Retention, left: Prefix, retains: Sequence[Retain], session: str | None
) -> None:
    """A request is over. left: what it leaves behind."""
    for one in retains:
        part = left if one.tokens is None else left.up_to(one.tokens // BLOCK_TOKENS)
        if one.priority:
            retention.retain(part, one.ttl_s, one.priority / MOST_PRIORITY, session)
        else:
            retention.demote(part, session)
