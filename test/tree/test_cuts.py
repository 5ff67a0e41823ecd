"""Names of cut paths, and the earlier paths that hold their blocks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.eviction import LruPolicy
from sglang_hc.policy.overflow import OverflowRule
from sglang_hc.policy.pins import RetentionPriority, SessionPins
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.tiers.retention import Retention
from sglang_hc.tree.block_tree import BlockTree
from sglang_hc.tree.cuts import EarlierCuts, base_namespace, cut_namespace
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import BLOCK_BYTES, Prefix, pack_tokens
from sglang_hc.tree.namespaces import Namespace, client_namespace

RULE = OverflowRule(window=512, keep_first=64, drop=0.4, reserve=64)
FINGERPRINT = b"f" * 16

keys = st.none() | st.text(max_size=6) | st.sampled_from(["a1:b", "c1:0", "k1:a"])
adapters = st.none() | st.uuids().map(lambda name: name.hex)


def named(key: str | None, adapter: str | None) -> str | None:
    """The namespace of a client's key and an adapter."""
    return adapted(client_namespace(None, key), adapter)


def adapted(space: str | None, adapter: str | None) -> str | None:
    return Namespace.of(space)._replace(adapter=adapter).pack()


def whole(seed: int, length: int, changed: int | None = None) -> list[int]:
    tokens = [(seed * 7919 + i * 31) % 997 for i in range(length)]
    if changed is not None:
        tokens[changed] += 1
    return tokens


def namespace_of(
    key: str | None, adapter: str | None, tokens: list[int]
) -> tuple[str | None, bytes]:
    """Namespace and packed tokens of what a server with `reembed` makes of a prompt."""
    cut = RULE.cut(len(tokens), None)
    kept = pack_tokens(tokens[: cut.head] + tokens[cut.head + cut.dropped :])
    if not cut.dropped:
        return named(key, adapter), kept
    before = pack_tokens(tokens[: cut.head + cut.dropped])
    base = client_namespace(None, key)
    return adapted(cut_namespace(base, cut.head, cut.dropped, before), adapter), kept


prompts = st.builds(
    whole,
    st.integers(0, 2),
    st.sampled_from([300, 449, 460, 600, 700, 900, 1400]),
    st.none() | st.integers(0, 299),
)
requests = st.lists(st.tuples(keys, adapters, prompts), min_size=2, max_size=6)


@settings(max_examples=200, deadline=None)
@given(requests)
def test_state_behind_a_cut_is_found_by_nobody_else(
    found: list[tuple[str | None, str | None, list[int]]],
) -> None:
    """Every request leaves its blocks. Another one, and the same one sent as a prompt that merely
    equals its cut, finds a block exactly if its own state would be the same: the same namespace,
    the same tokens up to the block's end, and the same tokens left out before."""
    tree = BlockTree(FINGERPRINT)
    left: dict[bytes, tuple[object, ...]] = {}
    sent = list(found)
    for key, adapter, tokens in found:  # prompts that equal the cut ones
        cut = RULE.cut(len(tokens), None)
        sent.append((key, adapter, tokens[: cut.head] + tokens[cut.head + cut.dropped :]))
    for key, adapter, tokens in sent:
        space, kept = namespace_of(key, adapter, tokens)
        cut = RULE.cut(len(tokens), None)
        left_out = tuple(tokens[: cut.head + cut.dropped]) if cut.dropped else ()
        parent = tree.root(space)
        for index, block_id in enumerate(tree.path(Prefix(space, kept))[1].block_ids):
            end = (index + 1) * BLOCK_BYTES
            state = (key, adapter, cut.dropped, left_out, kept[:end])
            assert left.setdefault(block_id, state) == state, "two states have one identity"
            parent = tree.insert(parent, kept[index * BLOCK_BYTES : end]).node
            assert parent.block_id == block_id
    assert len(set(left.values())) == len(left), "one state has two identities"


@given(keys, adapters, st.integers(1, 4), st.integers(1, 9))
def test_pins_count_by_the_clients_own_key(
    key: str | None, adapter: str | None, head: int, dropped: int
) -> None:
    head, dropped = head * BLOCK_TOKENS, dropped * BLOCK_TOKENS
    before = pack_tokens(whole(0, head + dropped))
    base = client_namespace(None, key)
    space = adapted(cut_namespace(base, head, dropped, before), adapter)
    assert base_namespace(space) == named(key, adapter)
    assert base_namespace(named(key, adapter)) == named(key, adapter)


def test_a_pin_behind_a_cut_is_its_clients() -> None:
    clock = 0.0
    host = HostTier(BlockTree(FINGERPRINT), 64, LruPolicy())
    pins = SessionPins(8, 60.0)
    priority = RetentionPriority(LookAhead(), pins)
    retention = Retention(host, None, pins, priority, lambda: clock)
    spaces = [namespace_of("tenant", None, whole(0, n)) for n in (300, 900)]
    for space, kept in spaces:
        slot = host.stage(clock)
        assert slot is not None
        host.publish(host.tree.root(space), kept[:BLOCK_BYTES], slot, clock)
        assert retention.pin(Prefix(space, kept), "session", 5.0) == 1
    (pinned,) = retention.pinned("k6:tenant")
    assert pinned.blocks == 1, "the session's new pin takes the place of the old one"
    assert retention.pinned(None) == [] and pins.held("k6:tenant") == 1


@settings(max_examples=100, deadline=None)
@given(st.integers(449, 2500), st.integers(0, 3))
def test_blocks_are_where_the_earlier_paths_say(length: int, turns: int) -> None:
    tokens = whole(turns, length)
    cut = RULE.cut(length, None)
    dropped = RULE.earlier(cut)
    assert dropped == sorted(dropped, reverse=True) and all(n < cut.dropped for n in dropped)
    assert cut.dropped - dropped[-1] <= RULE.window
    left_out = pack_tokens(tokens[cut.head + dropped[-1] : cut.head + cut.dropped])
    spaces = [f"cut {n}" for n in dropped]
    cuts = list(zip(dropped, spaces, strict=True))
    if dropped[-1]:
        cuts.append((0, None))
    kept = pack_tokens(tokens[: cut.head] + tokens[cut.head + cut.dropped :])
    earlier = EarlierCuts(cut.head, cut.dropped, tuple(cuts), left_out)
    paths = earlier.paths(FINGERPRINT, kept)
    tree = BlockTree(FINGERPRINT)
    for (before, space), path in zip(cuts, paths, strict=True):
        there = pack_tokens(tokens[: cut.head] + tokens[cut.head + before :])
        if cut.dropped - before > RULE.window:
            there = there[: cut.head * 4]  # too long ago: only the head is of use
        assert path.path == tree.path(Prefix(space, there))[1]
        for block in range(len(kept) // BLOCK_BYTES):
            place = path.place(block)
            mine = kept[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            assert path.shift_of(block) == (place - block) * BLOCK_TOKENS
            if place < len(path.path.block_ids):
                assert there[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES] == mine
