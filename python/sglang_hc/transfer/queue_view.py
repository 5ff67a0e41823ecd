"""What the waiting queue tells the tiers (AttentionStore section 3.3).

Once per scheduling pass the queue is looked at: what the requests in the eviction window need stays
in its tiers, and for the requests in the prefetch window reads from disk are started, head first.
Belongs to the scheduler thread; a pass costs O(window).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.pins import Claims
from sglang_hc.policy.ready_first import ON_THE_WAY
from sglang_hc.policy.windows import EVICTION_STRETCH, LookAhead, RunningMean, window_length
from sglang_hc.transfer.admission import Admission
from sglang_hc.transfer.disk_tier import DiskTier, Prefetched
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.host_tier import HostTier, Spare

REFUSALS = 4
"""Requests per pass whose reads may find no room before the rest is left for another pass."""

MAX_FETCHES = 3
"""Times that reads are started for a request at its turn: after a failure, or when what had come
left again before it was admitted."""

HOST_WEIGHT, DISK_WEIGHT = 1.0, 8.0
"""Restore cost of a token by tier, where ready-first compares requests: a disk is some ten times
slower than the link. What the device has costs nothing."""


class Waiting(NamedTuple):
    """A waiting request: its packed prompt, and how many tokens of it the device has now."""

    namespace: str | None
    tokens: bytes
    on_device: int


WaitingOf = Callable[[str], Waiting]


class QueueView:
    """Look-ahead over one scheduler's waiting queue.

    `window` is the one the eviction policies ask. `prefetch` is `queue` (reads start as requests
    enter the prefetch window), `on-arrival` (when they are queued) or `off`.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        window: LookAhead[str],
        slots: tuple[int, int],
        prefetch: str,
        claims: Claims | None = None,
        *,
        ready_first: bool = False,
    ) -> None:
        """slots: blocks the host tier holds, and the disk tier (0 without one). claims: told to
        the disk; None leaves it to evict by age. ready_first: see `Admission.arrange`."""
        self._host = host
        self._disk = disk
        self.window = window
        self._host_slots, self._disk_slots = slots
        self._prefetch = prefetch
        self._blocks = RunningMean()
        self._started: set[str] = set()
        self._asking: set[str] = set()
        self._costs: dict[str, float] = {}
        self._fetches: Counter[str] = Counter()
        self.admission = Admission(ready_first=ready_first)
        self._changed: set[bytes] = set()
        self._claims = claims
        if disk is not None and claims is not None:
            claims.subscribe(self._changed.add)

    @property
    def eviction_window(self) -> int:
        """Requests whose state is kept: (C_mem + C_disk) / S_kv, stretched (see windows.py)."""
        slots = self._host_slots + self._disk_slots
        return int(EVICTION_STRETCH * window_length(slots, self._blocks.value))

    @property
    def prefetch_window(self) -> int:
        """Requests whose state is fetched early: C_mem / S_kv."""
        return window_length(self._host_slots, self._blocks.value)

    def look(self, queue: Sequence[str], waiting_of: WaitingOf) -> None:
        """The waiting requests, the next to be served first; once per pass, at its top."""
        self.admission.passed(queue)
        if not queue and not len(self.window) and not self._changed:
            return
        self.window.update(queue, self.eviction_window, lambda rid: self._needs(waiting_of(rid)))
        self._tell_disk()
        if self._prefetch == "queue" and self._disk is not None:
            self._start_some(waiting_of)
        elif self._asking:  # on arrival it was not known what there is
            for rid in tuple(self._asking):
                self._start(rid, waiting_of)

    def arrived(self, rid: str, waiting_of: WaitingOf) -> None:
        """A request was queued, or queued again."""
        self.admission.arrived(rid)
        self._started.discard(rid)
        self._costs.pop(rid, None)
        if self._prefetch == "on-arrival":
            self._start(rid, waiting_of)

    def ready(self, rid: str, waiting_of: WaitingOf) -> bool:
        """Whether the request may be admitted now. Its turn has come: what it needs is started.

        False for at most MAX_OVERTAKEN passes in which a request asked for after it was admitted.
        While nobody is, for no longer than MAX_FETCHES fetches and `DiskTier`'s patience with each.
        """
        self.admission.asked(rid)
        if self._disk is None or self._prefetch == "off":
            return True
        if self.admission.is_due(rid):
            self._disk.counters["prefetch_overtaken"] += self._disk.fetching(rid)
            self._disk.cancel(rid)
            return True
        if not self._disk.ready(rid):
            return False
        if self._fetches[rid] >= MAX_FETCHES:
            return True
        outcome = self._disk.prefetch(rid, *waiting_of(rid), spare=self._sooner_than(rid))
        if outcome is Prefetched.NOTHING:
            return True
        if outcome is Prefetched.STARTED:
            self._fetches[rid] += 1
            self._costs.pop(rid, None)
        # What makes no room for the head now will not before its turn is over.
        return outcome is Prefetched.NO_ROOM and self._is_head(rid) and not self._disk.reading

    def readiness(self, rid: str, waiting_of: WaitingOf) -> float | None:
        """What it costs to restore a waiting request, in tokens of the host tier; None while its
        blocks are on their way. Looked up once, and again when they have come."""
        cost = self._costs.get(rid)
        if cost is None:
            if self._disk is not None and self._disk.fetching(rid):
                return ON_THE_WAY
            cost = self._costs[rid] = self._restore_cost(waiting_of(rid))
        return cost

    def gone(self, rid: str) -> None:
        """The request left the queue without being admitted."""
        self.admission.left(rid)
        self._forget(rid)

    def finished(self, rid: str, blocks: int) -> None:
        """A request of so many blocks is over: S_kv's next sample."""
        self._blocks.add(blocks)
        self._forget(rid)

    def _forget(self, rid: str) -> None:
        self.admission.forget(rid)
        self._started.discard(rid)
        self._asking.discard(rid)
        self._costs.pop(rid, None)
        self._fetches.pop(rid, None)
        self.window.discard(rid)
        if self._disk is not None:
            self._disk.cancel(rid)

    def _restore_cost(self, waiting: Waiting) -> float:
        match = self._host.tree.match(waiting.namespace, waiting.tokens)
        known = max(match.tokens, waiting.on_device)
        cost = HOST_WEIGHT * (known - waiting.on_device)
        if self._disk is not None:
            ids = self._host.tree.identities(waiting.namespace, waiting.tokens)
            beyond = ids[known // BLOCK_TOKENS :]
            held = sum(1 for _ in takewhile(self._disk.holds, beyond))
            cost += DISK_WEIGHT * held * BLOCK_TOKENS
        return cost

    def _start_some(self, waiting_of: WaitingOf) -> None:
        """Start the reads of requests that came into the prefetch window or found no room yet."""
        refused = 0
        started = self._started
        for rid in islice(self.window.order, self.prefetch_window):
            if rid not in started:
                self._start(rid, waiting_of)
                refused += rid not in started
                if refused == REFUSALS:  # those behind have less right to room
                    break

    def _start(self, rid: str, waiting_of: WaitingOf) -> None:
        if self._disk is None or rid in self._started:
            return
        ahead = not self._is_head(rid)
        spare = self._sooner_than(rid)
        outcome = self._disk.prefetch(rid, *waiting_of(rid), spare=spare, ahead=ahead)
        if outcome is Prefetched.ASKING:
            self._asking.add(rid)
            return
        self._asking.discard(rid)
        if outcome is not Prefetched.NO_ROOM:
            self._started.add(rid)
        if outcome is Prefetched.STARTED:
            self._costs.pop(rid, None)

    def _tell_disk(self) -> None:
        if self._changed and self._disk is not None and self._claims is not None:
            self._disk.expect(self._claims.next_uses(self._changed))
            self._changed.clear()

    def _is_head(self, rid: str) -> bool:
        order = self.window.order
        return not order or order[0] == rid

    def _sooner_than(self, rid: str) -> Spare | None:
        """Blocks needed no later than by this request do not make room for it."""
        rank = self.window.rank(rid)
        if self._prefetch != "queue" or rank is None:
            return None

        def spare(node: BlockNode) -> bool:
            use = self.window.next_use(node.block_id)
            return use is not None and use <= rank

        return spare

    def _needs(self, waiting: Waiting) -> list[bytes]:
        """Identities of the blocks a request can use, wherever they are or will be."""
        return self._host.tree.identities(waiting.namespace, waiting.tokens)
