"""Blocks that get their device slots before the pass of their request, and what that pass loads.

Of a history that is on its way (`queue/meeting.py`) what has come is restored while the rest comes;
of one in host memory a few blocks in each pass in which its request waits. Both only as long as
there is room for all of the prompt: whoever is served first has it, and those before it in the
queue. For a block from host memory nothing leaves the device: it gets free slots or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.policy.restore_plan import Choice, Reason, RestorePlan
from sglang_hc.queue.loads import Load
from sglang_hc.queue.meeting import Meeting, Meetings
from sglang_hc.restore.prerestored import (
    PrerestoredBlocks,
    interleave_slots,
    missing_ranges,
)
from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.requests.scheduler_queue import SchedulerQueue
from sglang_hc.srt.tree.device_tree import DeviceTree
from sglang_hc.srt.tree.host_match import HostMatch
from sglang_hc.tree.block_tree import BlockNode

REQUESTS = 8
"""At the head of the queue whose blocks are restored while they wait."""

BLOCKS_PER_PASS = 4
"""Restored for them in one pass: whoever runs beside waits for no more than these."""


def restorable(meeting: Meeting, req: Any, page_size: int) -> int:
    """Tokens of the prompt that may be restored; of the others at least one is computed."""
    return min(meeting.stop, fields.longest_prefix(req)) // page_size * page_size


class Placed(NamedTuple):
    """Device slots of a span of tokens, in their order. missing: tokens [begin, end) that are
    restored as planned; of the others, `early` tokens, the slots hold K and V already."""

    slots: torch.Tensor
    plan: RestorePlan
    missing: Sequence[tuple[int, int]]
    early: int


class _Layout(NamedTuple):
    """What `place` will do with the tokens up to `stop`. missing: as in `Placed`. uses_early: what
    was restored of them before is used."""

    stop: int
    plan: RestorePlan
    missing: Sequence[tuple[int, int]]
    uses_early: bool


class RestoreAhead:
    """Restores blocks of one tree's requests before their passes. Belongs to the scheduler thread.
    The tree that a method is given has the device slots."""

    def __init__(
        self,
        blocks: PrerestoredBlocks,
        meetings: Meetings,
        waiting: SchedulerQueue,
        planner: RestorePlanner,
        host_match: HostMatch,
    ) -> None:
        """blocks: what was restored."""
        self._blocks = blocks
        self._meetings = meetings
        self._waiting = waiting
        self._planner = planner
        self._host_match = host_match
        self._promised: tuple[Any, _Layout] | None = None
        """To the request that SGLang is about to admit."""

    def restore_what_came(
        self, tree: DeviceTree, meeting: Meeting, req: Any, has: int, most: int | None = None
    ) -> int:
        """Restore what has come, while there is room for all of the prompt, of which the request
        has device slots for the first `has` tokens. most: blocks; None for any number. Returns how
        many were restored."""
        request, blocks = serial_of(req), self._blocks
        wanted = blocks.wanted(request, meeting, has, restorable(meeting, req, tree.page_size))
        if not wanted or meeting.path_to(max(has, meeting.first * BLOCK_TOKENS)) is None:
            return 0
        need = len(fields.prompt_of(req)) - has - blocks.tokens_of(request)
        if tree.room < need:
            blocks.release(keep=request)
        if tree.room < need:
            blocks.release()
            meeting.has_room = False
            return 0
        return self._restore(tree, req, {n: meeting.detached_node(n) for n in wanted[:most]})

    def restore_waiting(self, tree: DeviceTree) -> None:
        """A pass begins: restore what the first requests of the queue have in host memory, if they
        were there before."""
        waiting, blocks = self._waiting, self._blocks
        blocks.forget([one for one in blocks.requests if not waiting.has(one)])
        left, room = BLOCKS_PER_PASS, tree.room
        nearer: list[Load] = []  # of the requests nearer the head
        for req in waiting.first(REQUESTS):
            request = serial_of(req)
            is_new = request not in blocks.requests
            load = blocks.of(request)
            room -= len(fields.prompt_of(req)) - blocks.tokens_of(request)
            if room < 0 or left == 0:
                return
            meeting = self._meetings.of(request)
            if meeting is not None:
                if not meeting.is_here(meeting.first * BLOCK_TOKENS):
                    most = left if self._meetings.decoding else None
                    left -= min(left, self.restore_what_came(tree, meeting, req, 0, most))
            elif waiting.is_fetching(request):
                load.todo = None  # there will be more
            elif not is_new:
                left -= self._restore_some(tree, req, load, left, nearer)
            nearer.append(blocks.of(request))

    def _restore_some(
        self, tree: DeviceTree, req: Any, load: Load, most: int, nearer: Sequence[Load]
    ) -> int:
        """Restore blocks of a waiting request that are in host memory, so many at most and none
        that those of `nearer` have or want. Returns how many."""
        if load.is_closed or tree.stopped:
            return 0
        if load.todo is None:
            theirs = set[bytes]().union(*(other.block_ids for other in (*nearer, load)))
            found = self._in_host(req, tree.page_size)
            load.todo = [(n, node) for n, node in found if node.block_id not in theirs]
        count = min(most, tree.free // BLOCK_TOKENS)
        chosen, load.todo = load.todo[:count], load.todo[count:]
        if not all(node.ready for _, node in chosen):
            load.todo = ()
            return 0
        return self._restore(tree, req, dict(chosen)) if chosen else 0

    def _in_host(self, req: Any, page_size: int) -> list[tuple[int, BlockNode]]:
        """The whole blocks of a waiting request's prompt that host memory has and the device lacks,
        if all of them are worth restoring as they are stored."""
        planner, waiting = self._planner, self._waiting.look_at(serial_of(req))
        if not planner.can_restore_early:
            return []
        context = waiting.on_device()
        match = self._host_match.ready(waiting.prompt)
        stop = min(match.tokens, fields.longest_prefix(req)) // page_size * page_size
        if stop <= context:
            return []
        plan = planner.choose(stop - context, context, max(1, waiting.prompt.num_tokens - stop))
        if plan.choice is not Choice.LOAD or plan.tokens < stop - context:
            return []
        first, last = -(-context // BLOCK_TOKENS), stop // BLOCK_TOKENS
        return list(enumerate(match.nodes))[first:last]

    def promise(self, tree: DeviceTree, req: Any, path: Sequence[BlockNode], stop: int) -> int:
        """How many of the tokens from the end of the request's prefix to `stop`, whose `path` is
        ready, are worth restoring. `place` gives slots to as many when it is asked next."""
        self._promised = None
        layout = self._layout(tree, req, path, stop, met=False)
        self._promised = req, layout
        return layout.stop - fields.prefix_length(req)

    def place(
        self, tree: DeviceTree, req: Any, path: Sequence[BlockNode], stop: int, *, met: bool
    ) -> Placed | Reason:
        """Slots for all tokens from the end of the request's prefix to `stop`, whose `path` is
        ready, or why there are none. They are the caller's. met: the request has met its history,
        of which no part is left out."""
        start, promised = fields.prefix_length(req), self._promised
        self._promised = None
        if promised is not None and promised[0] is req and promised[1].stop == stop and not met:
            layout = promised[1]
        else:
            layout = self._layout(tree, req, path, stop, met)
        there = dict(self._blocks.hand_over(serial_of(req), path, start, stop))
        try:
            if not layout.uses_early:
                self._blocks.give_back(there)
                there.clear()
            if layout.stop < stop or stop == start:
                self._blocks.give_back(there)
                return layout.plan.reason
            if layout.uses_early and missing_ranges(there, start, stop) != layout.missing:
                self._blocks.give_back(there)
                return Reason.BLOCKS_GONE
            others = tree.allocate(sum(end - begin for begin, end in layout.missing))
            if others is None:
                self._blocks.give_back(there)
                return Reason.NO_DEVICE_SLOTS
            slots = interleave_slots(there, others, start, stop)
        except Exception:
            self._blocks.give_back(there)
            raise
        return Placed(slots, layout.plan, layout.missing, len(slots) - len(others))

    def _layout(
        self, tree: DeviceTree, req: Any, path: Sequence[BlockNode], stop: int, met: bool
    ) -> _Layout:
        """How far it is worth to restore, and how. Changes nothing."""
        planner, start = self._planner, fields.prefix_length(req)
        there = self._blocks.handed_over(serial_of(req), path, start, stop)
        new = max(1, len(fields.prompt_of(req)) - stop)
        missing = missing_ranges(there, start, stop)
        plan = self._plan_rest(missing, stop, new, met) if there else None
        if plan is not None:
            if not plan.tokens and missing:  # the end is computed
                stop, missing = missing[0][0], []
            return _Layout(stop, plan, missing, uses_early=True)
        plan = planner.choose(stop - start, start, new)
        if met and 0 < plan.tokens < stop - start:
            plan = planner.as_stored(stop - start)
        stop = start + plan.tokens // tree.page_size * tree.page_size
        return _Layout(stop, plan, [(start, stop)], uses_early=False)

    def _plan_rest(
        self, missing: Sequence[tuple[int, int]], stop: int, new: int, met: bool
    ) -> RestorePlan | None:
        """How to restore all that is missing up to `stop`, of a span of which blocks are on the
        device, or none of what is missing at its end. None where the whole span is to be weighed
        without these."""
        planner, count = self._planner, sum(end - begin for begin, end in missing)
        if met or not count:
            return planner.as_stored(count)
        plan = planner.choose(count, stop - count, new)
        if plan.choice is Choice.LOAD and plan.tokens == count:
            return plan
        is_end = len(missing) == 1 and missing[0][1] == stop
        return planner.as_stored(0) if plan.choice is Choice.REFUSE and is_end else None

    def _restore(self, tree: DeviceTree, req: Any, nodes: Mapping[int, BlockNode]) -> int:
        """Restore these blocks into slots of their own. Returns how many: all of them, or none
        where there are no slots."""
        slots = tree.allocate(BLOCK_TOKENS * len(nodes))
        if slots is None:
            return 0
        self._blocks.restore(serial_of(req), nodes, slots)
        return len(nodes)
