"""`--hc-overflow`: prompts that outgrow the context window are cut in the tokenizer process.

The cut happens before SGLang checks the length, in the list of ids that SGLang goes on with, so
that everything behind it (usage, streaming, structured output, LoRA, pins) sees an ordinary shorter
prompt. Which tokens are cut is `policy.overflow`'s rule. With `recompute` the prompt's identity is
an ordinary one, too. With `reembed` it gets a namespace of its own (`tree.cuts`), and the scheduler
is told what the prompt was cut to before. The client is told in `meta_info.hc_overflow` and in the
header `x-hc-dropped-tokens`.

A request may opt out, or choose its head, in its `custom_params`:

    {"hc_overflow": "off"}    or    {"hc_overflow": {"keep_first": 512}}

`keep_first` must be the same in all turns of a conversation, or its state is not found. A chat may
send "system" in place of a number: then its system prompt and tools are never cut. Only the chat
template knows where they stand, so they are rendered with two made-up conversations behind them;
the tokens with which both renderings begin are the head. It depends on nothing that is said later.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from itertools import takewhile
from typing import Any

import msgspec

from sglang_hc.errors import ConfigError
from sglang_hc.policy.overflow import Cut, OverflowRule
from sglang_hc.srt.arguments.server_args import CUT_KEY_ENV, config_of
from sglang_hc.srt.binding import arguments, fields
from sglang_hc.srt.requests.namespaces import ClientKey
from sglang_hc.srt.requests.pins import custom_params
from sglang_hc.tree.cuts import EarlierCuts, cut_namespace
from sglang_hc.tree.identity import pack_tokens
from sglang_hc.tree.namespaces import Namespace

FIELD = "hc_overflow"
CUT_FIELD = "hc_cut"
"""How a request carries its cut to the scheduler: an `EarlierCuts` as JSON, which names no earlier
cuts where nothing moves, behind the mark of whoever knows the server's key. Clients may not set
it. In the scheduler `accept_cut` has put the `EarlierCuts` itself in its place."""

MARK = 32
"""Characters of the mark."""

SYSTEM = "system"
"""A head of this length is the chat's system prompt and tools."""

REEMBED = "reembed"

HEADER = b"x-hc-dropped-tokens"

_CUT = "_hc_cut"
"""Attribute of a request that was cut: (tokens of its prompt, Cut)."""

_dropped: ContextVar[list[int] | None] = ContextVar("dropped", default=None)
"""Tokens that were cut from the prompts of the HTTP request that is being answered."""


def own_ids(self: Any, obj: Any) -> None:
    """BEFORE TokenizerManager._tokenize_one_request: the request gets its own list of token ids.

    SGLang passes on the list that a caller of `sgl.Engine` gave it, and `cut_prompt` shortens it.
    """
    if obj.input_ids is not None and _rule(self) is not None:
        obj.input_ids = list(obj.input_ids)


def cut_prompt(self: Any, obj: Any, input_ids: list[int] | None) -> None:
    """BEFORE TokenizerManager._validate_one_request: shorten `input_ids` in place.

    ValueError becomes HTTP status 400.
    """
    custom = custom_params(getattr(obj, "sampling_params", None))
    if CUT_FIELD in custom:
        raise ValueError(f"custom_params.{CUT_FIELD} is set by the server; leave it out")
    rule = _rule(self)
    keep_first = read_field(custom[FIELD]) if FIELD in custom else None
    if rule is None or keep_first == "off" or not _may_cut(obj, input_ids):
        return
    assert input_ids is not None and keep_first != "off"
    length = len(input_ids)
    cut = rule.cut(length, obj.sampling_params.get("max_new_tokens"), keep_first)
    if not cut.dropped:
        return
    if obj.return_logprob and (obj.logprob_start_len or 0) >= 0:
        raise ValueError(
            f"{cut.dropped} tokens of the prompt would be dropped, and logprobs of the prompt were "
            "asked for; shorten the prompt or leave out logprob_start_len"
        )
    key = fields.sent_namespace(obj)
    key = None if key is None else str(key)  # encoders know plain strings
    name, carried = _carried(self, rule, cut, key, input_ids)
    fields.set_namespace(obj, None if name is None else ClientKey(name))
    del input_ids[cut.head : cut.head + cut.dropped]
    setattr(obj, _CUT, (length, cut))
    # In a dictionary of its own: the prompts of a batch share the one that the client sent.
    custom = custom | {CUT_FIELD: _marked(carried)}
    obj.sampling_params = obj.sampling_params | {"custom_params": custom}
    dropped = _dropped.get()
    if dropped is not None:
        dropped.append(cut.dropped)


