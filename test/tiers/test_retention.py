"""Pins and time to live over the host tier: what is held stays, and can never fill the tier."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.policy.eviction import POLICIES, make_policy
from sglang_hc.policy.pins import PinLimitError, RetentionPriority, SessionPins, TimeToLive
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.tiers.retention import Retention
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.host import host_tier, keep

SLOTS = 16


class World:
    """A host tier under a policy, with pins and a time to live of 100 s."""

    def __init__(self, policy: str) -> None:
        self.now = 0.0
        self.window = LookAhead()
        pins = SessionPins.sized_for(SLOTS)
        held = make_policy(policy, self.window, pinned=pins)
        self.host = host_tier(SLOTS, held, TimeToLive(100.0))
        priority = RetentionPriority(self.window, pins)
        self.retention = Retention(self.host, None, pins, priority, clock=lambda: self.now)

    def tokens(self, conversation: int, blocks: int) -> bytes:
        return pack_tokens([conversation] * 64 * blocks)

    def keep(self, conversation: int, blocks: int, namespace: str | None = None) -> None:
        """A turn ends: its missing blocks come in, by evicting what must leave."""
        tokens = self.tokens(conversation, blocks)
        keep(self.host, tokens, namespace, self.now)
        path = self.host.tree.match(Prefix(namespace, tokens))
        assert path.tokens == 64 * blocks, "pins have filled the tier"
        self.host.access(path.nodes, self.now)

    def blocks(self, conversation: int) -> int:
        return len(self.host.tree.match(Prefix(None, self.tokens(conversation, 9))).nodes)


steps = st.lists(
    st.tuples(
        st.sampled_from(["turn", "turn", "turn", "pin", "unpin", "wait"]),
        st.integers(0, 9),
        st.integers(1, 4),
        st.floats(1, 200),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(POLICIES), steps)
def test_what_is_pinned_stays_and_the_server_goes_on(policy: str, history: Any) -> None:
    world = World(policy)
    promised: dict[int, tuple[int, float]] = {}
    for action, conversation, blocks, seconds in history:
        if action == "turn":
            world.keep(conversation, blocks)
        elif action == "pin":
            try:
                count = world.retention.pin(
                    Prefix(None, world.tokens(conversation, blocks)), str(conversation), seconds
                )
            except PinLimitError:
                count = 0
            if count:
                promised[conversation] = count, world.now + seconds
        elif action == "unpin":
            world.retention.pins.unpin(None, str(conversation))
            promised.pop(conversation, None)
        else:
            world.now += seconds
        world.retention.upkeep()
        promised = {c: p for c, p in promised.items() if p[1] > world.now}
        for pinned, (count, _) in promised.items():
            assert world.blocks(pinned) >= count, "a pinned block has left"
        world.host.check_integrity()
        world.retention.pins.check_integrity()


@pytest.mark.parametrize(
    ("tenants", "blocks", "share"), [(1, 4, 0.25), (5, 4, 0.25), (5, 1, 6 / 16)]
)
def test_pins_never_fill_the_tier(tenants: int, blocks: int, share: float) -> None:
    world = World("lru")
    for conversation in range(10):
        tenant = f"tenant {conversation % tenants}"
        world.keep(conversation, blocks, tenant)
        with contextlib.suppress(PinLimitError):
            tokens = world.tokens(conversation, blocks)
            world.retention.pin(Prefix(tenant, tokens), str(conversation), 10)
    assert world.retention.pins.total_blocks == share * SLOTS
    world.keep(99, 4)


def test_nothing_of_the_tokens_is_there() -> None:
    world = World("queue")
    assert world.retention.pin(Prefix(None, world.tokens(1, 2)), "s", 10) == 0
    world.retention.pin_if_possible(Prefix(None, world.tokens(1, 2)), "s", 10)
    assert world.retention.counters["pins_refused"] == 1
    world.keep(1, 2)
    world.retention.pin_if_possible(Prefix(None, world.tokens(1, 2)), "s", 10)
    assert world.retention.counters["pins_refused"] == 1


def test_what_nobody_uses_leaves_but_not_what_is_waited_for_or_pinned() -> None:
    world = World("queue")
    for conversation in range(4):
        world.keep(conversation, 2)
    world.retention.pin(Prefix(None, world.tokens(1, 2)), "s", 500)
    needs = world.host.tree.identities(Prefix(None, world.tokens(2, 2)))
    world.window.update(["r"], 9, lambda _: needs)
    world.now = 60.0
    world.keep(3, 2)
    world.now = 130.0
    world.retention.upkeep()
    assert [world.blocks(conversation) for conversation in range(4)] == [0, 2, 2, 2]
    assert world.host.expired_blocks == 2
    world.window.update([], 9, lambda _: [])
    world.now = 600.0
    world.retention.upkeep()
    assert world.host.published_blocks == 0 and world.host.expired_blocks == 8


def test_a_block_lives_as_long_as_what_was_said_after_it() -> None:
    world = World("lru")
    world.keep(1, 1)
    world.now = 90.0
    world.keep(1, 3)
    world.now = 150.0
    world.retention.upkeep()
    assert world.blocks(1) == 3
