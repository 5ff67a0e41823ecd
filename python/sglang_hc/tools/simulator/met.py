"""Requests that meet their history: the front is computed in chunks while the disk reads the end
(`queue/meeting.py`)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.meeting import Action, Meeting
from sglang_hc.tools.simulator.costs import GpuCosts, Part
from sglang_hc.tools.simulator.disk import ReadQueue
from sglang_hc.tools.simulator.gpu import Decoding, GpuTime
from sglang_hc.tools.simulator.jobs import Job
from sglang_hc.tools.simulator.prompts import Prompt
from sglang_hc.tools.simulator.tiers import TieredCache


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


class MetHistories:
    """What the GPUs of a server do for the one request that meets its history; and the reads of
    all."""

    def __init__(
        self,
        cache: TieredCache,
        costs: GpuCosts,
        gpu: GpuTime,
        decoding: Decoding,
        disk: ReadQueue,
    ) -> None:
        self._cache, self._costs = cache, costs
        self._gpu, self._decoding, self._disk = gpu, decoding, disk
        self._captures = cache.host is not None

    def carry(self) -> None:
        """What the tiers have begun to fetch goes through the disk, one after the other."""
        self._disk.begin(self._cache.take_started(), self._gpu.now)

    def deliver(self) -> None:
        """Reads that are through by now."""
        for time, transfer in self._disk.through(self._gpu.now):
            self._cache.fetched(transfer, time)

    def restore_waiting(self, queue: Collection[int]) -> bool:
        """What has come for a waiting request before anything of it is computed. Whether anything
        has."""
        name, meeting = self._cache.meetings.current
        if name is None or meeting is None or name not in queue:
            return False
        self.deliver()
        head = meeting.first * BLOCK_TOKENS
        if not self._restore_early(self._cache.jobs[name], meeting, head):
            return False
        self.deliver()  # what came meanwhile counts when the request is asked for
        return True

    def meet(self, prompt: Prompt, room: int) -> None:
        """Compute the front in chunks of at most `room` tokens while the disk reads the end, then
        restore the rest. The prompt is through then."""
        job, found, meeting = prompt.job, prompt.found, prompt.meeting
        assert meeting is not None
        stop = min(meeting.stop, job.prompt_tokens - 1)
        known, held = found.device + found.host, found.host - prompt.ahead
        met = _Met(job, meeting, stop, known, prompt.context, held)
        while met.head < job.prompt_tokens:
            self.carry()
            self.deliver()
            if met.began and self._restore_early(job, meeting, met.head):
                continue
            step = self._cache.next_step(job.number, met.head, self._gpu.now)
            if met.began and step.action is Action.WAIT:
                self._wait_one_pass()
            elif step.action is Action.RESTORE and self._join(met):
                met.restored += met.early + self._rest(met)
                break
            else:
                self._compute(met, step.tokens, room)
        prompt.restored += met.restored
        prompt.left = 0

    def _compute(self, met: _Met, wanted: int, room: int) -> None:
        """Run the next chunk of the prompt, with what is restored from host memory before it."""
        job, tokens = met.job, min(room, met.job.prompt_tokens - met.head)
        if self._cache.meetings.of(job.number) is not None:
            # What is here already joins behind the first chunk, which has at least one block.
            end = -(-(met.head + max(wanted, BLOCK_TOKENS)) // BLOCK_TOKENS) * BLOCK_TOKENS
            tokens = min(tokens, end - met.head)
            first = (met.head + tokens) // BLOCK_TOKENS
            for n in met.meeting.load.restored:
                if n < first:
                    met.meeting.load.blocks[n].take_rows()
        met.restored += self._pass(met.held, met.context, tokens)
        met.head += tokens
        met.held, met.context, met.began = 0, met.head, True
        self._cache.computed(job, met.head, self._gpu.now)
        self._cache.meetings.decoding = len(self._decoding)

    def _pass(self, tokens: int, context: int, new: int) -> int:
        """A pass that restores `tokens` as the planner wants it. Returns how many."""
        plan = self._costs.restored(tokens, context, new)
        computed = new if plan.tokens else new + tokens
        part = Part(computed, context, plan)
        self._gpu.prefilled(self._costs.pass_seconds([part], captures=self._captures))
        return plan.tokens

    def _join(self, met: _Met) -> bool:
        return self._cache.join(met.job.number, met.head, self._gpu.now)

    def _rest(self, met: _Met) -> int:
        """The last pass restores what the device lacks up to `stop`, and runs the new tokens.
        Returns how many tokens it restores."""
        left = max(0, met.stop - met.context - met.early)
        return self._pass(left, met.context + met.early, met.job.prompt_tokens - met.stop)

    def _restore_early(self, job: Job, meeting: Meeting, head: int) -> bool:
        """Restore what has come behind `head` tokens, where blocks are restored as they come. False
        for nothing."""
        if self._cache.meetings.of(job.number) is not meeting or not meeting.as_they_come:
            return False
        if meeting.is_here(head):
            return False
        stop = min(meeting.stop, job.prompt_tokens - 1)
        blocks = range(head // BLOCK_TOKENS, stop // BLOCK_TOKENS)
        there = set(meeting.load.restored)
        came = [n for n in blocks if n not in there and meeting.has(n)]
        if not came or meeting.path_to(head) is None:
            return False
        self._gpu.prefilled(self._costs.restored_early(len(came)))
        for n in came:
            meeting.load.blocks[n].write_to(n, meeting.detached_node(n), proven=False)
        return True

    def _wait_one_pass(self) -> None:
        """The device is left to those who decode; who ends with it leaves at the next event. Where
        nobody decodes the next pass finds what the disk has read by then."""
        self.carry()
        if self._decoding:
            self._gpu.decoded(self._decoding.step_seconds)
            self._decoding.pass_by()
        else:
            self._gpu.idle_until(self._disk.next_end)
