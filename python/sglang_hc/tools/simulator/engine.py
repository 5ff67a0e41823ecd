"""Discrete events: arrivals, continuous batching on one server's GPUs, transfers from the disks.

    arrive -> waiting -> admitted -> prompt computed (first token) -> decoding -> finished
                 |  prefetch: disk -> host                                     |-> next turn arrives
                 |  restored ahead: host -> device

As in SGLang a pass over prompts comes before a decode step. Decode steps are not simulated one by
one: while the batch stays the same they take the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.queue.admission import ON_THE_WAY, Admission
from sglang_hc.tools.simulator.ahead import RestoredAhead
from sglang_hc.tools.simulator.costs import GpuCosts, Part
from sglang_hc.tools.simulator.disk import ReadQueue
from sglang_hc.tools.simulator.gpu import Decoding, GpuTime
from sglang_hc.tools.simulator.jobs import Conversation, Job, Overflow
from sglang_hc.tools.simulator.measures import Measures
from sglang_hc.tools.simulator.met import MetHistories
from sglang_hc.tools.simulator.prompts import Prompt
from sglang_hc.tools.simulator.tiers import Found, TieredCache
from sglang_hc.tools.workloads.sessions import Workload

CONSIDERED = 64
"""Waiting requests that one pass looks at for admission."""

LONG_QUEUE = 256
"""With so many waiting requests nothing is looked for while the batch is full."""

WHOLE_PROMPTS = 16384
"""Tokens of prompts in a pass where they are not cut into chunks: SGLang's --max-prefill-tokens."""

PAUSE = 0.01
"""Seconds until an idle server looks again at a request that waits for nothing that will come."""


@dataclass(frozen=True)
class Event:
    """What happened to a request, for `clairvoyant.replay`. kind: arrive, admit, first or finish.

    loaded: at an admission, whether blocks were read from disk for it.
    """

    time: float
    kind: str
    session: int
    loaded: bool = False


@dataclass(frozen=True)
class Serving:
    """How a server is run.

    chunk: tokens of prompts in one pass, 0 for whole prompts; with chunks the last one is cut.
    mixed: running requests decode in such a pass too. overflow: one of `jobs.OVERFLOW_MODES`.
    output_cap: tokens that are decoded of an answer at most; the conversation goes on with all.
    read_buffer: see `RestoredAhead`. late: a first token is told behind the pass after its own, as
    by SGLang's overlap scheduling where one thread runs the model too.
    """

    max_batch: int = 24
    chunk: int = 8192
    mixed: bool = False
    ready_first: bool = False
    overflow: str = "off"
    output_cap: int | None = None
    read_buffer: bool = False
    late: bool = False


