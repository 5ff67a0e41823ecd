"""What the waiting queue tells the tiers (AttentionStore section 3.3).

Once per scheduling pass: what requests in the eviction window need stays, and reads from disk start
for those in the prefetch window. `Prefetcher` decides; this module answers its questions about the
tiers. Belongs to the scheduler thread; a pass costs the requests that came and went.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple, Protocol

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.eviction import Block, IsProtected
from sglang_hc.policy.pins import RetentionPriority
from sglang_hc.queue.admission import ON_THE_WAY, Admission, Readiness
from sglang_hc.queue.fetch_costs import Missing, RestoreCosts
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.queue.meeting import Meetings, TailReads
from sglang_hc.queue.prefetch import Prefetcher
from sglang_hc.queue.requests import QueuedPrompt, Serial
from sglang_hc.store.disk_tier import DiskTier
from sglang_hc.tree.cuts import EarlierPath
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import BlockPath
from sglang_hc.tree.promotions import Promotions


class Mover(Protocol):
    """Brings the blocks of cut prompts to host memory; see `tiers.grafts.Grafts`."""

    @property
    def coming(self) -> Promotions: ...
    @property
    def now(self) -> Callable[[], float]: ...

    def find(
        self, path: BlockPath, earlier: Sequence[EarlierPath], first: int
    ) -> Sequence[SourceTier] | None: ...

    def fetch(
        self,
        path: BlockPath,
        earlier: Sequence[EarlierPath],
        first: int,
        count: int,
        is_protected: IsProtected[Block] | None,
    ) -> int: ...

    def take_copied(self, block_ids: Iterable[bytes]) -> set[bytes]: ...


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
        disk: DiskTier | None,
        window: LookAhead[Serial],
        rules: QueueRules,
        costs: RestoreCosts,
        priority: RetentionPriority | None = None,
        mover: Mover | None = None,
        on_met: Callable[[], object] = lambda: None,
    ) -> None:
        """costs: what fetching and recomputing take on this machine. priority: told to the disk;
        None leaves it to evict by age. mover: over the same disk; None where state does not move
        to new positions. on_met: called at the end of each meeting, see `Meetings`."""
        self._host = host
        self.in_host = host.has
        self._disk = disk
        self._mover = mover
        self.window = window
        self._costs = costs
        self._can_fetch = disk is not None or mover is not None
        mode = rules.prefetch if self._can_fetch else "off"
        slots = host.num_slots, disk.capacity if disk is not None else 0
        self._prefetcher = Prefetcher(window, self, costs, slots, mode)
        self.requests = window.requests
        self.admission: Admission[Serial] = Admission(self.requests, ready_first=rules.ready_first)
        self._can_meet = rules.can_meet
        below = disk if disk is not None else mover
        self._now = below.now if below is not None else time.monotonic
        tree, counters, now = host.tree, self.counters, self._now
        self.meetings: Meetings[Serial] = Meetings(tree, costs, counters, now, on_met)
        self._changed: set[bytes] = set()
        """Blocks of which the disk is to be told when they are used next."""
        self._priority = priority
        self.promotions = below.coming if below is not None else None
        """Blocks on their way into host memory."""
        self.coming: Collection[bytes] = ()
        """See `fetch_costs.Below`."""
        if below is not None:
            self.coming = below.coming.block_ids
            below.coming.subscribe(self._came, self._lost)
        if disk is not None and priority is not None:
            priority.subscribe(self._changed.update)

    @property
    def counters(self) -> Counter[str]:
        """Numbers that only grow."""
        return self._prefetcher.counters

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

    def look_at(self, request: Serial) -> QueuedPrompt:
        """What a waiting request is."""
        record = self.requests[request]
        if record.waiting is None:
            record.waiting = record.look()
        return record.waiting

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
            waiting = self.look_at(request)
            known = max(self._host.tree.match(waiting.prompt).tokens, waiting.on_device())
            return self.meetings.may_begin(request, known) and ready
        return ready

    def readiness(self, requests: Collection[Serial]) -> Readiness[Serial]:
        """What it costs to restore each of these requests; ON_THE_WAY while blocks are on their way
        to it. Looked up once, and again when they have come."""
        costs: dict[Serial, float] = {}
        for request, known in zip(requests, map(self.requests.get, requests), strict=True):
            record = known or self.requests[request]
            cost = ON_THE_WAY if record.awaits else record.restore_seconds
            if cost is None:
                cost = record.restore_seconds = self._restore_cost(request)
            costs[request] = cost
        return costs.__getitem__

    def take_loaded(self, request: Serial) -> int:
        """Tokens that came from disk while this request waited for them; asked once."""
        record = self.requests.get(request)
        if record is None:
            return 0
        tokens, record.loaded_tokens = record.loaded_tokens, 0
        return tokens

    # -- histories computed and read at the same time --------------------------------------------

    def meet(
        self, request: Serial, missing: Missing, end: int, is_protected: IsProtected[Block] | None
    ) -> bool:
        """See `fetch_costs.Below`."""
        disk = self._disk
        if not self._can_meet or disk is None or self.requests[request].earlier:
            return False  # of a cut prompt some blocks are made of others

        read = partial(disk.fetch_tail, missing.path, is_protected=is_protected)
        tail = TailReads(read, disk.came_last)
        return self.meetings.begin(request, missing, end, disk.coming, tail)

    # -- ends of requests ------------------------------------------------------------------------

    def left(self, request: Serial) -> None:
        """The request left the queue without being admitted."""
        self.meetings.end(request)
        self.admission.left(request)
        self._prefetcher.cancel(request)

    def finished(self, request: Serial, blocks: int) -> None:
        """A request of so many blocks is over: S_kv's next sample."""
        self.meetings.end(request)
        self.admission.left(request)
        self._prefetcher.finished(request, blocks)

    # -- what the prefetcher asks ----------------------------------------------------------------

    def missing(self, request: Serial) -> Missing | None:
        """Blocks that can be had and are not in host memory; see `fetch_costs.Below`."""
        path = self._path_of(request)
        first = sum(1 for _ in takewhile(self.in_host, path.block_ids))
        sources = self._find(request, path, first)
        if sources is None:
            return None
        on_device = self.look_at(request).on_device() if sources else 0
        if (first + len(sources)) * BLOCK_TOKENS <= on_device:
            sources = ()
        return Missing(path, first, sources, on_device)

    def reading(self, tier: SourceTier) -> int:
        """Blocks that are being read from a tier."""
        return 0 if self._disk is None else self._disk.reading(tier)

    def start(
        self,
        request: Serial,
        missing: Missing,
        first: int,
        count: int,
        is_protected: IsProtected[Block] | None,
    ) -> int:
        """Read blocks from disk, or move them, into staged slots; see `fetch_costs.Below`."""
        path, earlier = missing.path, self.requests[request].earlier
        if self._mover is not None and earlier:
            started = self._mover.fetch(path, earlier, first, count, is_protected)
        else:
            assert self._disk is not None
            started = self._disk.fetch(path, first, count, is_protected)
        if started:
            self.requests[request].restore_seconds = None
        return started

    def keep_free(self, slots: int, is_protected: IsProtected[Block]) -> None:
        """Early eviction, so that a prefetch finds free slots (AttentionStore section 3.3.1)."""
        if self._host.free_slots < slots:
            self._host.evict(slots - self._host.free_slots, self._now(), is_protected)

    # -- inner parts -----------------------------------------------------------------------------

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

    def _lost(self, block_id: bytes) -> None:
        if self._mover is not None:
            self._mover.take_copied((block_id,))
        self._prefetcher.fail(block_id)

    def _needs_of(self, request: Serial) -> Sequence[bytes]:
        """Blocks that the request can use, wherever they are; worked out once per request."""
        record = self.requests[request]
        if record.needs is None:
            prompt, _, earlier = self.look_at(request)
            record.needs, record.path = self._host.tree.path(prompt)
            if self._disk is not None:
                record.path = self._disk.trusted(record.path)
            if earlier is not None and self._mover is not None:
                ways = earlier.paths(self._host.tree.fingerprint, prompt.tokens)
                if self._disk is not None:
                    trusted = self._disk.trusted
                    ways = tuple(way._replace(path=trusted(way.path)) for way in ways)
                record.earlier = ways
                moving = self._to_move(record.path.block_ids, record.earlier)
                record.needs = [*record.needs, *moving]
        return record.needs

    def _to_move(self, own: Sequence[bytes], earlier: Sequence[EarlierPath]) -> Iterator[bytes]:
        """Blocks of earlier paths that a path of `own` blocks can use, as far as host memory lacks
        these."""
        first = sum(1 for _ in takewhile(self.in_host, own))
        for way in earlier:
            ids = way.path.block_ids
            places = (way.place(block) for block in range(first, len(own)))
            yield from (ids[place] for place in places if place < len(ids))

    def _find(self, request: Serial, path: BlockPath, first: int) -> Sequence[SourceTier] | None:
        """Where the blocks from `first` on that can be brought to host memory lie; None: not known
        yet."""
        earlier = self.requests[request].earlier
        if self._mover is not None and earlier:
            return self._mover.find(path, earlier, first)
        if self._disk is None:
            return ()
        wanted = path.block_ids[first:]
        count = self._disk.find(wanted)
        return None if count is None else self._disk.sources(wanted[:count])

    def _path_of(self, request: Serial) -> BlockPath:
        self._needs_of(request)
        path = self.requests[request].path
        assert path is not None
        return path

    def _restore_cost(self, request: Serial) -> float:
        """Cost to restore what the request has in the tiers, in the units of `costs`."""
        waiting = self.look_at(request)
        on_device = waiting.on_device()
        known = max(self._host.tree.match(waiting.prompt).tokens, on_device)
        cost = self._costs.token_seconds(SourceTier.HOST) * (known - on_device)
        if self._disk is not None:
            beyond = self._path_of(request).block_ids[known // BLOCK_TOKENS :]
            below = Counter(self._disk.sources(list(takewhile(self._disk.holds, beyond))))
            for tier, blocks in below.items():
                cost += self._costs.token_seconds(tier) * blocks * BLOCK_TOKENS
        return cost

    def _send_eviction_hints(self) -> None:
        if self._changed and self._disk is not None and self._priority is not None:
            self._disk.expect(self._priority.next_uses(self._changed))
            self._changed.clear()
