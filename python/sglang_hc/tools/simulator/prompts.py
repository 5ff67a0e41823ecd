"""A request of a simulation from its admission to its first token."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hc.policy.restore_plan import RestorePlan
from sglang_hc.queue.meeting import Meeting
from sglang_hc.tools.simulator.costs import Part
from sglang_hc.tools.simulator.jobs import Job
from sglang_hc.tools.simulator.tiers import Found


@dataclass
class Prompt:
    """One prompt that is being computed.

    found: where its state was at the turn. meeting: with its history, if it meets one. ahead: found
    tokens that were restored before. context: tokens on the device. plan: what its first pass
    restores behind them. read: seconds that the GPUs wait for the disk before. left: tokens to
    compute. restored: tokens that were not computed. reusable: (full blocks, tokens) that an
    endless cache would find. admitted: when. counts: whether it is measured.
    """

    job: Job
    found: Found
    meeting: Meeting | None
    ahead: int = 0
    context: int = 0
    plan: RestorePlan | None = None
    read: float = 0.0
    left: int = 0
    restored: int = 0
    reusable: tuple[int, int] = (0, 0)
    admitted: float = 0.0
    counts: bool = True

    def __post_init__(self) -> None:
        self.context = self.restored = self.found.device + self.ahead
        self.left = self.job.prompt_tokens - self.context

    def planned(self, plan: RestorePlan, read: float = 0.0) -> None:
        """So it is restored, when the disk has been read for `read` seconds."""
        self.plan = plan if plan.tokens else None
        self.read = read
        self.left = self.job.prompt_tokens - self.context - plan.tokens
        self.restored = self.context + plan.tokens

    @property
    def is_alone(self) -> bool:
        """Whether no other prompt can be in its passes."""
        return self.meeting is not None or self.read > 0

    def ran(self, part: Part) -> None:
        """A pass is over."""
        self.context += part.restored + part.new
        self.left -= part.new
        self.plan, self.read = None, 0.0
