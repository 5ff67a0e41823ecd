"""What the waiting queue tells the tiers (AttentionStore section 3.3).

Once per scheduling pass: what requests in the eviction window need stays, and reads from disk start
for those in the prefetch window (`prefetch.py`, with what `sources.py` tells of the tiers). Belongs
to the scheduler thread; a pass costs the requests that came and went.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.pins import RetentionPriority
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.queue.admission import ON_THE_WAY, Admission, Readiness
from sglang_hc.queue.away import AwaySessions
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.queue.meeting import Meetings
from sglang_hc.queue.mover import BlockMover
from sglang_hc.queue.prefetch import Prefetcher
from sglang_hc.queue.requests import QueuedPrompt, Serial
from sglang_hc.queue.sources import Sources
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.tree.host_tier import HostTier


class QueueRules(NamedTuple):
    """How a waiting queue is served.

    prefetch: `queue` (reads start as requests enter the prefetch window), `on-arrival` (when they
    are queued) or `off`. ready_first: see `Admission.arrange`. can_meet: a prompt may be computed
    in chunks, and its front be computed where its end was stored.
    """

    prefetch: str = "queue"
    ready_first: bool = False
    can_meet: bool = False


class QueueView:
    """Look-ahead over one scheduler's waiting queue.

    `window` is the one the eviction policies ask.
    """

    def __init__(
        self,
        host: HostTier,
        disk: LowerTier | None,
        window: LookAhead,
        rules: QueueRules,
        costs: RestorePlanner,
        priority: RetentionPriority | None = None,
        mover: BlockMover | None = None,
        on_met: Callable[[], object] = lambda: None,
        away: AwaySessions | None = None,
    ) -> None:
        """costs: what fetching and recomputing take on this machine. priority: told to the disk;
        None leaves it to evict by age. mover: over the same disk; None where state does not move
        to new positions. on_met: called at the end of each meeting, see `Meetings`.
        away: learns how long sessions stay away; None where nobody does."""
        self._host = host
        self._disk = disk
        self._mover = mover
        self.away = away
        self.window = window
        self._costs = costs
        self._can_fetch = disk is not None or mover is not None
        below = disk if disk is not None else mover
        self._now = now = below.now if below is not None else time.monotonic
        self.requests = window.requests
        self.admission = Admission(self.requests, ready_first=rules.ready_first)
        self.counters: Counter[str] = Counter()
        """Numbers that only grow."""
        self.meetings = Meetings(host.tree, costs, self.counters, now, on_met)
        met = self.meetings if rules.can_meet else None
        self.sources = Sources(host, disk, mover, self.requests, met, now)
        mode = rules.prefetch if self._can_fetch else "off"
        slots = host.num_slots, disk.capacity if disk is not None else 0
        self._prefetcher = Prefetcher(window, self.sources, costs, slots, mode, self.counters)
        self._changed: set[bytes] = set()
        """Blocks of which the disk is to be told when they are used next."""
        self._priority = priority
        self.promotions = below.coming if below is not None else None
        """Blocks on their way into host memory."""
        if below is not None:
            below.coming.subscribe(self._came, self._lost)
        if disk is not None and disk.ends is not None:
            disk.ends.subscribe(self._end_came)
        if disk is not None and priority is not None:
            priority.subscribe(self._changed.update)

    # -- a pass ----------------------------------------------------------------------------------

    def on_schedule_step(self, queue: Sequence[Serial], decoding: int = 0) -> None:
        """The waiting requests, the next to be served first, and how many requests decode; once
        per pass, at its top."""
        self.meetings.decoding = decoding
        if not (queue or self.window.queue or self._changed):
            self.admission.admitted(())
            self._prefetcher.turns.idle()  # the last of the queue may have been aborted
            return
        departed = self._prefetcher.on_schedule_step(queue, self._needs_of)
        admitted = self.admission.admitted(departed)
        if admitted:
            self._prefetcher.admitted(admitted, self._now())
        for request in departed:  # SGLang does not report every departure
            self._prefetcher.cancel(request)
        self._send_eviction_hints()
        self._prefetcher.fetch()

    def arrived(self, request: Serial, look: Callable[[], QueuedPrompt]) -> None:
        """A request was queued, or queued again. look: says what it is."""
        self._prefetcher.arrived(request, look)

    def ready(self, request: Serial) -> bool:
        """Whether the request may be admitted now. Its turn has come, so what it lacks is fetched.

        False in at most MAX_BYPASSED passes that admit a request behind it; while none does, for no
        longer than `Prefetcher.ready` says.
        """
        self.admission.asked(request)
        if not self._can_fetch:
            return True
        if self.admission.must_admit(request):
            self.counters["prefetch_bypassed"] += self.requests.is_fetching(request)
            self._prefetcher.give_up(request)
            return True
        ready = self._prefetcher.ready(request, self._now())
        if self.meetings.of(request) is not None:
            waiting = self.sources.look_at(request)
            known = max(self._host.tree.match(waiting.prompt).tokens, waiting.on_device())
            return self.meetings.may_begin(request, known) and ready
        return ready

    def readiness(self, requests: Collection[Serial]) -> Readiness:
        """What it costs to restore each of these requests; ON_THE_WAY while blocks are on their way
        to it. Looked up once, and again when they have come."""
        costs: dict[Serial, float] = {}
        for request, known in zip(requests, map(self.requests.get, requests), strict=True):
            record = known or self.requests[request]
            cost = ON_THE_WAY if record.awaits else record.restore_seconds
            if cost is None:
                cost = record.restore_seconds = self.sources.restore_cost(request, self._costs)
            costs[request] = cost
        return costs.__getitem__

    def take_loaded(self, request: Serial) -> int:
        """Tokens that came from disk while this request waited for them; asked once."""
        record = self.requests.get(request)
        if record is None:
            return 0
        tokens, record.loaded_tokens = record.loaded_tokens, 0
        return tokens

    # -- ends of requests ------------------------------------------------------------------------

    def left(self, request: Serial) -> None:
        """The request left the queue without being admitted."""
        self.meetings.end(request)
        self.admission.left(request)
        self._prefetcher.cancel(request)
        self._gone(request)

    def finished(self, request: Serial, blocks: int, *, comes_back: bool = False) -> None:
        """A request of so many blocks is over: S_kv's next sample. comes_back: or it is queued
        again, and goes on with its session."""
        self.meetings.end(request)
        self.admission.left(request)
        self._prefetcher.finished(request, blocks)
        if not comes_back:
            self._gone(request)

    # -- inner parts -----------------------------------------------------------------------------

    def _needs_of(self, request: Serial) -> Sequence[bytes]:
        needs = self.sources.needs_of(request)
        if self.away is not None:
            self.counters["sessions_back"] += self.away.came(request, needs)
        return needs

    def _gone(self, request: Serial) -> None:
        if self.away is not None:
            self.away.gone(request)

    def _came(self, block_ids: Sequence[bytes]) -> None:
        if self._mover is not None:
            copied = self._mover.take_copied(block_ids)
            self._ended(copied, 0)
            block_ids = [block_id for block_id in block_ids if block_id not in copied]
        self._ended(block_ids, BLOCK_TOKENS)

    def _ended(self, block_ids: Iterable[bytes], loaded: int) -> None:
        """Blocks are in host memory, each with so many tokens that were loaded from below it."""
        for request, blocks in self._prefetcher.complete(block_ids).items():
            record = self.requests[request]
            record.loaded_tokens += blocks * loaded
            record.restore_seconds = None

    def _end_came(self, name: bytes, has_end: bool) -> None:
        """The end parts that somebody waits for have come, or will not."""
        if has_end:
            self._ended((name,), 0)
        else:
            self._prefetcher.fail(name)

    def _lost(self, block_id: bytes) -> None:
        if self._mover is not None:
            self._mover.take_copied((block_id,))
        self._prefetcher.fail(block_id)

    def _send_eviction_hints(self) -> None:
        if self._changed and self._disk is not None and self._priority is not None:
            next_use = self._priority.next_use
            self._disk.expect({block_id: next_use(block_id) for block_id in self._changed})
            self._changed.clear()
