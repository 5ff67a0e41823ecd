"""The control request that forgets, and its answers (`tiers.forgetting`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_hc.tiers.forgetting import Answer, judged
from sglang_hc.tree.forgetting import Forgetting
from sglang_hc.tree.identity import pack_tokens

METHOD = "hc_state/forget"
"""Of our control request."""


def _refused(status: int, message: str) -> Answer:
    return {"status": status, "complete": False, "error": {"message": message}}


def joined_answers(answers: Sequence[Answer]) -> Answer:
    """One answer out of those of all replicas: sums, and complete if all are. Of a session one
    replica knows where it is."""
    answers = [one for one in answers if one["status"] != 404] or answers
    missed = list(dict.fromkeys(one["error"]["message"] for one in answers if "error" in one))
    joined: Answer = {}
    for tier in ("device", "host", "disk", "remote"):
        parts = [one[tier] for one in answers if tier in one]
        if parts:
            joined[tier] = {
                name: all(part[name] for part in parts)
                if name == "complete"
                else sum(part[name] for part in parts)
                for name in parts[0]
            }
    return judged(joined, missed) | {"status": max(one["status"] for one in answers)}


NO_TIERS = "this server runs without the tiers; /flush_cache forgets what it has for every client"


def forget(tree: Any, body: dict[str, Any], reply: Callable[[Answer], object]) -> object:
    """Answer a control request. tree: None where the tiers are off."""
    if tree is None:
        reply(_refused(501, NO_TIERS))
    elif tree.scheduler.is_between_stages:
        busy = "with --pp-size above 1 state is forgotten while no request runs; try again"
        reply(_refused(409, busy))
    else:
        tokens, session = pack_tokens(body["tokens"]), body.get("session")
        if session is not None:
            retention = tree.tiers.retention
            left = retention.left_by(body["client"], session)
            if left is None:
                return reply(_refused(404, f"session {session!r} has left nothing here"))
            tokens = left.tokens
        tree.forget(Forgetting(body["client"], tokens), reply)
    return None
