"""The scheduler's answers to control requests about state that a session, or tokens, name: retain
it for a while, let it leave host memory first, or fetch it from below."""

from __future__ import annotations

import logging
from typing import Any

from sglang_hc.srt.requests.forgetting import NO_TIERS
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.identity import Prefix, pack_tokens
from sglang_hc.tree.namespaces import Namespace

logger = logging.getLogger(__name__)

PREFIX = "hc_retention/"
"""Of the method names in these control requests: retain, demote, prefetch."""


def answer(
    tiers: Tiers | None, method: str, body: dict[str, Any], weights: str | None = None
) -> dict[str, Any]:
    """The reply to one control request: an HTTP `status`, and what the client is shown. body:
    `namespace`, `session`, `tokens` (None: what the session left last), and for retain `ttl_s` and
    `priority` of 100. weights: of now, whose state is meant, also of a session that left another's
    (`tree.namespaces`)."""
    if tiers is None:
        return _error(501, NO_TIERS)
    try:
        return _answer(tiers, method.removeprefix(PREFIX), body, weights)
    except Exception:
        logger.exception("sglang-hc: a control request failed")
        return _error(500, "the request failed; the server's log says why")


def _answer(tiers: Tiers, action: str, body: dict[str, Any], weights: str | None) -> dict[str, Any]:
    retention, session, tokens = tiers.retention, body["session"], body["tokens"]
    if tokens is None:
        path = retention.left_by(body["namespace"], session)
    else:
        path = Prefix(body["namespace"], pack_tokens(tokens))
    if path is None:
        return unknown(session)
    own = Namespace.of(path.namespace)._replace(weights=weights)
    path = Prefix(own.pack(), path.tokens)
    if session is not None and tokens is not None:
        retention.note(session, path)
    named = {} if session is None else {"session": session}
    if action == "prefetch":
        if not tiers.prefetch(path):
            return _error(409, "too many fetches are asked for already; try again")
        return {"status": 200, **named}
    if action == "demote":
        return {"status": 200, **named, "blocks": retention.demote(path, session)}
    blocks = retention.retain(path, body["ttl_s"], body["priority"] / 100, session)
    return {"status": 200, **named, "blocks": blocks, "ttl_s": body["ttl_s"]}


def unknown(session: str | None) -> dict[str, Any]:
    """The answer for a session that left nothing here."""
    return _error(404, f"session {session!r} has left nothing here; name its tokens")


def _error(status: int, message: str) -> dict[str, Any]:
    return {"status": status, "error": {"message": message}}
