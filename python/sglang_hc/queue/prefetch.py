"""Which blocks are fetched from disk ahead of their request's turn (AttentionStore section 3.3.1).

Fetches start in the order of their requests' expected turns; for equal turns the shorter fetch
comes first. A block is fetched once, however many requests wait for it. Of a state that cannot be
ready in time, only the part that can is fetched, unless waiting for the rest is cheaper than
recomputing it. A request whose turn has come waits no longer than the blocks on their way can save.

One `Prefetcher` decides this in the server (queue/queue_view.py) and in the simulator
(tools/simulator/tiers.py). It moves no bytes: the tiers (`Below`) say what is where, begin what it
has chosen, and tell it what has come. Pure: times come from the caller.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice

from sglang_hc.policy.eviction import Block, IsProtected
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.queue.fetch_costs import Below, FetchedEnd, Missing, TurnEstimate
from sglang_hc.queue.lookahead import EVICTION_STRETCH, LookAhead, RunningMean, window_length
from sglang_hc.queue.requests import QueuedPrompt, Serial, not_told

PATIENCE = 5.0
"""Most seconds a request is passed over for one fetch before it recomputes instead."""

MAX_FETCHES = 3
"""Times that a request waits for a fetch at its turn: after a failure, or when what had come left
again before it was admitted."""

LOOKED_AT = 32
"""Requests per pass for which fetches are begun; a burst of arrivals takes several passes."""

RECHECKED = 48
"""Requests at the head for which blocks are fetched again when others have evicted them since."""

TRY_BLOCKS = 4
"""Most blocks that are fetched for a try (see `tries.Tries`)."""

QUIET_PASSES = 16
"""After so many passes without an event the tiers are looked at anyway: a block may have lost its
last user without an event, and can make room now."""


def reserve_slots(num_slots: int, mean_blocks: float) -> int:
    """Host slots kept free by early eviction, so that a prefetch never waits for one.

    Two requests' state (the one being fetched and the next), at most a sixteenth of the tier.
    """
    return min(num_slots // 16, max(1, int(2 * mean_blocks)))


class Prefetcher:
    """Look-ahead over one waiting queue: its windows, the fetches of a pass, the wait at a turn.

    mode: `queue` (requests are looked at as they enter the prefetch window), `on-arrival` (when
    they are queued) or `off`. stretch: see `EVICTION_STRETCH`.
    """

    def __init__(
        self,
        window: LookAhead,
        below: Below,
        costs: RestorePlanner,
        slots: tuple[int, int],
        mode: str,
        counters: Counter[str],
        stretch: float = EVICTION_STRETCH,
    ) -> None:
        """slots: blocks the host tier holds, and the disk tier (0 without one). counters: gets the
        fetches, and what became of them."""
        self.window = window
        self.requests = window.requests
        self.costs = costs
        self.mode = mode
        self.turns = TurnEstimate()
        self.counters = counters
        self._below = below
        self._host_slots, self._disk_slots = slots
        self._stretch = stretch
        self._mean = RunningMean()
        self._unseen: dict[Serial, None] = {}  # to be looked at, in the order they came
        self._quiet = 0

    # -- windows ---------------------------------------------------------------------------------

    @property
    def eviction_window(self) -> int:
        """Requests whose state is kept: (C_mem + C_disk) / S_kv, stretched (see lookahead.py)."""
        slots = self._host_slots + self._disk_slots
        return int(self._stretch * window_length(slots, self._mean.value))

    @property
    def prefetch_window(self) -> int:
        """Requests whose state is fetched early: C_mem / S_kv, the reserve left out."""
        return window_length(self._host_slots - self.reserve, self._mean.value)

    @property
    def reserve(self) -> int:
        """Host slots that are kept free; see `reserve_slots`."""
        return reserve_slots(self._host_slots, self._mean.value)

    # -- what happens to requests and blocks -----------------------------------------------------

    def on_schedule_step(
        self, queue: Sequence[Serial], needs: Callable[[Serial], Sequence[bytes]]
    ) -> Sequence[Serial]:
        """The waiting requests, the next to be served first; once per pass, at its top. Returns
        those that have left the queue since the last pass; call `admitted` or `cancel` for each.

        needs: identities of the blocks a request can use; asked once, when it enters the window.
        """
        change = self.window.update(queue, self.eviction_window, needs)
        for request in change.left:
            self._unseen.pop(request, None)
        if self.mode == "queue":
            self._unseen.update(dict.fromkeys(change.entered))
        if change.left or change.entered:
            self._quiet = 0
        return change.departed

    def arrived(self, request: Serial, look: Callable[[], QueuedPrompt] = not_told) -> None:
        """A request was queued, or queued again. See `RequestTable.arrived`."""
        self.cancel(request)
        self.requests.arrived(request, look)
        if self.mode != "off":
            self._unseen[request] = None

    def admitted(self, requests: Collection[Serial], now: float) -> None:
        """These were admitted in one pass; they wait for nothing any more."""
        self.turns.admitted(len(requests), now)
        for request in requests:
            self.cancel(request)

    def finished(self, request: Serial, blocks: int) -> None:
        """A request of so many blocks is over; its size is the next sample of S_kv."""
        self._mean.add(max(1, blocks))
        self.cancel(request)

    def cancel(self, request: Serial) -> None:
        """The request has left the queue, whoever admitted it, or is over. Nobody waits any more
        for its blocks."""
        self._quiet = 0
        self._unseen.pop(request, None)
        self.window.leave(request)

    def give_up(self, request: Serial) -> None:
        """Nothing more is fetched for this request: it is served with what is there."""
        self.requests.stop_waiting(request)
        self._unseen.pop(request, None)
        record = self.requests[request]
        record.patience = record.wait_until = None
        record.fetches_over = True

    def complete(self, block_ids: Iterable[bytes]) -> dict[Serial, int]:
        """Blocks are in host memory. Returns the requests that waited for them, and for how many
        of them each."""
        self._quiet = 0
        waited = self.requests.ended(block_ids)
        for request in waited:
            record = self.requests[request]
            if not record.awaits and record.wait_until is not None:
                record.wait_until = None
                record.fetches += 1
        return waited

    def fail(self, block_id: bytes) -> None:
        """A block will not come. Who waited for it is looked at again at its turn."""
        for request in self.complete((block_id,)):
            self.requests[request].last_block = None

    # -- ahead of the turn -----------------------------------------------------------------------

    def fetch(self) -> None:
        """The fetches of one pass. Nothing is looked at in passes without an event."""
        if not self.window.queue:
            self.turns.idle()
        self._quiet = self._quiet % QUIET_PASSES + 1
        if self.mode == "off" or self._quiet > 1:
            return
        if self.mode == "queue":
            self._below.keep_free(self.reserve, self._is_needed)
        chosen = list(islice(self._candidates(), LOOKED_AT))
        chosen.sort(key=lambda candidate: (candidate[0], candidate[2].count))
        for turn_in, request, missing in chosen:
            self._start(request, missing, turn_in, at_turn=self._is_head(request))
        if len(chosen) == LOOKED_AT:
            self._quiet = 0

    def _candidates(self) -> Iterator[tuple[float, Serial, Missing]]:
        """(seconds to its turn, request, what it lacks) of the requests that may lack blocks."""
        for turn_in, request in self._to_look_at():
            missing = self._below.missing(request)
            if missing is None:
                self._quiet = 0
                continue
            self._unseen.pop(request, None)
            if not missing.is_nothing:
                yield turn_in, request, missing
            else:
                self._reached(request, missing, missing.first)

    def _to_look_at(self) -> Iterator[tuple[float, Serial]]:
        unseen = self._unseen
        if self.mode == "on-arrival":
            for request in tuple(unseen):
                yield math.inf, request
            return
        for position, request in enumerate(islice(self.window.order, self.prefetch_window)):
            if request in unseen or (position < RECHECKED and self._is_missed(request)):
                yield self.turns.turn_in(position), request
            elif position >= RECHECKED and not unseen:
                return

    def _is_missed(self, request: Serial) -> bool:
        """A block that was in host memory for the request, or fetched for it, has left since."""
        record = self.requests.get(request)
        if record is None or record.awaits or record.fetches_over or record.last_block is None:
            return False
        return not self._below.in_host(record.last_block)

    # -- at the turn -----------------------------------------------------------------------------

    def ready(self, request: Serial, now: float) -> bool:
        """Whether the request, whose turn it is, may be admitted. What it lacks is fetched.

        False for no more than MAX_FETCHES fetches, and for no longer than PATIENCE each.
        """
        record = self.requests[request]
        if self.mode == "off" or record.fetches_over:
            return True
        if record.fetches >= MAX_FETCHES:
            self.give_up(request)
            return True
        if not self.requests.is_fetching(request) and self._need_not_wait(request):
            return True
        patience = PATIENCE if record.patience is None else record.patience
        until = now + max(0.0, min(PATIENCE, patience))
        # What a look-up has found may be worth a shorter wait than its answer.
        record.wait_until = until if record.wait_until is None else min(until, record.wait_until)
        if now < record.wait_until:
            return False
        self.counters["prefetch_late"] += 1
        self.give_up(request)
        return True

    def _need_not_wait(self, request: Serial) -> bool:
        """Whether the request lacks nothing, or what it lacks is not worth a fetch or
        cannot be fetched now."""
        missing = self._below.missing(request)
        if missing is None:
            return False
        if missing.is_nothing:
            return True
        wanted = self._start(request, missing, 0.0, at_turn=True)
        if self.requests.is_fetching(request):
            return False
        if not wanted:
            self.give_up(request)
            return True
        # Nothing is on its way, and blocks that are protected from the head stay so until its turn.
        return self._is_head(request) and not self._below.coming

    # -- inner parts -----------------------------------------------------------------------------

    def _start(self, request: Serial, missing: Missing, turn_in: float, *, at_turn: bool) -> int:
        """Wait for what is under way already, begin the rest as far as it is worth it and there is
        room. Returns how many of the rest are worth it."""
        ids, first, end = missing.path.block_ids, missing.first, missing.first + missing.count
        coming = self._below.coming
        while first < end and ids[first] in coming:
            self.requests.wait(request, ids[first : first + 1])
            first += 1
        # A later block of the path may still be on its way for a request that has left.
        end = next((i for i in range(first, end) if ids[i] in coming), end)
        # What is read continues what was computed in host memory, so both must fit there.
        can_meet = at_turn and missing.first == first < end <= self._host_slots
        if can_meet and self._meet(request, missing, end):
            return 0
        wanted = self._worth(missing, first, end, turn_in)
        started = 0
        if wanted:
            started = self._begin(request, missing, first, wanted)
            self.counters["prefetches"] += started > 0
        elif first < end:
            self.counters["prefetch_not_worth"] += 1
            started = self._try(request, missing, first, end)
        lacks_room = started < wanted
        if missing.end is not None and first + started == missing.first + missing.count:
            lacks_room = not self._begin_end(request, missing, missing.end)
        if lacks_room:
            self._unseen[request] = None
        self._reached(request, missing, first + started)
        if missing.end is not None:
            patience = missing.saved(self.costs, missing.end.usable, missing.end.blocks)
        elif wanted or not started:
            patience = missing.saved(self.costs, missing.first, first + wanted)
        else:
            patience = missing.try_seconds(self.costs)
        self.requests[request].patience = patience
        return wanted

    def _meet(self, request: Serial, missing: Missing, end: int) -> bool:
        """Let the request compute its front while the rest is read; it waits for nothing then."""
        if not self._below.meet(request, missing, end, self._sooner_than(request)):
            return False
        self._reached(request, missing, missing.first)
        self.give_up(request)
        return True

    def _begin(self, request: Serial, missing: Missing, first: int, count: int) -> int:
        """Fetch `count` blocks, or as many as find room; the request waits for them."""
        is_protected = self._sooner_than(request)
        started = self._below.start(request, missing, first, count, is_protected)
        self.requests.wait(request, missing.path.block_ids[first : first + started])
        return started

    def _begin_end(self, request: Serial, missing: Missing, end: FetchedEnd) -> bool:
        """Fetch the end parts that the blocks there and on their way are to be continued with.
        False where there is no room for them."""
        if end.begin is None or missing.saved(self.costs, 0, end.blocks) < 0:
            return True
        name = end.begin(self._sooner_than(request))
        if name is not None:
            self.requests.wait(request, (name,))
        return name is not None

    def _try(self, request: Serial, missing: Missing, first: int, end: int) -> int:
        """A fetch that is not worth it, now and then, so that the costs of fetching can be seen.
        A request counts once, however often it is looked at. Returns the blocks on their way."""
        tries, record = self.costs.tries, self.requests[request]
        if tries is None or record.doubted or missing.end is not None:
            return 0
        record.doubted = True
        if not tries.due:
            tries.refused()
            return 0
        started = self._begin(request, missing, first, min(end - first, TRY_BLOCKS))
        if started:
            tries.tried()
            self.counters["prefetch_tries"] += 1
        return started

    def _worth(self, missing: Missing, first: int, end: int, turn_in: float) -> int:
        """Leading blocks of [first, end) to fetch: those in time for the turn, and the rest if
        waiting for it beats recomputing it."""
        stop, late = missing.in_time(self.costs, self._below.reading, first, end, turn_in)
        if stop < end and late <= missing.saved(self.costs, stop, end):
            stop = end
        if missing.end is not None and stop < missing.first + missing.count:
            return 0  # without its end the rest is of no use
        # At admission the whole run is restored, or nothing of it.
        return stop - first if missing.saved(self.costs, 0, stop) >= 0 else 0

    def _reached(self, request: Serial, missing: Missing, end: int) -> None:
        """Host memory has, or gets, the first `end` blocks of the path."""
        self.requests[request].last_block = missing.path.block_ids[end - 1] if end else None

    def _is_needed(self, block: Block) -> bool:
        return self.window.next_use(block.block_id) is not None

    def _sooner_than(self, request: Serial) -> IsProtected[Block] | None:
        """Blocks needed no later than by this request do not make room for it."""
        rank = self.window.rank(request)
        if self.mode != "queue" or rank is None:
            return None

        def is_protected(block: Block) -> bool:
            use = self.window.next_use(block.block_id)
            return use is not None and use <= rank

        return is_protected

    def _is_head(self, request: Serial) -> bool:
        """Nobody is known to stand before it."""
        return self.window.queue[:1] in ((), (request,))