@dataclass
class Engine:
    """One server working through a workload.

    `on_served` is called with the number of turns admitted so far, `on_first` with the TTFT of each
    turn that is counted.
    """

    workload: Workload
    cache: TieredCache
    costs: GpuCosts
    serving: Serving = field(default_factory=Serving)
    on_served: Callable[[int], None] | None = None
    on_first: Callable[[float], None] | None = None
    events: list[Event] = field(default_factory=list)
    measures: Measures = field(default_factory=Measures)

    def __post_init__(self) -> None:
        overflow = Overflow(self.serving.overflow, self.costs.model.context)
        self._talks = [Conversation(i, s, overflow) for i, s in enumerate(self.workload.sessions)]
        self._admission = Admission(self.cache.window.requests)
        self._agenda: list[tuple[float, int, int]] = []
        self._gpu = GpuTime()
        self._captures = self.cache.host is not None
        self._decoding = Decoding(self.costs, self._captures)
        self._disk = ReadQueue(self.costs)
        self._ahead = RestoredAhead(self.cache, self.costs, self.serving.read_buffer)
        self._met = MetHistories(self.cache, self.costs, self._gpu, self._decoding, self._disk)
        self._ticket = 0
        self._queue: list[int] = []
        self._queue_changed = False
        self._unfinished: Prompt | None = None
        self._untold: list[Prompt] = []
        self._passed: set[int] = set()
        self._left = sum(bool(talk.session.turns) for talk in self._talks)
        self._filling = min(self.serving.max_batch, self._left)
        self._served = 0
        self._numbers = 0

    @property
    def now(self) -> float:
        return self._gpu.now

    def run(self) -> Measures:
        """Serve everything. Deterministic: the same workload gives the same events."""
        for talk in self._talks:
            if talk.session.turns:
                self._schedule(talk.session.arrival, talk.index)
        self._serve()
        return self.measures

    def _serve(self) -> None:
        """Until nothing is left to do."""
        while self._agenda or self._disk or self._decoding or self._queue or self._unfinished:
            self._receive()
            if self._prefill():
                continue
            if self._decoding:
                self._decode()
            else:
                self._idle()
        self._tell(self.now)
        self.measures.gpu = self._gpu

    # -- events ------------------------------------------------------------------------------------

    def _schedule(self, time: float, talk: int) -> None:
        self._ticket += 1
        heappush(self._agenda, (time, self._ticket, talk))

    @property
    def _coming(self) -> float:
        """When the next request arrives or the next read is through."""
        return min(self._agenda[0][0] if self._agenda else math.inf, self._disk.next_end)

    def _receive(self) -> None:
        """What has arrived or come by now, in its order."""
        while self._coming <= self.now:
            if self._agenda and self._agenda[0][0] <= self._disk.next_end:
                time, _, talk = heappop(self._agenda)
                self._arrive(self._talks[talk], time)
            else:
                time, transfer = next(self._disk.through(self.now))
                self.cache.fetched(transfer, time)

    def _arrive(self, talk: Conversation, time: float) -> None:
        job = talk.next_job(self._numbers)
        self._numbers += 1
        job.arrived = time
        self.cache.arrive(job)
        self._queue.append(job.number)
        self._queue_changed = True
        self.events.append(Event(time, "arrive", talk.index))

    def _decode(self) -> None:
        """Steps until the first request is through, or until something happens meanwhile."""
        step, steps = self._decoding.step_seconds, self._decoding.steps_to_end
        if self._coming < self.now + steps * step:
            steps = max(1, math.ceil((self._coming - self.now) / step))
        seconds = steps * step
        seconds += self._ahead.restore(self._queue, steps, seconds, self.now)
        self._tell(self.now + step)
        self._gpu.decoded(seconds)
        for job in self._decoding.advance(steps):
            self._finish(job)

    def _idle(self) -> None:
        self._tell(self.now)
        waits = bool(self._queue) and not self._disk
        self._gpu.idle_until(min(self._coming, self.now + PAUSE) if waits else self._coming)

    def _finish(self, job: Job) -> None:
        talk = self._talks[job.session]
        talk.answered(job)
        self._look_ahead()
        self.cache.finish(job, talk.known, talk.chain, self.now)
        self.events.append(Event(self.now, "finish", talk.index))
        if talk.done:
            if self._left >= self._filling:
                self.measures.prefill_share = self._gpu.prefill_share
            self._left -= 1
        else:
            turn = talk.session.turns[talk.turn]
            self._schedule(max(self.now + turn.think, turn.at or 0.0), talk.index)

    # -- a pass over prompts -----------------------------------------------------------------------

    def _prefill(self) -> bool:
        """Look ahead, admit what fits, and run the pass; at its end a server looks again. False for
        no prompt to run."""
        full = len(self._decoding) + (self._unfinished is not None) >= self.serving.max_batch
        if self._queue and not (full and len(self._queue) >= LONG_QUEUE):
            self._look_ahead()
            if self._met.restore_waiting(self._queue):
                self._met.carry()
        batch = [] if self._unfinished is None else [self._unfinished]
        self._unfinished = None
        if not full:
            batch += self._admit(batch)
        if not batch:
            return False
        if batch[0].meeting is not None:
            self._met.meet(batch[0], self._room)
            self._tell(self.now)
            self._first_token(batch[0])
        else:
            self._run(batch)
        if self._queue:
            self._look_ahead()
        return True

    @property
    def _room(self) -> int:
        """Tokens of prompts in one pass."""
        return self.serving.chunk or WHOLE_PROMPTS

    def _run(self, batch: list[Prompt]) -> None:
        """One pass. Who does not get all of its prompt into it goes on in the next one."""
        left, parts = self._room, []
        for prompt in batch:
            tokens = min(prompt.left, left) if self.serving.chunk else prompt.left
            left -= tokens
            self._gpu.prefilled(prompt.read)  # the batch waits for the disk
            parts.append(Part(tokens, prompt.context, prompt.plan))
        parts = self.costs.together(parts)
        rows = len(self._decoding) if self.serving.mixed else 0
        seconds = self.costs.pass_seconds(parts, rows, self._decoding.context, self._captures)
        copies = sum(part.plan.copy_seconds for part in parts if part.plan is not None)
        seconds += self._ahead.restore(self._queue, 1, seconds - copies, self.now)
        self._gpu.prefilled(seconds)
        self._tell(self.now)
        through = self._decoding.advance(1) if rows else []
        for prompt, part in zip(batch, parts, strict=True):
            prompt.ran(part)
            if prompt.left:
                self._unfinished = prompt
            else:
                self._first_token(prompt)
        for job in through:
            self._finish(job)

    def _admit(self, batch: Sequence[Prompt]) -> list[Prompt]:
        """Waiting requests that join the pass, in the order in which they are asked."""
        room = self._room - sum(prompt.left for prompt in batch)
        free = self.serving.max_batch - len(self._decoding) - len(batch)
        if not self._queue or room <= 0:
            return []
        considered = self._queue[:CONSIDERED]
        chosen: list[Prompt] = []
        for number in self._admissible(considered):
            prompt = self._prompt(number)
            if (batch or chosen) and not self._joins(prompt, room):
                break
            pool, job = self.cache.pool, prompt.job
            if pool is not None and not pool.admit(job, prompt.found.device_nodes, self.now):
                break
            chosen.append(prompt)
            room -= prompt.left
            if prompt.is_alone or len(chosen) == free or room <= 0:
                break
        self._met.carry()
        numbers = [prompt.job.number for prompt in chosen]
        self._admission.count(considered, numbers)
        self.cache.prefetcher.admitted(numbers, self.now)
        for prompt in chosen:
            self._queue.remove(prompt.job.number)
            self._queue_changed = True
            self._begin(prompt)
        return chosen

    def _joins(self, prompt: Prompt, room: int) -> bool:
        """Whether a request fits behind others of the same pass."""
        return not prompt.is_alone and (self.serving.chunk > 0 or prompt.left <= room)

    def _admissible(self, considered: Sequence[int]) -> Iterator[int]:
        """Waiting requests that may be admitted, in the order in which they are asked."""
        if self.serving.ready_first:
            considered = self._admission.order(considered, self._readiness)
        for number in considered:
            if self._admission.must_admit(number):
                self.cache.prefetcher.give_up(number)
            if self.cache.ready(number, self.now):
                yield number
            else:
                self._passed.add(number)

    def _prompt(self, number: int) -> Prompt:
        """What is restored of a request at its turn, and what is computed."""
        job, costs = self.cache.jobs[number], self.costs
        found = self.cache.find(job, self.now)
        ahead = min(self._ahead.tokens(number), found.host)
        prompt = Prompt(job, found, self.cache.meetings.of(number), ahead)
        rest = job.prompt_tokens - found.device - found.host
        host, context = found.host - ahead, found.device + ahead
        if prompt.meeting is not None:
            return prompt
        plan = costs.restored(host, context, rest)
        prompt.planned(plan)
        if found.disk and self.cache.at_turn:
            # Read now: what a server does whose look-ahead is off, in AttentionStore.
            read = self._disk.backlog(self.now) + costs.read_seconds(found.disk)
            late = costs.restored(host + found.disk, context, rest - found.disk)
            if late.tokens and read + late.seconds <= plan.seconds:
                prompt.planned(late, read)
        return prompt

    def _begin(self, prompt: Prompt) -> None:
        """The request leaves the queue."""
        job, cache = prompt.job, self.cache
        prompt.reusable = cache.reusable(job)
        prompt.admitted = self.now
        self._ahead.admitted(job.number)
        loaded = prompt.read > 0
        cache.admit(job, prompt.found, self.now, load=loaded)
        if loaded:
            self._disk.occupy(prompt.found.disk, self.now)
        loaded = loaded or prompt.meeting is not None
        self.events.append(Event(self.now, "admit", job.session, loaded))
        if job.number in self._passed:
            prompt.found = prompt.found.as_late()
        self._passed.discard(job.number)
        self._served += 1
        prompt.counts = self._served > self.workload.warmup_turns
        if self.on_served is not None:
            self.on_served(self._served)

    def _first_token(self, prompt: Prompt) -> None:
        """The prompt is computed: its request decodes from now on."""
        job, cap = prompt.job, self.serving.output_cap
        self._untold.append(prompt)
        if not self.serving.late:
            self._tell(self.now)
        tokens = job.output_tokens if cap is None else min(job.output_tokens, cap)
        self.measures.output_tokens += tokens
        self.measures.served_tokens += job.prompt_tokens + tokens
        if tokens > 1:
            self._decoding.add(job, tokens - 1)
        else:
            self._finish(job)

    def _tell(self, time: float) -> None:
        """First tokens leave the server."""
        for prompt in self._untold:
            self.events.append(Event(time, "first", prompt.job.session))
            if prompt.counts:
                self.measures.answered(prompt, time)
                if self.on_first is not None:
                    self.on_first(time - prompt.job.arrived)
        self._untold.clear()

    def _look_ahead(self) -> None:
        if self._queue_changed:
            self.cache.look_ahead(self._queue)
            self._queue_changed = False
        self.cache.meetings.decoding = len(self._decoding)
        self.cache.prefetch(self.now)
        self._met.carry()

    def _readiness(self, number: int) -> float:
        if self.cache.window.requests.is_fetching(number):
            return ON_THE_WAY
        found: Found = self.cache.find(self.cache.jobs[number], self.now)
        host, disk = map(self.costs.token_seconds, (SourceTier.HOST, SourceTier.DISK))
        return host * found.host + disk * found.disk