def cut_tokens(
    manager: Any, tokens: list[int], namespace: str | None
) -> tuple[list[int], str | None]:
    """What a prompt of these tokens, sent without options of its own, is cut to, and the namespace
    of its state. ValueError for users."""
    rule = _rule(manager)
    if rule is None:
        return tokens, namespace
    cut = rule.cut(len(tokens), None)
    if not cut.dropped:
        return tokens, namespace
    namespace, _ = _carried(manager, rule, cut, namespace, tokens)
    return tokens[: cut.head] + tokens[cut.head + cut.dropped :], namespace


def tell(
    original: Callable[..., AsyncIterator[dict[str, Any]]],
    self: Any,
    obj: Any,
    *args: Any,
    **kw: Any,
) -> AsyncIterator[dict[str, Any]]:
    """AROUND TokenizerManager._wait_one_response: say in each reply what was left out. SGLang finds
    the request's state when it is called, and not when the first reply is awaited."""
    replies, known = original(self, obj, *args, **kw), getattr(obj, _CUT, None)
    return replies if known is None else _told(replies, *known, _mode(self))


async def _told(
    replies: AsyncIterator[dict[str, Any]], length: int, cut: Cut, mode: str
) -> AsyncIterator[dict[str, Any]]:
    async for reply in replies:
        if "meta_info" in reply:
            reply["meta_info"][FIELD] = {
                "prompt_tokens": length,
                "kept_first": cut.head,
                "dropped": [cut.head, cut.head + cut.dropped],
                "mode": mode,
            }
        yield reply


def read_field(value: object) -> int | str:
    """The `hc_overflow` of a request: "off", or its head in tokens. Raises ValueError for users."""
    if value == "off":
        return "off"
    if isinstance(value, dict) and set(value) == {"keep_first"}:
        tokens = value["keep_first"]
        if tokens == SYSTEM:
            raise ValueError(
                f'{FIELD}: "keep_first": "system" needs the messages of a chat; send them to '
                "/v1/chat/completions, or give the head as a number of tokens"
            )
        if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0:
            return tokens
    raise ValueError(f'{FIELD} must be "off" or an object such as {{"keep_first": 512}}')


def dropped_of(req: Any) -> int:
    """Tokens that were cut from the prompt of a request in the scheduler."""
    known = _cut_of(req)
    return 0 if known is None else known.dropped


def earlier_of(req: Any) -> EarlierCuts | None:
    """What the prompt of a request in the scheduler was cut to before; None where nothing moves."""
    known = _cut_of(req)
    if known is None or not known.cuts:
        return None
    own = Namespace.of(fields.namespace_of(req))
    if own.adapter is None and own.weights is None:
        return known
    server = {"adapter": own.adapter, "weights": own.weights}
    cuts = [(n, Namespace.of(key)._replace(**server).pack()) for n, key in known.cuts]
    return replace(known, cuts=tuple(cuts))


