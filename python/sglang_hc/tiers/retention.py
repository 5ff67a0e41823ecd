"""Pins and a time to live: blocks stay although nobody waits for them, or leave although there is
room.

A pin keeps a session's blocks in the host tier until it ends, e.g. while a tool call runs; a time
to live takes out what nobody has used for long (AttentionStore section 4.3.5). Belongs to the
scheduler thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from sglang_hc.policy.pins import PinLimitError, Pinned, RetentionPriority, SessionPins
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.cuts import base_namespace
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import Prefix


class Retention:
    """Pins and time to live of one host tier. priority: who wants a block."""

    def __init__(
        self,
        host: HostTier,
        disk: LowerTier | None,
        pins: SessionPins,
        priority: RetentionPriority,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pins = pins
        self.priority = priority
        self.counters: Counter[str] = Counter()
        self._host = host
        self._disk = disk
        self._clock = clock

    @property
    def is_timed(self) -> bool:
        """Whether something ends when time passes."""
        return len(self.pins) > 0 or self._host.has_ttl

    def pin(self, prefix: Prefix, session: str, seconds: float) -> int:
        """Hold what the tiers have of a prefix, in place of what the session held before.
        State behind a cut counts in its client's own namespace.

        Returns the number of blocks; for 0 nothing changes. Raises PinLimitError.
        """
        host, disk = self._host, self._disk
        wanted = host.tree.identities(prefix)
        blocks = [b for b in wanted if host.has(b) or (disk is not None and disk.holds(b))]
        if blocks:
            owner = base_namespace(prefix.namespace)
            self.pins.pin(owner, session, blocks, seconds, self._clock())
        return len(blocks)

    def pin_if_possible(self, prefix: Prefix, session: str, seconds: float) -> None:
        """For a request that asked for a pin and is over: what cannot be pinned is counted."""
        try:
            pinned = self.pin(prefix, session, seconds)
        except PinLimitError:
            pinned = 0
        self.counters["pins_refused"] += pinned == 0

    def pinned(self, namespace: str | None) -> list[Pinned]:
        """The pins of a namespace, the first to end first."""
        return self.pins.of(namespace, self._clock())

    def upkeep(self) -> None:
        """End what is over. Called in every pass."""
        now = self._clock()
        self.pins.expire(now)
        self._host.expire(now, is_protected=self._wanted)

    def _wanted(self, node: BlockNode) -> bool:
        return self.priority.next_use(node.block_id) is not None
