"""Eviction policies on the server's tree and host tier: order, leaves first, exemptions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.eviction import POLICIES, Entry, Leaves, make_policy
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.examples import examples
from support.host import host_tier, keep, tokens_of


class Host:
    """A host tier under one policy; blocks are named by the letters of their path."""

    def __init__(self, name: str, slots: int = 64, **options) -> None:
        self.window = LookAhead()
        self.policy = make_policy(name, self.window, **options)
        self.tier = host_tier(slots, self.policy)
        self.now = 0.0
        self.named: dict[str, BlockNode] = {}

    def store(self, path: str, tokens: int = BLOCK_TOKENS) -> BlockNode:
        """Store the last block of a path whose earlier blocks are there."""
        self.now += 1
        packed = tokens_of(path[:-1]) + pack_tokens([ord(path[-1])] * tokens)
        keep(self.tier, packed, now=self.now)
        self.named[path] = self.tier.tree.match(Prefix(None, packed)).nodes[-1]
        return self.named[path]

    def store_path(self, path: str) -> None:
        for end in range(1, len(path) + 1):
            if path[:end] not in self.named or self.named[path[:end]].slot < 0:
                self.store(path[:end])

    def use(self, path: str) -> None:
        self.now += 1
        self.tier.access([self.named[path[: i + 1]] for i in range(len(path))], self.now)

    def wait_for(self, *paths: str) -> None:
        """The waiting queue holds requests for these paths."""
        self.window.update(
            paths,
            len(paths),
            lambda p: [self.named[p[: i + 1]].block_id for i in range(len(p))],
        )

    def leave(self) -> str:
        """Evict one block and say which."""
        before = {name for name, node in self.named.items() if node.slot >= 0}
        assert self.tier.evict(1, self.now) == 1
        (gone,) = before - {name for name, node in self.named.items() if node.slot >= 0}
        return gone

    def leave_all(self) -> list[str]:
        return [self.leave() for _ in range(self.tier.published_blocks)]


def test_victims_may_be_taken_one_by_one_and_uncover_their_parents():
    host = Host("lru")
    for path in ("abc", "xyz"):
        host.store_path(path)
    taken = []
    for victim in host.policy.victims():
        taken.append(victim)
        host.tier.drop(victim)
        if len(taken) == 4:
            break
    assert taken == [host.named[p] for p in ("abc", "ab", "a", "xyz")]
    assert host.leave_all() == ["xy", "x"]


@pytest.mark.parametrize(("name", "freed"), [("lru", 1), ("queue", 0)])
def test_a_spared_block_ends_the_search_only_where_all_after_it_are_spared_too(name, freed):
    host = Host(name)
    for path in "abc":
        host.store(path)
    host.wait_for("c", "b", "a")
    oldest = host.named["a"]  # and needed last
    assert host.tier.evict(1, host.now, lambda node: node is oldest) == freed
    assert host.tier.evict(1, host.now) == 1


def test_an_unknown_policy_names_those_there_are():
    with pytest.raises(ValueError, match="queue, lru"):
        make_policy("arc", LookAhead())


class Held:
    """Blocks that must stay, as `SessionPins` says it."""

    def __init__(self) -> None:
        self.ids: set[bytes] = set()
        self.listeners: list[Callable[[bytes], None]] = []

    def __len__(self) -> int:
        return len(self.ids)

    def is_pinned(self, block_id: bytes) -> bool:
        return block_id in self.ids

    def subscribe(self, listener: Callable[[bytes], None]) -> None:
        self.listeners.append(listener)

    def turn(self, block_id: bytes) -> None:
        self.ids ^= {block_id}
        for listener in self.listeners:
            listener(block_id)


def test_held_blocks_cost_a_choice_nothing_once_they_were_passed_over():
    held = Held()
    host = Host("lru", slots=60, pinned=held)
    for number in range(50):
        held.turn(host.store(chr(300 + number)).block_id)
    host.store("a")
    assert host.leave() == "a"
    asked = []
    held.is_pinned = lambda block_id: asked.append(block_id) or block_id in held.ids  # type: ignore
    host.store("b")
    assert host.leave() == "b"
    assert len(asked) == 1
    for number in range(50):
        held.turn(host.named[chr(300 + number)].block_id)
    assert host.leave() == chr(300), "let go, it is in the running again"


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["store", "use", "pin", "unpin", "evict", "wait", "hold"]),
        st.integers(0, 10_000),
    ),
    max_size=60,
)


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(POLICIES), ACTIONS)
def test_no_policy_ever_takes_a_pinned_a_held_or_an_inner_block(name, actions):
    held = Held()
    host = Host(name, slots=12, pinned=held)
    pinned: list[BlockNode] = []
    for action, number in actions:
        here = sorted(p for p, node in host.named.items() if node.slot >= 0 and node.parent)
        live = [p for p in here if _in_tree(host, p)]
        path = live[number % len(live)] if live else ""
        if action == "store" and len(path) < 5:
            if host.tier.free_slots:
                host.store(path + "abc"[number % 3])
        elif action == "use" and path:
            host.use(path)
        elif action == "pin" and path:
            node = host.named[path]
            host.tier.pin([node])
            pinned.append(node)
        elif action == "unpin" and pinned:
            host.tier.unpin([pinned.pop(number % len(pinned))])
        elif action == "hold" and path:
            held.turn(host.named[path].block_id)
        elif action == "wait":
            host.wait_for(*live[number % (len(live) + 1) :])
        elif action == "evict":
            allowed = {
                p
                for p in live
                if host.named[p].is_leaf
                and not host.named[p].pins
                and not held.is_pinned(host.named[p].block_id)
            }
            expected = _needed_last(host, allowed) if name == "queue" else allowed
            if allowed:
                gone = host.leave()
                assert gone in expected
            else:
                assert host.tier.evict(1, host.now) == 0
        host.tier.check_integrity()
        assert len(host.policy) == host.tier.published_blocks


def _in_tree(host: Host, path: str) -> bool:
    node = host.named[path]
    return any(found is node for found in host.tier.tree.nodes())


TAKE = 9


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, TAKE)), max_size=60))
def test_leaves_leave_by_their_last_keys_and_of_equal_ones_the_first_pushed(pushes):
    leaves: Leaves = Leaves()
    entries = [Entry(number, 0) for number in range(6)]
    expected: dict[int, tuple[int, int]] = {}

    def take() -> None:
        item = leaves.top()
        assert (item is None) == (not expected)
        if item is not None:
            item[2].stamp = 0
            first = min(expected, key=expected.__getitem__)
            assert item[2].block == first
            del expected[first]

    for stamp, (which, key) in enumerate(pushes, 1):
        if key == TAKE:
            take()
            continue
        entries[which].stamp = stamp
        expected[which] = (key, stamp)
        leaves.push((key,), entries[which], len(expected))
    while expected:
        take()
    take()


def _needed_last(host: Host, allowed: set[str]) -> set[str]:
    """Those that may go: the unneeded, else those whose earliest use is the latest."""
    use = {p: host.window.next_use(host.named[p].block_id) for p in allowed}
    unneeded = {p for p in allowed if use[p] is None}
    if unneeded or not allowed:
        return unneeded
    last = max(u for u in use.values() if u is not None)
    return {p for p in allowed if use[p] == last}


def test_the_heap_does_not_grow_with_uses():
    host = Host("lru")
    for path in ("a", "b"):
        host.store(path)
    for _ in range(5000):
        host.use("a")
    for _ in range(500):
        host.tier.drop(host.store("c"))
    assert host.policy.items < 200
    assert host.leave_all() == ["b", "a"]
