"""Discrete events: arrivals, continuous batching on one server's GPUs, transfers from the disks.

    arrive -> waiting -> admitted (prefill; decoding stops meanwhile) -> decoding -> finished
                 |  prefetch: disk -> host                                 |-> next turn arrives

Decode steps are not simulated one by one: while the batch stays the same they take the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice

from sglang_hc.queue.admission import ON_THE_WAY, Admission
from sglang_hc.tools.simulator.jobs import Conversation, Job, Overflow
from sglang_hc.tools.simulator.measures import Measures
from sglang_hc.tools.simulator.models import GpuCosts
from sglang_hc.tools.simulator.tiers import TieredCache, Transfer
from sglang_hc.tools.simulator.workloads import Workload

CONSIDERED = 64
"""Waiting requests that one pass looks at for admission."""


@dataclass(frozen=True)
class Event:
    """What happened to a request, for `replay`. kind: arrive, admit or finish.

    loaded: at an admission, whether blocks were read from disk for it.
    """

    time: float
    kind: str
    session: int
    loaded: bool = False


@dataclass
class _Running:
    job: Job
    context: int


@dataclass
class Engine:
    """One server working through a workload.

    overflow: one of `jobs.OVERFLOW_MODES`. `on_served` is called with the number of turns admitted
    so far.
    """

    workload: Workload
    cache: TieredCache
    costs: GpuCosts
    max_batch: int = 24
    ready_first: bool = False
    overflow: str = "off"
    on_served: Callable[[int], None] | None = None
    now: float = 0.0
    events: list[Event] = field(default_factory=list)
    measures: Measures = field(default_factory=Measures)

    def __post_init__(self) -> None:
        overflow = Overflow(self.overflow, self.costs.model.context)
        self._talks = [Conversation(i, s, overflow) for i, s in enumerate(self.workload.sessions)]
        self._admission: Admission[int] = Admission(self.cache.window.requests)
        self._agenda: list[tuple[float, int, int | Transfer]] = []
        self._ticket = 0
        self._queue: list[int] = []
        self._queue_changed = False
        self._running: dict[int, _Running] = {}
        self._ends: list[tuple[float, int]] = []
        self._steps = 0.0
        self._step_seconds = 0.0
        self._context = 0
        self._disk_free = 0.0
        self._passed: set[int] = set()
        self._served = 0
        self._numbers = 0

    def run(self) -> Measures:
        """Serve everything. Deterministic: the same workload gives the same events."""
        for talk in self._talks:
            if talk.session.turns:
                self._schedule(talk.session.arrival, talk.index)
        while self._agenda or self._running:
            self._advance()
            if self._queue and (len(self._running) < self.max_batch or len(self._queue) < 256):
                self._pass()
        self.measures.simulated_seconds = self.now
        return self.measures

    def _schedule(self, time: float, what: int | Transfer) -> None:
        self._ticket += 1
        heappush(self._agenda, (time, self._ticket, what))

    def _advance(self) -> None:
        """To the next finish or the next event, whichever comes first."""
        coming = self._agenda[0][0] if self._agenda else float("inf")
        if self._ends:
            end = self.now + (self._ends[0][0] - self._steps) * self._step_seconds
            if end <= coming:
                self.now = max(self.now, end)
                self._steps = self._ends[0][0]
                while self._ends and self._ends[0][0] <= self._steps:
                    self._finish(self._running.pop(heappop(self._ends)[1]))
                self._batch_changed()
                return
            if coming > self.now:
                self._steps += (coming - self.now) / self._step_seconds
        time, _, what = heappop(self._agenda)
        self.now = max(self.now, time)
        if isinstance(what, Transfer):
            self.cache.fetched(what, self.now)
        else:
            self._arrive(self._talks[what], time)

    def _arrive(self, talk: Conversation, time: float) -> None:
        job = talk.next_job(self._numbers)
        self._numbers += 1
        job.arrived = time
        self.cache.arrive(job)
        self._queue.append(job.number)
        self._queue_changed = True
        self.events.append(Event(self.now, "arrive", talk.index))

    def _finish(self, running: _Running) -> None:
        job = running.job
        talk = self._talks[job.session]
        talk.answered(job)
        self._context -= running.context
        self._look_ahead()
        self.cache.finish(job, talk.known, talk.chain, self.now)
        self.events.append(Event(self.now, "finish", talk.index))
        if not talk.done:
            turn = talk.session.turns[talk.turn]
            self._schedule(max(self.now + turn.think, turn.at or 0.0), talk.index)

    def _pass(self) -> None:
        """One scheduler pass: look ahead, prefetch, admit what fits; and the look at the top of the
        next one, which comes at once on a server."""
        self._look_ahead()
        free = self.max_batch - len(self._running)
        if free > 0:
            considered = self._queue[:CONSIDERED]
            chosen = list(islice(self._admissible(considered), free))
            self._carry()
            self._admission.count(considered, chosen)
            self.cache.prefetcher.admitted(chosen, self.now)
            for number in chosen:
                self._queue.remove(number)
                self._queue_changed = True
                self._admit(self.cache.jobs[number])
            if chosen:
                self._batch_changed()
                self._look_ahead()

    def _admissible(self, considered: Sequence[int]) -> Iterator[int]:
        """Waiting requests that may be admitted, in the order in which they are asked."""
        if self.ready_first:
            considered = self._admission.order(considered, self._readiness)
        for number in considered:
            if self._admission.is_due(number):
                self.cache.prefetcher.give_up(number)
            if self.cache.ready(number, self.now):
                yield number
            else:
                self._passed.add(number)

    def _carry(self) -> None:
        """What the tiers have begun to fetch goes through the disk, one after the other."""
        for transfer in self.cache.take_started():
            seconds = self.costs.block_seconds * len(transfer.promotions)
            self._disk_free = max(self._disk_free, self.now) + seconds
            self._schedule(self._disk_free, transfer)

    def _look_ahead(self) -> None:
        if self._queue_changed:
            self.cache.look_ahead(self._queue)
            self._queue_changed = False
        self.cache.prefetch(self.now)
        self._carry()

    def _readiness(self, number: int) -> float:
        if self.cache.window.requests.is_fetching(number):
            return ON_THE_WAY
        found = self.cache.find(self.cache.jobs[number], self.now)
        return self.costs.restore_seconds(found.host + found.disk) + self._load_seconds(
            len(found.disk_blocks)
        )

    def _load_seconds(self, blocks: int) -> float:
        """Reading blocks that were not prefetched, behind what the disk has to do already."""
        if not blocks:
            return 0.0
        backlog = max(0.0, self._disk_free - self.now)
        return backlog + self.costs.fetch_seconds(blocks * self.costs.model.slot_bytes)

    def _admit(self, job: Job) -> None:
        """Restore or recompute, whichever is faster, and prefill; the batch waits for it.

        Without prefetch what is on disk is read now. With it, it was not worth waiting for.
        """
        reusable = self.cache.reusable(job)
        found = self.cache.find(job, self.now)
        load = self._load_seconds(len(found.disk_blocks))
        if self.cache.prefetcher.mode != "off":
            load = math.inf if found.disk_blocks else 0.0
        prompt = job.prompt_tokens
        best, restored, from_disk = self.costs.prefill_seconds(prompt, 0), 0, False
        for depth, wait, disk in (
            (found.device, 0.0, False),
            (found.device + found.host, self.costs.restore_seconds(found.host), False),
            (
                found.tokens,
                max(load, self.costs.restore_seconds(found.host + found.disk)),
                True,
            ),
        ):
            # Restoration is overlapped with the prefill of the new tokens, layer by layer.
            seconds = max(wait, self.costs.prefill_seconds(prompt - depth, depth))
            if depth and seconds <= best:
                best, restored, from_disk = seconds, depth, disk
        loaded = from_disk and bool(found.disk_blocks)
        self.cache.admit(job, found, self.now, load=loaded)
        self.events.append(Event(self.now, "admit", job.session, loaded))
        if loaded:
            self._disk_free = self.now + load
        self.now += best
        self._served += 1
        if self._served > self.workload.warmup_turns:
            seen = found.as_late() if job.number in self._passed else found
            self.measures.admitted(job, seen, reusable, restored, self.now - job.arrived)
        self._passed.discard(job.number)
        if self.on_served is not None:
            self.on_served(self._served)
        context = prompt + job.output_tokens // 2
        self._running[job.number] = _Running(job, context)
        self._context += context
        heappush(self._ends, (self._steps + max(1, job.output_tokens), job.number))

    def _batch_changed(self) -> None:
        batch = len(self._running)
        self._step_seconds = self.costs.step_seconds(batch, self._context) if batch else 0.0
