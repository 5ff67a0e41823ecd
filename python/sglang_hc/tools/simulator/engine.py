"""Discrete events: arrivals, continuous batching on one server's GPUs, transfers from the disks.

    arrive -> waiting -> admitted (prefill; decoding stops meanwhile) -> decoding -> finished
                 |  prefetch: disk -> host                                 |-> next turn arrives

Decode steps are not simulated one by one: while the batch stays the same they take the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import islice

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.restore_plan import RestorePlan
from sglang_hc.queue.admission import ON_THE_WAY, Admission
from sglang_hc.queue.meeting import Action, Meeting
from sglang_hc.tools.simulator.disk import ReadQueue
from sglang_hc.tools.simulator.jobs import Conversation, Job, Overflow
from sglang_hc.tools.simulator.measures import Measures
from sglang_hc.tools.simulator.models import GpuCosts
from sglang_hc.tools.simulator.tiers import Found, TieredCache
from sglang_hc.tools.workloads.sessions import Workload

CONSIDERED = 64
"""Waiting requests that one pass looks at for admission."""


@dataclass(frozen=True)
class Event:
    """What happened to a request, for `clairvoyant.replay`. kind: arrive, admit or finish.

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
class _Met:
    """A request that meets its history, of which `stop` tokens are stored.

    head: tokens that the device has, or gets with the next chunk; the last `held` of them are in
    host memory, and `context` before those are on the device. restored: tokens until now, without
    those that came early. began: a chunk of it has run.
    """

    job: Job
    meeting: Meeting
    stop: int
    head: int
    context: int
    held: int
    restored: int = 0
    began: bool = False

    @property
    def early(self) -> int:
        """Tokens behind the head that the device has, because they were restored as they came."""
        return BLOCK_TOKENS * len(self.meeting.load.restored)


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
        self._admission = Admission(self.cache.window.requests)
        self._agenda: list[tuple[float, int, int]] = []
        self._disk = ReadQueue(self.costs)
        self._ticket = 0
        self._queue: list[int] = []
        self._queue_changed = False
        self._running: dict[int, _Running] = {}
        self._ends: list[tuple[float, int]] = []
        self._steps = 0.0
        self._step_seconds = 0.0
        self._context = 0
        self._passed: set[int] = set()
        self._served = 0
        self._numbers = 0

    def run(self) -> Measures:
        """Serve everything. Deterministic: the same workload gives the same events."""
        for talk in self._talks:
            if talk.session.turns:
                self._schedule(talk.session.arrival, talk.index)
        while self._agenda or self._disk or self._running:
            self._advance()
            if self._queue and (len(self._running) < self.max_batch or len(self._queue) < 256):
                self._pass()
        self.measures.simulated_seconds = self.now
        return self.measures

    def _schedule(self, time: float, talk: int) -> None:
        self._ticket += 1
        heappush(self._agenda, (time, self._ticket, talk))

    def _advance(self) -> None:
        """To the next finish, arrival or end of a read, whichever comes first."""
        arrival = self._agenda[0][0] if self._agenda else math.inf
        coming = min(arrival, self._disk.next_end)
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
        self.now = max(self.now, coming)
        if coming < arrival:
            _, transfer = next(self._disk.through(self.now))
            self.cache.fetched(transfer, self.now)
        else:
            time, _, talk = heappop(self._agenda)
            self._arrive(self._talks[talk], time)

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
        self._restore_waiting()
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

    def _restore_waiting(self) -> None:
        """What has come for a request that meets its history before anything of it is computed."""
        name, meeting = self.cache.meetings.current
        if meeting is not None and name in self._queue:
            self._deliver()
            head = meeting.first * BLOCK_TOKENS
            if self._restore_early(self.cache.jobs[name], meeting, head):
                self._deliver()  # what came meanwhile counts when the request is asked for

    def _admissible(self, considered: Sequence[int]) -> Iterator[int]:
        """Waiting requests that may be admitted, in the order in which they are asked."""
        if self.ready_first:
            considered = self._admission.order(considered, self._readiness)
        for number in considered:
            if self._admission.must_admit(number):
                self.cache.prefetcher.give_up(number)
            if self.cache.ready(number, self.now):
                yield number
            else:
                self._passed.add(number)

    def _carry(self) -> None:
        """What the tiers have begun to fetch goes through the disk, one after the other."""
        self._disk.begin(self.cache.take_started(), self.now)

    def _deliver(self) -> None:
        """Reads that are through by now."""
        for time, transfer in self._disk.through(self.now):
            self.cache.fetched(transfer, time)

    def _look_ahead(self) -> None:
        if self._queue_changed:
            self.cache.look_ahead(self._queue)
            self._queue_changed = False
        self.cache.meetings.decoding = len(self._running)
        self.cache.prefetch(self.now)
        self._carry()

    def _readiness(self, number: int) -> float:
        if self.cache.window.requests.is_fetching(number):
            return ON_THE_WAY
        found = self.cache.find(self.cache.jobs[number], self.now)
        host, disk = map(self.costs.token_seconds, (SourceTier.HOST, SourceTier.DISK))
        return host * found.host + disk * found.disk

    def _admit(self, job: Job) -> None:
        """Restore or recompute, whichever is faster, and prefill; the batch waits for it.

        Without prefetch what is on disk is read now. With it, it was not worth waiting for, or is
        met in the middle.
        """
        reusable = self.cache.reusable(job)
        found = self.cache.find(job, self.now)
        meeting = self.cache.meetings.of(job.number)
        plan = self._plan(job, found)
        loaded = plan.tokens > found.host
        self.cache.admit(job, found, self.now, load=loaded)
        self.events.append(Event(self.now, "admit", job.session, loaded or meeting is not None))
        if loaded:
            self._disk.occupy(found.disk, self.now)
        if meeting is not None:
            restored = found.device + self._meet(
                job, found, min(meeting.stop, job.prompt_tokens - 1)
            )
        else:
            restored = found.device + plan.tokens
            self.now += plan.seconds
        self._served += 1
        if self._served > self.workload.warmup_turns:
            seen = found.as_late() if job.number in self._passed else found
            self.measures.admitted(job, seen, reusable, restored, self.now - job.arrived)
        self._passed.discard(job.number)
        if self.on_served is not None:
            self.on_served(self._served)
        context = job.prompt_tokens + job.output_tokens // 2
        self._running[job.number] = _Running(job, context)
        self._context += context
        heappush(self._ends, (self._steps + max(1, job.output_tokens), job.number))

    def _plan(self, job: Job, found: Found) -> RestorePlan:
        """How what was found below the device is restored, before the rest of the prompt."""
        rest = job.prompt_tokens - found.device - found.host
        plan = self.costs.restored(found.host, found.device, rest)
        if not found.disk or self.cache.prefetcher.mode != "off":
            return plan
        tokens, wait = found.host + found.disk, self._disk.backlog(self.now)
        late = self.costs.restored(tokens, found.device, rest - found.disk, wait)
        late = replace(late, seconds=late.seconds + self.costs.read_seconds(found.disk))
        return late if late.tokens and late.seconds <= plan.seconds else plan

    def _meet(self, job: Job, found: Found, stop: int) -> int:
        """Compute the front of a history in chunks while the disk reads its end, up to `stop`
        tokens, then restore the rest (`queue/meeting.py`). Returns the tokens that were restored.
        """
        meeting = self.cache.meetings.of(job.number)
        assert meeting is not None
        met = _Met(job, meeting, stop, found.device + found.host, found.device, found.host)
        self._batch_changed()  # by who was admitted before in the same pass
        while met.head < job.prompt_tokens:
            self._carry()
            self._deliver()
            if met.began and self._restore_early(job, meeting, met.head):
                continue
            step = self.cache.next_step(job.number, met.head, self.now)
            if met.began and step.action is Action.WAIT:
                self._wait_one_pass()
            elif step.action is Action.RESTORE and self._join(met):
                plan = self._rest(met)
                self.now += plan.seconds
                met.restored += met.early + plan.tokens
                break
            else:
                self._compute(met, step.tokens)
        return met.restored

    def _compute(self, met: _Met, wanted: int) -> None:
        """Run the next chunk of the prompt, with what is restored from host memory before it."""
        job, tokens = met.job, met.job.prompt_tokens - met.head
        if self.cache.meetings.of(job.number) is not None:
            # What is here already joins behind the first chunk, which has at least one block.
            end = -(-(met.head + max(wanted, BLOCK_TOKENS)) // BLOCK_TOKENS) * BLOCK_TOKENS
            tokens = min(tokens, end - met.head)
            first = (met.head + tokens) // BLOCK_TOKENS
            for n in met.meeting.load.restored:
                if n < first:
                    met.meeting.load.blocks[n].take_rows()
        plan = self.costs.restored(met.held, met.context, tokens)
        self.now += plan.seconds
        met.restored += plan.tokens
        met.head += tokens
        met.held, met.context, met.began = 0, met.head, True
        self.cache.computed(job, met.head, self.now)
        self.cache.meetings.decoding = len(self._running)

    def _join(self, met: _Met) -> bool:
        return self.cache.join(met.job.number, met.head, self.now)

    def _rest(self, met: _Met) -> RestorePlan:
        """What the last pass does: it restores what the device lacks up to `stop`, and runs the new
        tokens."""
        left = max(0, met.stop - met.context - met.early)
        return self.costs.restored(left, met.context + met.early, met.job.prompt_tokens - met.stop)

    def _restore_early(self, job: Job, meeting: Meeting, head: int) -> bool:
        """Restore what has come behind `head` tokens, where blocks are restored as they come. False
        for nothing."""
        if self.cache.meetings.of(job.number) is not meeting or not meeting.as_they_come:
            return False
        if meeting.is_here(head):
            return False
        stop = min(meeting.stop, job.prompt_tokens - 1)
        blocks = range(head // BLOCK_TOKENS, stop // BLOCK_TOKENS)
        there = set(meeting.load.restored)
        came = [n for n in blocks if n not in there and meeting.has(n)]
        if not came or meeting.path_to(head) is None:
            return False
        self.now += self.costs.restored_early(len(came))
        for n in came:
            meeting.load.blocks[n].write_to(n, meeting.detached_node(n), proven=False)
        return True

    def _wait_one_pass(self) -> None:
        """The device is left to those who decode; who ends with it leaves at the next event. Where
        nobody decodes the next pass finds what the disk has read by then."""
        self._carry()
        if self._running:
            self._steps += 1
            self.now += self._step_seconds
        else:
            self.now = self._disk.next_end

    def _batch_changed(self) -> None:
        batch = len(self._running)
        self._step_seconds = self.costs.step_seconds(batch, self._context) if batch else 0.0
