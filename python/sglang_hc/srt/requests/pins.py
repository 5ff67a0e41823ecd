"""Pins that requests and HTTP clients ask for: the field, its check, the scheduler's answers.

A request names the pin in `custom_params`, which SGLang hands on untouched from /generate and from
the OpenAI routes (`extra_body` of the openai client):

    {"custom_params": {"hc_pin": {"session": "s1", "ttl_s": 300}}}

What the request leaves behind, prompt and reply, is then pinned when it is over. The HTTP routes
(`routes.py`) reach the scheduler through SGLang's control request with a free body.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from sglang.srt.managers.io_struct import DumperControlReqInput, DumperControlReqOutput

from sglang_hc.errors import convert
from sglang_hc.policy.pins import MAX_PIN_S, PinLimitError
from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments, fields
from sglang_hc.srt.engine.guard import counters, tree_of
from sglang_hc.srt.requests import retaining, self_test
from sglang_hc.srt.requests.forgetting import METHOD, NO_TIERS, forget
from sglang_hc.tiers.retention import Retention
from sglang_hc.tree.identity import Prefix, pack_tokens
from sglang_hc.tree.namespaces import Namespace

logger = logging.getLogger(__name__)

FIELD = "hc_pin"
PREFIX = "hc_pins/"
"""Of the method names in control requests that are ours."""

SessionName = Annotated[str, Meta(min_length=1, max_length=256, pattern="^[^\\ud800-\\udfff]*$")]
PinSeconds = Annotated[float, Meta(gt=0, le=MAX_PIN_S)]


class PinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pin as it is asked for. session: None names it after the request."""

    ttl_s: PinSeconds
    session: SessionName | None = None


def custom_params(sampling: Any) -> dict[str, Any]:
    """The free fields of a request. sampling: SGLang's object, or the client's own fields."""
    get = sampling.get if isinstance(sampling, dict) else partial(getattr, sampling)
    custom = get("custom_params", None)
    return custom if isinstance(custom, dict) else {}


def read_pin_request(value: object) -> PinRequest:
    """A pin from JSON. Raises ValueError for users."""
    if not isinstance(value, dict):
        raise ValueError(f'{FIELD} must be an object such as {{"session": "s1", "ttl_s": 300}}')
    return convert(value, PinRequest, FIELD)


def check_pin_request(self: Any, obj: Any, input_ids: list[int] | None) -> None:
    """BEFORE TokenizerManager._validate_one_request: ValueError becomes HTTP status 400."""
    value = custom_params(getattr(obj, "sampling_params", None)).get(FIELD)
    if value is not None and config_of(arguments.of(self)) is not None:
        read_pin_request(value)


def pin_request_of(req: Any) -> PinRequest | None:
    """What a request in the scheduler asked for; it was checked when it came."""
    value = custom_params(fields.sampling_of(req)).get(FIELD)
    if value is None:
        return None
    try:
        return read_pin_request(value)
    except ValueError as error:
        counters["ignored_fields"] += 1
        logger.warning("sglang-hc: a pin is ignored: %s", error)
        return None


def control(original: Callable[..., Any], self: Any, recv_req: DumperControlReqInput) -> Any:
    """AROUND Scheduler.handle_dumper_control: answer what is ours."""
    method, body = recv_req.method, recv_req.body
    own = (PREFIX, self_test.PREFIX, retaining.PREFIX)
    if not method.startswith(own) and method != METHOD:
        return original(self, recv_req)
    tree = tree_of(self)

    def reply(answer: dict[str, Any]) -> None:
        output = DumperControlReqOutput(success=True, response=[answer])
        self.ipc_channels.send_to_tokenizer.send_output(output, recv_req)

    if method == METHOD:
        forget(tree, body, reply)
    elif method.startswith(self_test.PREFIX):
        reply(self_test.answer(tree, method, body))
    elif method.startswith(retaining.PREFIX):
        tiers, weights = (None, None) if tree is None else (tree.tiers, tree.version)
        reply(retaining.answer(tiers, method, body, weights))
    else:
        if tree is not None and method == PREFIX + "pin":
            own = Namespace.of(body.get("namespace"))._replace(weights=tree.version)
            body = body | {"namespace": own.pack()}
        reply(answer(None if tree is None else tree.tiers.retention, method, body))
    return None


def answer(retention: Retention | None, method: str, body: dict[str, Any]) -> dict[str, Any]:
    """The reply to one control request: an HTTP `status`, and what the client is shown."""
    if retention is None:
        return _error(501, NO_TIERS)
    namespace, session = body.get("namespace"), body.get("session", "")
    try:
        if method == PREFIX + "list":
            return _listing(retention, namespace)
        if method == PREFIX + "unpin":
            if not retention.pins.unpin(namespace, session):
                return _error(404, f"session {session!r} has no pin in this namespace")
            return {"status": 200, "session": session}
        prefix = Prefix(namespace, pack_tokens(body["tokens"]))
        blocks = retention.pin(prefix, session, body["ttl_s"])
    except PinLimitError as error:
        return _error(409, str(error))
    except Exception:
        logger.exception("sglang-hc: a control request failed")
        return _error(500, "the request failed; the server's log says why")
    if not blocks:
        return _error(404, "no tier has a block of these tokens; pin after a request was served")
    return {"status": 200, "session": session, "blocks": blocks, "ttl_s": body["ttl_s"]}


def joined(replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One answer out of those of all replicas: the sum of what succeeded, or the first refusal."""
    good = [reply for reply in replies if reply["status"] == 200]
    reply = dict((good or replies)[0])
    for name in ("blocks", "max_blocks"):
        if name in reply:
            reply[name] = sum(one[name] for one in good)
    if "pins" in reply:
        reply["pins"] = [pin for one in good for pin in one["pins"]]
    return reply


def _listing(retention: Retention, namespace: str | None) -> dict[str, Any]:
    pins = [
        {"session": pin.session, "blocks": pin.blocks, "expires_in_s": round(pin.seconds, 3)}
        for pin in retention.pinned(namespace)
    ]
    pinned = retention.pins.held(namespace)
    most = retention.pins.max_blocks(namespace)
    return {"status": 200, "pins": pins, "blocks": pinned, "max_blocks": most}


def _error(status: int, message: str) -> dict[str, Any]:
    return {"status": status, "error": {"message": message}}
