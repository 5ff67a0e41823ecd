"""Control requests about state that a session, or tokens, name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.soft_retention import SoftRetention
from sglang_hc.srt.requests import agents
from sglang_hc.srt.requests.agents import Retain
from sglang_hc.srt.requests.forgetting import forget
from sglang_hc.srt.requests.retaining import PREFIX, answer
from sglang_hc.tiers.retention import Retention
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.forgetting import Forgetting
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.host import keep
from support.tiers import build

TOKENS = list(range(200))


@pytest.fixture
def tiers() -> Tiers:
    """Of 64 slots, with 200 tokens of nobody in particular, and of acme."""
    made, _, _ = build(LayerPlan(0, 0, 1), slots=64, device_slots=64)
    old = made.retention
    made.retention = Retention(
        made.host, None, old.pins, old.priority, lambda: 0.0, SoftRetention.sized_for(64)
    )
    for namespace in (None, "s4:acme"):
        keep(made.host, pack_tokens(TOKENS), namespace)
    return made


def ask(tiers: Tiers | None, action: str, **body: Any) -> dict[str, Any]:
    rest = {"ttl_s": 60.0, "priority": 100} if action == "retain" else {}
    named = {"namespace": None, "session": None, "tokens": None} | rest | body
    return answer(tiers, PREFIX + action, named)


def values(tiers: Tiers, namespace: str | None) -> list[float]:
    ids = tiers.host.tree.identities(Prefix(namespace, pack_tokens(TOKENS)))
    return [tiers.retention.soft.value(one) for one in ids]


def test_tokens_are_retained_and_a_session_stands_for_them(tiers: Tiers) -> None:
    reply = ask(tiers, "retain", tokens=TOKENS, session="s")
    assert reply == {"status": 200, "session": "s", "blocks": 4, "ttl_s": 60.0}
    assert all(value > 0 for value in values(tiers, None)) and not any(values(tiers, "s4:acme"))
    assert ask(tiers, "demote", session="s") == {"status": 200, "session": "s", "blocks": 4}
    assert all(value < 0 for value in values(tiers, None))
    assert ask(tiers, "retain", session="s", priority=25)["blocks"] == 4
    assert set(values(tiers, None)) == {1 / 5}
    assert ask(tiers, "prefetch", session="s") == {"status": 200, "session": "s"}
    assert tiers.counts() | {"retentions": 2, "demotions": 1} == tiers.counts()


def test_a_session_is_known_in_its_namespace_alone(tiers: Tiers) -> None:
    agents.apply(tiers.retention, Prefix("s4:acme", pack_tokens(TOKENS)), [Retain(60)], "s")
    tiers.used(Prefix("s4:acme", pack_tokens(TOKENS)), session="s")
    for action in ("retain", "prefetch", "demote"):
        assert ask(tiers, action, session="s")["status"] == 404
        assert ask(tiers, action, session="s", namespace="s4:acme")["status"] == 200
    assert ask(tiers, "demote", tokens=TOKENS)["blocks"] == 4
    assert all(value < 0 for value in values(tiers, "s4:acme")), "by its own session"
    tiers.forget(Forgetting("s4:acme"))
    assert ask(tiers, "retain", session="s", namespace="s4:acme")["status"] == 404
    assert not any(values(tiers, "s4:acme"))


def test_tokens_mean_what_the_weights_of_now_made(tiers: Tiers) -> None:
    made = "s4:acmew2:v2"
    keep(tiers.host, pack_tokens(TOKENS), made)
    body = {"namespace": "s4:acme", "session": "s", "tokens": TOKENS}
    assert answer(tiers, PREFIX + "demote", body, "v2")["blocks"] == 4
    assert not any(values(tiers, "s4:acme")) and all(value < 0 for value in values(tiers, made))
    assert tiers.retention.left_by("s4:acme", "s") == Prefix(made, pack_tokens(TOKENS))


def test_what_another_session_retains_is_not_demoted(tiers: Tiers) -> None:
    left = Prefix(None, pack_tokens(TOKENS))
    agents.apply(tiers.retention, left, [Retain(60, tokens=130)], "mine")
    assert [value > 0 for value in values(tiers, None)] == [True, True, False, False]
    agents.apply(tiers.retention, left, [Retain(60, 0)], "other")
    assert [value > 0 for value in values(tiers, None)] == [True, True, False, False]
    assert [value < 0 for value in values(tiers, None)] == [False, False, True, True]
    tiers.used(left)
    assert [value < 0 for value in values(tiers, None)] == [False] * 4


def test_a_flush_forgets_the_tokens_of_sessions(tiers: Tiers) -> None:
    tiers.used(Prefix(None, pack_tokens(TOKENS)), session="s")
    assert tiers.levels()["sessions"] == 1
    tiers.clear()
    assert tiers.levels()["sessions"] == 0
    assert ask(tiers, "retain", session="s")["status"] == 404


def test_a_session_is_forgotten_by_the_tokens_that_it_left(tiers: Tiers) -> None:
    tiers.used(Prefix("s4:acme", pack_tokens(TOKENS)), session="s")
    asked: list[Forgetting] = []
    replies: list[dict[str, Any]] = []
    scheduler = SimpleNamespace(is_between_stages=False)
    tree = SimpleNamespace(
        tiers=tiers, scheduler=scheduler, forget=lambda what, reply: asked.append(what)
    )
    body = {"client": "s4:acme", "tokens": [], "session": "s"}
    forget(tree, body, replies.append)
    forget(tree, {"client": "s4:acme", "tokens": [1]}, replies.append)
    wanted = [Forgetting("s4:acme", pack_tokens(part)) for part in (TOKENS, [1])]
    assert asked == wanted and not replies
    forget(tree, body | {"client": None}, replies.append)
    assert asked == wanted and replies[0]["status"] == 404


def test_without_tiers_and_beyond_the_most_fetches(tiers: Tiers) -> None:
    assert ask(None, "retain", tokens=TOKENS)["status"] == 501
    replies = [ask(tiers, "prefetch", tokens=TOKENS)["status"] for _ in range(65)]
    assert replies == [200] * 64 + [409]
    assert ask(tiers, "retain", tokens=[1 << 40])["status"] == 500
