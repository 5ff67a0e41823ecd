"""One history that is computed from its front while its end is read backwards, until both meet.

    read_down_to  blocks from the meeting point on are asked for, the last one first
    has           blocks that came may be restored already, where the costs say that this is faster
    next          before each chunk of the prompt: compute so much more, wait, or restore the rest
    join          the blocks behind the head continue the path that the head's own commit has made
    close         what is not needed any more gives its slots back

Where nothing needs to be computed first the request waits in the queue, and what comes is restored
meanwhile. Nothing is promised to the scheduler before it is here. A block that is late or lost only
moves the meeting point towards the end, at worst to the end itself, which is a plain recomputation.
Belongs to the scheduler thread and never waits.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.meeting import History, Span
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.policy.restore_plan import Reason
from sglang_hc.queue.fetch_costs import Missing
from sglang_hc.queue.loads import BlockLoad, Load
from sglang_hc.queue.prefetch import PATIENCE
from sglang_hc.queue.requests import Serial
from sglang_hc.tree.block_tree import BlockNode, BlockTree
from sglang_hc.tree.identity import Prefix
from sglang_hc.tree.promotions import Promotion, Promotions

LEAST_TOKENS = BLOCK_TOKENS
"""Computed at least when the rest is not here yet, and twice as many each time that nothing came
meanwhile, so that a source that stands still costs few passes."""


class Action(enum.Enum):
    """What happens before the next chunk of the prompt."""

    COMPUTE = enum.auto()
    """Compute the given tokens more."""
    WAIT = enum.auto()
    """Compute nothing of this prompt in this pass: the rest is nearly here, or others who decode
    waited for a chunk of it just now."""
    RESTORE = enum.auto()
    """Everything behind the head is here."""
    OVER = enum.auto()
    """Nothing is left to meet: compute the rest of the prompt as usual."""


class Step(NamedTuple):
    """tokens: for COMPUTE, 0 else."""

    action: Action
    tokens: int = 0


class _Given(NamedTuple):
    """Tokens [head, end) were to be computed while `missing` blocks were not here yet."""

    head: int
    end: int
    missing: int


class TailReads(NamedTuple):
    """How blocks [low, high) of one prompt are read, the last one first. `read` begins to, and
    returns those that found a slot. came_last: when a tier last brought a block, whoever asked for
    it."""

    read: Callable[[int, int], list[Promotion]]
    came_last: Callable[[SourceTier], float]


class Meeting:
    """Blocks of a prompt that are below host memory when this begins. What comes before them is on
    the device or in host memory."""

    def __init__(
        self,
        prompt: Prefix,
        first: int,
        sources: Sequence[SourceTier],
        tree: BlockTree,
        coming: Promotions,
        reads: TailReads,
        costs: RestorePlanner,
    ) -> None:
        """sources: where each block from `first` on lies. coming: where what `reads` begin waits
        for its parent."""
        self._prompt = prompt
        self.first, self.end = first, first + len(sources)
        self._sources = sources
        self._tree = tree
        self._coming = coming
        self._reads = reads
        self._costs = costs
        self._low = self.end
        self.load = Load()
        self._blocks = self.load.blocks
        self._least = LEAST_TOKENS
        self._given: _Given | None = None
        self._wait_until: float | None = None
        self.as_they_come = True
        """Whether blocks are best restored when they come, by the last look at the costs."""
        self.has_room = True
        """Whether the device has room for blocks before the last one is here."""

    @property
    def stop(self) -> int:
        """Tokens up to the end of what was stored."""
        return self.end * BLOCK_TOKENS

    @property
    def new(self) -> int:
        """Tokens of the prompt behind that, at least the one whose logits are wanted."""
        return max(1, self._prompt.num_tokens - self.stop)

    def read_down_to(self, low: int) -> int:
        """Ask for the blocks from `low` on that were not asked for yet. Returns how many found a
        slot, from the last one down."""
        low = max(low, self.first)
        if low >= self._low:
            return 0
        begun = self._reads.read(low, self._low)
        for promotion in begun:
            self._low -= 1
            self._blocks[self._low] = BlockLoad(promotion)
        return len(begun)

    def history(self, head: int, end: int, now: float) -> History:
        """What is to come: the blocks between `head` tokens and block `end`."""
        places = [(self._tier(n), n >= self._low) for n in range(head // BLOCK_TOKENS, end)]
        taken = self._taken(now)
        coming: list[Span] = []
        for (tier, is_asked), run in groupby(reversed(places)):
            seconds = taken.pop(tier, 0.0) if is_asked else 0.0
            coming.insert(0, Span(tier, BLOCK_TOKENS * len(list(run)), seconds))
        begun = head % BLOCK_TOKENS  # tokens of the first block that are computed already
        coming[0] = coming[0]._replace(tokens=coming[0].tokens - begun)
        restored = BLOCK_TOKENS * sum(1 for block in self.load.restored if block >= end)
        held = self.stop - end * BLOCK_TOKENS - restored
        return History(head, coming, held, self.new, restored)

    def has(self, block: int) -> bool:
        """Whether this block came and is where it was written to: it has not joined the tree, and
        is not lost."""
        promotion = self._promotion(block)
        return promotion is not None and self._coming.holds(promotion)

    def detached_node(self, block: int) -> BlockNode:
        """A node in no tree, for a block that came."""
        promotion = self._promotion(block)
        assert promotion is not None
        node = BlockNode(None, promotion.tokens, promotion.block_id, promotion.namespace)
        node.slot = promotion.slot
        return node

    def path_to(self, head: int) -> Sequence[BlockNode] | None:
        """The blocks of the first `head` tokens, which those behind them continue; None when they
        are not in host memory."""
        block = head // BLOCK_TOKENS
        above = self._tree.match(self._prompt.up_to(block)).nodes
        return above if len(above) == block else None

    def is_here(self, head: int) -> bool:
        """Whether nothing behind `head` tokens is still to come."""
        return head >= self.stop or self._missing(head // BLOCK_TOKENS) == head // BLOCK_TOKENS

    def next(self, head: int, decoding: int, now: float) -> Step:
        """What comes next when `head` tokens are computed, and others decode so many requests."""
        if head >= self.stop:
            return Step(Action.OVER)
        block = head // BLOCK_TOKENS
        missing = self._missing(block)
        if missing == block:
            return Step(Action.RESTORE)
        given = self._given
        if given is not None and head > given.head:
            if head >= given.end:  # else the scheduler's own chunks are shorter
                stands_still = self._not_here(given.end // BLOCK_TOKENS) >= given.missing
                self._least = 2 * self._least if stands_still else LEAST_TOKENS
            self._given = None
            if decoding:  # those have a step between two chunks
                return Step(Action.WAIT)
        split = self._costs.split(self.history(head, missing, now), decoding, self.has_room)
        if split is None:
            return Step(Action.OVER)
        self.as_they_come = split.as_they_come
        lost = self._lost_up_to(block)
        if split.head == 0 and not lost:
            self.read_down_to(block)
            # Twice as long where others decode: the device has work meanwhile.
            seconds = 2 * split.seconds if decoding else split.seconds
            if self._low <= block and self._may_wait(seconds, now):
                return Step(Action.WAIT)
        wanted = max(head + split.head, head + self._least)
        wanted = max(min(wanted, missing * BLOCK_TOKENS), lost)
        target = -(-wanted // BLOCK_TOKENS) * BLOCK_TOKENS
        if target >= self.stop:
            return Step(Action.OVER)
        end = target // BLOCK_TOKENS
        self._given = _Given(head, target, self._not_here(end))
        self.read_down_to(end)
        return Step(Action.COMPUTE, target - head)

    def wait(self, head: int) -> None:
        """The request may not be admitted in this pass although it could be: the source goes on."""
        if self._missing(self._low) == self._low and self._low > head // BLOCK_TOKENS:
            self.read_down_to((self._low + head // BLOCK_TOKENS) // 2)

    def join(self, head: int, now: float) -> Sequence[BlockNode] | None:
        """The blocks of the path, those behind `head` tokens ready to be restored. None when they
        are not, because the blocks before them did not get into host memory."""
        prompt, root = self._prompt.up_to(self.end), self._tree.root(self._prompt.namespace)
        self._coming.join((root, *self._tree.match(prompt).nodes)[-1], now)
        nodes = self._tree.match(prompt).nodes
        whole = len(nodes) == self.end
        return nodes if whole and all(n.ready for n in nodes[head // BLOCK_TOKENS :]) else None

    def close(self) -> None:
        """Give up what has not joined the tree."""
        self._coming.give_up(filter(None, map(self._promotion, self._blocks)))

    def _tier(self, block: int) -> SourceTier:
        """Where a block lies. Host memory has those before the first one; they were not worth
        restoring, and count as the first one does."""
        return self._sources[max(0, block - self.first)]

    def _taken(self, now: float) -> dict[SourceTier, float]:
        """By tier, for how long it has read blocks of this meeting that have not come: since these
        were asked for, or since it last brought any block."""
        asked: dict[SourceTier, float] = {}
        for block in self._blocks:
            promotion = self._promotion(block)
            if promotion is not None and not promotion.done:
                tier = self._tier(block)
                asked[tier] = min(promotion.asked, asked.get(tier, promotion.asked))
        return {t: max(0.0, now - max(at, self._reads.came_last(t))) for t, at in asked.items()}

    def _promotion(self, block: int) -> Promotion | None:
        found = self._blocks.get(block)
        return None if found is None else found.promotion

    def _missing(self, block: int) -> int:
        """One behind the last block, from `block` on, that is not in host memory; `block` when all
        are."""
        for index in reversed(range(block, self.end)):
            found = self._blocks.get(index)
            if found is None or not found.is_here:
                return index + 1
        return block

    def _not_here(self, block: int) -> int:
        """How many blocks from `block` on are not in host memory."""
        here = sum(1 for index, found in self._blocks.items() if index >= block and found.is_here)
        return self.end - block - here

    def _lost_up_to(self, block: int) -> int:
        """Tokens up to the end of the last block, from `block` on, that will not come; else 0."""
        lost = (n for n, found in self._blocks.items() if n >= block and found.is_lost)
        return BLOCK_TOKENS * (max(lost, default=-1) + 1)

    def _may_wait(self, seconds: float, now: float) -> bool:
        """Whether what is missing may still be waited for, where that is faster than computing a
        part of it. The wait has a bound, because the source may be slower than its costs say."""
        if self._wait_until is None:
            self._wait_until = now + min(PATIENCE, seconds)
        return now < self._wait_until


class Meetings:
    """The meetings of one waiting queue: one at a time. decoding: requests that decode now; whoever
    makes the passes says so."""

    def __init__(
        self,
        tree: BlockTree,
        costs: RestorePlanner,
        counters: Counter[str],
        clock: Callable[[], float],
        on_end: Callable[[], object],
    ) -> None:
        """counters: gets the meetings, and what became of them. on_end: called at the end of each,
        before its blocks are given up."""
        self.decoding = 0
        self._tree = tree
        self._costs = costs
        self._counters = counters
        self._clock = clock
        self._met: tuple[Serial, Meeting] | None = None
        self._on_end = on_end

    @property
    def current(self) -> tuple[Serial | None, Meeting | None]:
        """The request that meets its history now, and its meeting."""
        return self._met or (None, None)

    @property
    def under_way(self) -> bool:
        """Whether a request meets its history now."""
        return self._met is not None

    def of(self, name: Serial) -> Meeting | None:
        """The meeting of this request, waiting or admitted; None when it has none."""
        return self._met[1] if self._met is not None and self._met[0] == name else None

    def begin(
        self,
        name: Serial,
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

    def may_begin(self, name: Serial, head: int) -> bool:
        """Whether a request that could be admitted now is, when `head` of its tokens are there. It
        is not while it waits for what comes. Otherwise its source goes on, see `Meeting.wait`."""
        step, meeting = self.next(name, head), self.of(name)
        if meeting is not None and step.action is not Action.WAIT:
            meeting.wait(head)
        return step.action is not Action.WAIT

    def next(self, name: Serial, head: int) -> Step:
        """See `Meeting.next`; OVER for a request without one. A meeting that is over is closed."""
        meeting = self.of(name)
        if meeting is None:
            return Step(Action.OVER)
        step = meeting.next(head, self.decoding, self._clock())
        if step.action is Action.OVER:
            self.end(name)
        return step

    def join(self, name: Serial, head: int) -> Sequence[BlockNode] | None:
        """See `Meeting.join`. The meeting of the request, which has one, is over."""
        meeting = self.of(name)
        assert meeting is not None
        nodes = meeting.join(head, self._clock())
        self._counters["meetings_restored" if nodes is not None else "meetings_cut_off"] += 1
        self.end(name)
        return nodes

    def end(self, name: Serial) -> None:
        """The request needs no more of its stored history. Nothing happens if it has no meeting."""
        meeting = self.of(name)
        if meeting is not None:
            self._on_end()
            self._met = None
            meeting.close()
