"""The meetings of one waiting queue (`queue/meeting.py`): there is one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.restore_plan import Reason
from sglang_hc.queue.fetches import Missing, SplitCosts
from sglang_hc.queue.meeting import Action, Meeting, Step, TailReads
from sglang_hc.tree.block_tree import BlockNode, BlockTree
from sglang_hc.tree.promotions import Promotions

K = TypeVar("K", bound=Hashable)
"""Name of a request."""


class Meetings(Generic[K]):
    """See the module. decoding: requests that decode now; whoever makes the passes says so."""

    def __init__(
        self,
        tree: BlockTree,
        costs: SplitCosts,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        """counters: gets the meetings, and what became of them."""
        self.decoding = 0
        self._tree = tree
        self._costs = costs
        self._counters = counters
        self._clock = clock
        self._met: tuple[K, Meeting] | None = None
        self._on_end: list[Callable[[], object]] = []

    def subscribe(self, on_end: Callable[[], object]) -> None:
        """Call this at the end of every meeting, before its blocks are given up."""
        self._on_end.append(on_end)

    @property
    def current(self) -> tuple[K | None, Meeting | None]:
        """The request that meets its history now, and its meeting."""
        return self._met or (None, None)

    @property
    def under_way(self) -> bool:
        """Whether a request meets its history now."""
        return self._met is not None

    def of(self, name: K) -> Meeting | None:
        """The meeting of this request, waiting or admitted; None when it has none."""
        return self._met[1] if self._met is not None and self._met[0] == name else None

    def begin(
        self,
        name: K,
        missing: Missing,
        end: int,
        coming: Promotions,
        reads: TailReads,
    ) -> bool:
        """Let a request meet its blocks before `end`, if that is faster than reading or computing
        them all. coming: see `Meeting`."""
        known = max(missing.first * BLOCK_TOKENS, missing.on_device)
        first = known // BLOCK_TOKENS
        if self._met is not None or end <= first:
            return False

        sources = missing.sources[first - missing.first : end - missing.first]
        prompt, tree = missing.path.prefix, self._tree
        meeting = Meeting(prompt, first, sources, tree, coming, reads, self._costs)
        split = self._costs.split(meeting.history(known, end, self._clock()), self.decoding, True)
        if split is None or split.head >= meeting.stop - known:
            return False
        if not split.head and not (split.as_they_come and meeting.path_to(known) is not None):
            return False  # a plain read
        meeting.as_they_come = split.as_they_come
        if not meeting.read_down_to((known + split.head) // BLOCK_TOKENS):
            return False
        self._met = name, meeting
        self._counters["meetings"] += 1
        # Were it in host memory, all of it would be loaded.
        self._counters[f"restore_reason_{Reason.SLOW_TIER.value}"] += 1
        return True

    def may_begin(self, name: K, head: int) -> bool:
        """Whether a request that could be admitted now is, when `head` of its tokens are there. It
        is not while it waits for what comes. Otherwise its source goes on, see `Meeting.wait`."""
        step, meeting = self.next(name, head), self.of(name)
        if meeting is not None and step.action is not Action.WAIT:
            meeting.wait(head)
        return step.action is not Action.WAIT

    def next(self, name: K, head: int) -> Step:
        """See `Meeting.next`; OVER for a request without one. A meeting that is over is closed."""
        meeting = self.of(name)
        if meeting is None:
            return Step(Action.OVER)
        step = meeting.next(head, self.decoding, self._clock())
        if step.action is Action.OVER:
            self.end(name)
        return step

    def join(self, name: K, head: int) -> Sequence[BlockNode] | None:
        """See `Meeting.join`. The meeting of the request, which has one, is over."""
        meeting = self.of(name)
        assert meeting is not None
        nodes = meeting.join(head, self._clock())
        self._counters["meetings_restored" if nodes is not None else "meetings_cut_off"] += 1
        self.end(name)
        return nodes

    def end(self, name: K) -> None:
        """The request needs no more of its stored history. Nothing happens if it has no meeting."""
        meeting = self.of(name)
        if meeting is not None:
            for listener in self._on_end:
                listener()
            self._met = None
            meeting.close()
