"""Pins, soft retention and a time to live: blocks stay although nobody waits for them, or leave
although there is room.

A pin keeps a session's blocks in the host tier until it ends, e.g. while a tool call runs; what is
retained softly leaves later than what nobody wants (`retain`: wanted until now + seconds, with a
weight); a time to live takes out what nobody has used for long (AttentionStore section 4.3.5).
Belongs to the scheduler thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.pins import PinLimitError, Pinned, RetentionPriority, SessionPins
from sglang_hc.policy.soft_retention import DEMOTED, MAX_RETAIN_S, SoftRetention
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.tiers.sessions import Sessions
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.cuts import base_namespace
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import Prefix
from sglang_hc.tree.namespaces import weights_of


class Retention:
    """Pins, soft retention and time to live of one host tier. priority: who wants a block. soft:
    what else is wanted; the eviction policy asks it. sessions: what they left, by name."""

    def __init__(
        self,
        host: HostTier,
        disk: LowerTier | None,
        pins: SessionPins,
        priority: RetentionPriority,
        clock: Callable[[], float] = time.monotonic,
        soft: SoftRetention | None = None,
        ttl: float = 0.0,
    ) -> None:
        """soft: None where nothing is retained. ttl: of blocks, in seconds; 0 for none."""
        self.pins = pins
        self.priority = priority
        self.soft = SoftRetention(0) if soft is None else soft
        self.sessions = Sessions(host.num_slots * BLOCK_TOKENS, ttl)
        self.counters: Counter[str] = Counter()
        self._host = host
        self._disk = disk
        self._clock = clock

    @property
    def is_timed(self) -> bool:
        """Whether something ends when time passes."""
        return len(self.pins) > 0 or len(self.soft) > 0 or self._host.has_ttl

    def pin(self, prefix: Prefix, session: str, seconds: float) -> int:
        """Hold what the tiers have of a prefix, in place of what the session held before.
        State behind a cut counts in its client's own namespace.

        Returns the number of blocks; for 0 nothing changes. Raises PinLimitError.
        """
        host, disk = self._host, self._disk
        wanted = host.tree.identities(prefix)
        blocks = [b for b in wanted if host.has(b) or (disk is not None and disk.holds(b))]
        if blocks:
            owner, weights = base_namespace(prefix.namespace), weights_of(prefix.namespace)
            self.pins.pin(owner, session, blocks, seconds, self._clock(), weights)
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

    def retain(
        self, prefix: Prefix, seconds: float, weight: float = 1.0, session: str | None = None
    ) -> int:
        """Want the blocks of a prefix, wherever they are, until now + seconds: see
        `SoftRetention.retain`. Returns how many are."""
        owner = base_namespace(prefix.namespace)
        blocks = self._host.tree.identities(prefix)
        held = self.soft.retain(owner, blocks, seconds, self._clock(), weight, session)
        self.counters["retentions"] += held > 0
        self.counters["retentions_cut"] += held < len(blocks)
        return held

    def demote(self, prefix: Prefix, session: str | None = None) -> int:
        """Have the blocks of a prefix leave host memory first, where nobody but this session
        retains them, until they are used again. Returns how many will."""
        owner = base_namespace(prefix.namespace)
        blocks = self._host.tree.identities(prefix)
        held = self.soft.retain(owner, blocks, MAX_RETAIN_S, self._clock(), DEMOTED, session)
        self.counters["demotions"] += held > 0
        return held

    def used(self, prefix: Prefix, session: str | None) -> None:
        """A request is over. session: the name that its client gave it; None for none."""
        if self.soft.demoted:
            self.soft.used(self._host.tree.identities(prefix))
        if session is not None:
            self.note(session, prefix)

    def note(self, session: str, prefix: Prefix) -> None:
        """A session is at the end of this path."""
        self.sessions.note(session, prefix, self._clock())

    def left_by(self, client: str | None, session: str) -> Prefix | None:
        """What a session left last; None for one that is not known."""
        return self.sessions.of(client, session)

    def forget(self, names: Callable[[str | None], bool]) -> None:
        """End what these namespaces hold, and forget the names of their sessions."""
        self.pins.unpin_all(names)
        self.soft.forget(names)
        self.sessions.forget(names)

    def upkeep(self) -> None:
        """End what is over. Called in every pass."""
        now = self._clock()
        self.pins.expire(now)
        self.soft.advance(now)
        self.sessions.expire(now)
        self._host.expire(now, is_protected=self._wanted)

    def _wanted(self, node: BlockNode) -> bool:
        return self.priority.next_use(node.block_id) is not None
