"""The host tier as tests use it: built and filled here, and nowhere else in the tests.

A path may be named by a word. Each letter is one block of 64 equal tokens, so words share blocks
as prompts share prefixes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.eviction import EvictionPolicy, IsProtected, LruPolicy, make_policy
from sglang_hc.policy.pins import RetentionPriority, SessionPins, TimeToLive
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.queue.queue_view import QueueRules, QueueView
from sglang_hc.store.block_io import BlockIo
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.store.read_watch import OnRead
from sglang_hc.tree.block_tree import BlockNode, BlockTree
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import BLOCK_BYTES, TOKEN_BYTES, BlockPath, Prefix, pack_tokens
from support.rates import UNKNOWN_COSTS

FINGERPRINT = b"f" * 16


def host_tier(
    slots: int,
    policy: EvictionPolicy[BlockNode] | None = None,
    ttl: TimeToLive[BlockNode] | None = None,
    fingerprint: bytes = FINGERPRINT,
) -> HostTier:
    """An empty host tier, which evicts the least recently used blocks unless told otherwise."""
    policy = LruPolicy() if policy is None else policy  # one without blocks is falsy
    return HostTier(BlockTree(fingerprint), slots, policy, ttl)


def keep(
    host: HostTier,
    tokens: bytes,
    namespace: str | None = None,
    now: float = 0.0,
    is_protected: IsProtected[BlockNode] | None = None,
    *,
    ready: bool = True,
) -> list[BlockNode]:
    """Publish what the tier lacks of a path of packed tokens, as far as there is room.

    Returns the new blocks, root first. ready: their bytes are said to be there.
    """
    known = host.tree.match(Prefix(namespace, tokens))
    if known.tokens * TOKEN_BYTES == len(tokens):
        return []
    host.pin(known.nodes)
    staged = []
    for at in range(known.tokens // BLOCK_TOKENS * BLOCK_BYTES, len(tokens), BLOCK_BYTES):
        slot = host.stage(now, is_protected)
        if slot is None:
            break
        staged.append((slot, tokens[at : at + BLOCK_BYTES]))
    whole = known.tokens // BLOCK_TOKENS
    parent = known.nodes[whole - 1] if whole else host.tree.root(namespace)
    new = []
    for slot, piece in staged:
        outcome = host.publish(parent, piece, slot, now)
        assert outcome.created
        parent = outcome.node
        if ready:
            host.mark_ready(parent)
        new.append(parent)
    host.unpin(known.nodes)
    return new


class HostQueue(NamedTuple):
    """The host tier, what lies below it, and the requests that wait for blocks of both."""

    window: LookAhead
    host: HostTier
    disk: LowerTier | None
    queue: QueueView


def host_queue(
    slots: int,
    io: BlockIo | None = None,
    eviction: str = "queue",
    prefetch: str = "queue",
    clock: Callable[[], float] = time.monotonic,
    *,
    costs: RestorePlanner = UNKNOWN_COSTS,
    hint_disk: bool = False,
    ready_first: bool = False,
    can_meet: bool = False,
    on_read: OnRead = lambda tier, blocks, seconds: None,
) -> HostQueue:
    """A waiting queue over an empty host tier. io: the disk; None for none. hint_disk: the disk is
    told which blocks waiting requests need."""
    window = LookAhead()
    host = host_tier(slots, make_policy(eviction, window))
    disk = LowerTier(io, host, clock, on_read) if io is not None else None
    rules = QueueRules(prefetch, ready_first, can_meet)
    queue = queue_over(host, disk, window, rules, costs=costs, hint_disk=hint_disk)
    return HostQueue(window, host, disk, queue)


def queue_over(
    host: HostTier,
    disk: LowerTier | None,
    window: LookAhead,
    rules: QueueRules = QueueRules(),  # noqa: B008  it is a tuple
    *,
    costs: RestorePlanner = UNKNOWN_COSTS,
    hint_disk: bool = False,
) -> QueueView:
    """The waiting queue over tiers that exist already."""
    priority = RetentionPriority(window, SessionPins(0, 1.0)) if hint_disk else None
    return QueueView(host, disk, window, rules, costs, priority)


def identities(tokens: bytes, namespace: str | None = None) -> list[bytes]:
    """Identities of the whole blocks of a path of packed tokens, root first."""
    return BlockTree(FINGERPRINT).identities(Prefix(namespace, tokens))


def path_of(word: str) -> BlockPath:
    tokens = tokens_of(word)
    return BlockPath(Prefix(None, tokens), identities(tokens))


def tokens_of(word: str) -> bytes:
    return pack_tokens([ord(letter) for letter in word for _ in range(BLOCK_TOKENS)])


def words_in(tree: BlockTree) -> set[str]:
    """Words whose last block is in the tree and can be served."""
    return {
        "".join(chr(node.tokens[3]) for node in last.path()) for last in tree.nodes() if last.ready
    }
