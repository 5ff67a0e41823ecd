"""What the GPUs of a simulated server do with their time, and the requests that decode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush

from sglang_hc.tools.simulator.costs import GpuCosts
from sglang_hc.tools.simulator.jobs import Job


@dataclass
class GpuTime:
    """The clock of a simulation. All of it is spent on one of three things, in seconds.

    prefill: passes with a prompt in them, what they wait for copies included. idle: nothing runs.
    """

    now: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    idle: float = 0.0

    @property
    def prefill_share(self) -> float:
        """Of what the GPUs worked."""
        return self.prefill / (self.prefill + self.decode) if self.prefill else 0.0

    def prefilled(self, seconds: float) -> None:
        self.now += seconds
        self.prefill += seconds

    def decoded(self, seconds: float) -> None:
        self.now += seconds
        self.decode += seconds

    def idle_until(self, time: float) -> None:
        """Wait. A time that has passed changes nothing."""
        if time > self.now:
            self.idle += time - self.now
            self.now = time


class Decoding:
    """The requests that decode. While they stay the same all steps take the same time: each counts
    with its context in the middle of its answer."""

    def __init__(self, costs: GpuCosts, captures: bool) -> None:
        """captures: whether what is decoded goes below the device."""
        self._costs = costs
        self._captures = captures
        self._jobs: dict[int, tuple[Job, float]] = {}
        self._ends: list[tuple[int, int]] = []
        self._steps = 0
        self._seconds = math.nan
        self.context = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job, tokens: int) -> None:
        """A request with so many tokens to decode, at least one."""
        context = self._costs.attended(job.prompt_tokens + tokens // 2)
        self._jobs[job.number] = job, context
        self.context += context
        self._seconds = math.nan
        heappush(self._ends, (self._steps + tokens, job.number))

    @property
    def step_seconds(self) -> float:
        """Seconds of the next step; there must be a request."""
        if math.isnan(self._seconds):
            self._seconds = self._costs.step_seconds(len(self), self.context, self._captures)
        return self._seconds

    @property
    def steps_to_end(self) -> int:
        """Steps until the first request is through."""
        return self._ends[0][0] - self._steps

    def pass_by(self) -> None:
        """One step was made, in which nobody leaves."""
        if self.steps_to_end > 1:
            self._steps += 1

    def advance(self, steps: int) -> list[Job]:
        """So many steps were made, at most `steps_to_end`. Returns who is through."""
        self._steps += steps
        through = []
        while self._ends and self._ends[0][0] <= self._steps:
            job, context = self._jobs.pop(heappop(self._ends)[1])
            self.context -= context
            self._seconds = math.nan
            through.append(job)
        return through