def count_head(result: tuple[Any, Any], self: Any, request: Any, raw_request: Any = None) -> None:
    """AFTER OpenAIServingChat._convert_to_internal_request: the head becomes a number of tokens.

    A prompt that came as token ids beside its messages was not rendered from them: it is left to
    be refused (`read_field`).
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


class DroppedTokensHeader:
    """ASGI middleware: `x-hc-dropped-tokens` on replies to prompts that were cut.

    The header leaves with the first byte of the reply, which SGLang sends after the prompt was
    read, for streams too.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        dropped: list[int] = []
        _dropped.set(dropped)

        async def with_header(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start" and dropped:
                header = (HEADER, str(sum(dropped)).encode())
                message = message | {"headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, with_header)


def _cut_of(req: Any) -> EarlierCuts | None:
    known = custom_params(fields.sampling_of(req)).get(CUT_FIELD)
    return known if isinstance(known, EarlierCuts) else None


def accept_cut(sampling: Any) -> bool:
    """Put the cut of a request that came to the scheduler in place of its text, or take a text out
    that the tokenizer did not write. Returns whether there was none of those."""
    custom = custom_params(sampling)
    if CUT_FIELD not in custom:
        return True
    text, known = custom[CUT_FIELD], None
    if isinstance(text, EarlierCuts):  # a request that is handled again
        return True
    if isinstance(text, str) and text.isascii() and CUT_KEY_ENV in os.environ:
        mark, payload = text[:MARK], text[MARK:].encode()
        if hmac.compare_digest(mark, _mark(payload)):
            known = _decode(payload)
    # In a dictionary of its own: the prompts of a batch may share one.
    sampling.custom_params = {name: value for name, value in custom.items() if name != CUT_FIELD}
    if known is not None:
        sampling.custom_params[CUT_FIELD] = known
    return known is not None


def _marked(carried: EarlierCuts) -> str:
    payload = _encode(carried)
    return _mark(payload) + payload.decode()


def _mark(payload: bytes) -> str:
    key = bytes.fromhex(os.environ.get(CUT_KEY_ENV, ""))
    return hashlib.blake2b(payload, key=key, digest_size=MARK // 2).hexdigest()


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(EarlierCuts).decode


def _carried(
    manager: Any, rule: OverflowRule, cut: Cut, key: str | None, tokens: Sequence[int]
) -> tuple[str | None, EarlierCuts]:
    """The namespace of what a cut leaves of a prompt, and what the scheduler has to know of it.

    key: the client's own. tokens: the whole prompt.
    """
    if _mode(manager) != REEMBED:
        return key, EarlierCuts(cut.head, cut.dropped, (), b"")

    def name(dropped: int) -> str | None:
        if not dropped:
            return key
        return cut_namespace(key, cut.head, dropped, pack_tokens(tokens[: cut.head + dropped]))

    earlier = rule.earlier(cut)
    left_out = pack_tokens(tokens[cut.head + earlier[-1] : cut.head + cut.dropped])
    if earlier[-1]:
        earlier.append(0)  # for its head
    cuts = tuple((dropped, name(dropped)) for dropped in earlier)
    return name(cut.dropped), EarlierCuts(cut.head, cut.dropped, cuts, left_out)


def check_window(scheduler: Any) -> None:
    """Raise ConfigError where the server's rule would refuse prompts that fit, for want of room."""
    rule = _rule(scheduler)
    if rule is not None and not rule.can_cut:
        raise ConfigError(
            f"--hc-overflow {_mode(scheduler)}: a window of {rule.window} tokens has no room for "
            f"--hc-overflow-keep-first {rule.keep_first}, a step of --hc-overflow-drop "
            f"{rule.drop:g} and --hc-overflow-reserve {rule.reserve}; give a smaller reserve"
        )


def _rule(manager: Any) -> OverflowRule | None:
    """The server's rule; None when it does not cut. manager: the tokenizer's, or the scheduler."""
    config = config_of(arguments.of(manager))
    if config is None or config.overflow == "off":
        return None
    # SGLang takes 5 tokens off its longest request for the longest prompt, and one is generated.
    window = manager.max_req_input_len + 4
    return OverflowRule(
        window, config.overflow_keep_first, config.overflow_drop, config.overflow_reserve
    )


def _mode(manager: Any) -> str:
    """How a server that cuts does it."""
    config = config_of(arguments.of(manager))
    assert config is not None
    return config.overflow


def _may_cut(obj: Any, input_ids: list[int] | None) -> bool:
    """Whether the prompt is nothing but token ids. Others get SGLang's own answer."""
    return (
        bool(input_ids)
        and hasattr(obj, "return_logprob")
        and not obj.contains_mm_input()
        and obj.input_embeds is None
        and obj.session_params is None
        and getattr(obj, "positional_embed_overrides", None) is None
    )
