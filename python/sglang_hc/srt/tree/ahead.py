"""Blocks that get their device slots before the pass of their request, and what that pass loads.

Of a history that is on its way (`queue/meeting.py`) what has come is restored while the rest comes;
of one in host memory a few blocks in each pass in which its request waits. Both only as long as
there is room for all of the prompt: whoever is served first has it, and those before it in the
queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.restore_plan import Decision
from sglang_hc.queue.meeting import Meeting, Meetings
from sglang_hc.queue.requests import Serial
from sglang_hc.restore.planner import RestorePlanner
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.requests.scheduler_queue import SchedulerQueue
from sglang_hc.srt.tree.device_tree import DeviceTree
from sglang_hc.srt.tree.host_match import HostMatch
from sglang_hc.srt.tree.prerestored import PrerestoredBlocks
from sglang_hc.tree.block_tree import BlockNode

REQUESTS = 8
"""At the head of the queue whose blocks are restored while they wait."""

BLOCKS_PER_PASS = 4
"""Restored for them in one pass: whoever runs beside waits for no more than these."""


def restorable(meeting: Meeting, req: Any, page_size: int) -> int:
    """Tokens of the prompt that may be restored; of the others at least one is computed."""
    limit: int = req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))
    return min(meeting.stop, limit) // page_size * page_size


class RestoreAhead:
    """Restores blocks of one tree's requests before their passes. Belongs to the scheduler thread.
    The tree that a method is given has the device slots."""

    def __init__(
        self,
        blocks: PrerestoredBlocks,
        meetings: Meetings[Serial],
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

    def restore_what_came(self, tree: DeviceTree, meeting: Meeting, req: Any, has: int) -> bool:
        """Restore what has come, while there is room for all of the prompt, of which the request
        has device slots for the first `has` tokens. False for nothing."""
        request, blocks = serial_of(req), self._blocks
        wanted = blocks.wanted(request, meeting, has, restorable(meeting, req, tree.page_size))
        if not wanted or meeting.path_to(max(has, meeting.first * BLOCK_TOKENS)) is None:
            return False
        need = len(req.full_untruncated_fill_ids) - has - blocks.tokens_of(request)
        if tree.room < need:
            blocks.release()
            meeting.has_room = False
            return False
        return self._restore(tree, req, {n: meeting.detached_node(n) for n in wanted})

    def restore_waiting(self, tree: DeviceTree) -> None:
        """A pass begins: restore what the first requests of the queue have in host memory, if they
        were there before."""
        waiting, blocks = self._waiting, self._blocks
        blocks.forget([one for one in blocks.requests if not waiting.has(one)])
        left, room = BLOCKS_PER_PASS, tree.room
        for req in waiting.first(REQUESTS):
            request = serial_of(req)
            is_new = request not in blocks.requests
            load = blocks.of(request)
            room -= len(req.full_untruncated_fill_ids) - blocks.tokens_of(request)
            if room < 0 or left == 0:
                return
            meeting = self._meetings.of(request)
            if meeting is not None:
                if not meeting.is_here(meeting.first * BLOCK_TOKENS):
                    self.restore_what_came(tree, meeting, req, 0)
                continue
            if is_new or waiting.is_fetching(request):
                continue
            if load.todo is None:
                load.todo = () if tree.stopped else self._in_host(req, tree.page_size)
            chosen, load.todo = load.todo[:left], load.todo[left:]
            if all(node.ready for _, node in chosen):
                if chosen and self._restore(tree, req, dict(chosen)):
                    left -= len(chosen)
            else:
                load.todo = ()

    def _in_host(self, req: Any, page_size: int) -> list[tuple[int, BlockNode]]:
        """The whole blocks of a waiting request's prompt that host memory has and the device lacks,
        if all of them are worth restoring as they are stored."""
        planner, waiting = self._planner, self._waiting.look_at(serial_of(req))
        if not planner.can_restore_early:
            return []
        context = waiting.on_device()
        match = self._host_match.ready(waiting.prompt)
        limit = req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))
        stop = min(match.tokens, limit) // page_size * page_size
        if stop <= context:
            return []
        plan = planner.choose(stop - context, context, max(1, waiting.prompt.num_tokens - stop))
        if plan.decision is not Decision.LOAD or plan.tokens < stop - context:
            return []
        first, last = -(-context // BLOCK_TOKENS), stop // BLOCK_TOKENS
        return list(enumerate(match.nodes))[first:last]

    def _restore(self, tree: DeviceTree, req: Any, nodes: Mapping[int, BlockNode]) -> bool:
        """Restore these blocks into slots of their own. False where there are none."""
        slots = tree.allocate(BLOCK_TOKENS * len(nodes))
        if slots is None:
            return False
        self._blocks.restore(serial_of(req), nodes, slots)
        return True
