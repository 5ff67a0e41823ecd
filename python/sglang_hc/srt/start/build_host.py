"""The host tier of a scheduler process, and what decides what leaves it."""

from __future__ import annotations

from collections.abc import Callable

from sglang_hc.config import HcConfig
from sglang_hc.policy.eviction import EvictionPolicy, make_policy
from sglang_hc.policy.learned import LEARNED, LearnedPolicy
from sglang_hc.policy.pauses import Pauses
from sglang_hc.policy.pins import SessionPins, TimeToLive
from sglang_hc.policy.soft_retention import SoftRetention
from sglang_hc.queue.away import AwaySessions
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.tree.block_tree import BlockNode, BlockTree
from sglang_hc.tree.host_tier import HostTier


def host_tier(
    config: HcConfig,
    slots: int,
    fingerprint: bytes,
    window: LookAhead,
    pins: SessionPins,
    soft: SoftRetention,
    clock: Callable[[], float],
) -> tuple[HostTier, AwaySessions | None]:
    """An empty host tier, and what learns how long sessions stay away; None where nobody does.
    clock: of decisions, the same on all ranks."""
    tree = BlockTree(fingerprint)
    ttl = TimeToLive[BlockNode](config.ttl) if config.ttl else None
    if config.eviction != LEARNED:
        policy: EvictionPolicy[BlockNode] = make_policy(config.eviction, window, pins, soft)
        return HostTier(tree, slots, policy, ttl), None
    learned = LearnedPolicy[BlockNode](Pauses(), window, pins, soft)
    away = AwaySessions(learned.pauses, learned, tree, clock)
    return HostTier(tree, slots, learned, ttl), away
