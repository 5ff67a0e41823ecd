"""Blocks that get their device slots before the pass of their request, and what that pass loads.

Of a history that is on its way (`queue/meeting.py`) what has come is restored while the rest comes;
of one in host memory a few blocks in each pass in which its request waits. Both only as long as
there is room for all of the prompt: whoever is served first has it, and those before it in the
queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.restore_plan import Decision
from sglang_hc.queue.meeting import Meeting
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.tree.block_tree import BlockNode

if TYPE_CHECKING:
    from sglang_hc.srt.tree.tree_backend import HcRadixCache

REQUESTS = 8
"""At the head of the queue whose blocks are restored while they wait."""

BLOCKS_PER_PASS = 4
"""Restored for them in one pass: whoever runs beside waits for no more than these."""


def restorable(tree: HcRadixCache, meeting: Meeting, req: Any) -> int:
    """Tokens of the prompt that may be restored; of the others at least one is computed."""
    limit: int = req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))
    return min(meeting.stop, limit) // tree.page_size * tree.page_size


def restore_what_came(tree: HcRadixCache, meeting: Meeting, req: Any, has: int) -> bool:
    """Restore what has come, while there is room for all of the prompt, of which the request has
    device slots for the first `has` tokens. False for nothing."""
    request, blocks = serial_of(req), tree.prerestored
    wanted = blocks.wanted(request, meeting, has, restorable(tree, meeting, req))
    if not wanted or meeting.path_to(max(has, meeting.first * BLOCK_TOKENS)) is None:
        return False
    need = len(req.full_untruncated_fill_ids) - has - blocks.tokens_of(request)
    if _room(tree) < need:
        blocks.release()
        meeting.as_they_come = False
        return False
    return _restore(tree, req, {n: meeting.detached_node(n) for n in wanted})


def restore_waiting(tree: HcRadixCache) -> None:
    """A pass begins: restore what the first requests of the queue have in host memory, if they were
    there before."""
    waiting, blocks = tree.waiting, tree.prerestored
    blocks.forget([one for one in blocks.requests if not waiting.has(one)])
    left, room = BLOCKS_PER_PASS, _room(tree)
    for req in waiting.first(REQUESTS):
        request = serial_of(req)
        is_new = request not in blocks.requests
        load = blocks.of(request)
        room -= len(req.full_untruncated_fill_ids) - blocks.tokens_of(request)
        if room < 0 or left == 0:
            return
        meeting = tree.meetings.of(request)
        if meeting is not None:
            if not meeting.is_here(meeting.first * BLOCK_TOKENS):
                restore_what_came(tree, meeting, req, 0)
            continue
        if is_new or waiting.is_fetching(request):
            continue
        if load.todo is None:
            load.todo = _in_host(tree, req)
        chosen, load.todo = load.todo[:left], load.todo[left:]
        if all(node.ready for _, node in chosen):
            if chosen and _restore(tree, req, dict(chosen)):
                left -= len(chosen)
        else:
            load.todo = ()


def _in_host(tree: HcRadixCache, req: Any) -> list[tuple[int, BlockNode]]:
    """The whole blocks of a waiting request's prompt that host memory has and the device lacks, if
    all of them are worth restoring as they are stored."""
    planner, waiting = tree.restorer.planner, tree.waiting.look_at(serial_of(req))
    if tree.stopped or not planner.can_restore_early:
        return []
    context = waiting.on_device()
    match = tree.host_match.ready(waiting.prompt)
    limit = req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))
    stop = min(match.tokens, limit) // tree.page_size * tree.page_size
    if stop <= context:
        return []
    plan = planner.choose(stop - context, context, max(1, waiting.prompt.num_tokens - stop))
    if plan.decision is not Decision.LOAD or plan.tokens < stop - context:
        return []
    first, last = -(-context // BLOCK_TOKENS), stop // BLOCK_TOKENS
    return list(enumerate(match.nodes))[first:last]


def _restore(tree: HcRadixCache, req: Any, nodes: Mapping[int, BlockNode]) -> bool:
    """Restore these blocks into slots of their own. False where there are none."""
    slots = tree.allocate(BLOCK_TOKENS * len(nodes))
    if slots is None:
        return False
    tree.prerestored.restore(serial_of(req), nodes, slots)
    return True


def _room(tree: HcRadixCache) -> int:
    """Device slots that are free or can be evicted from the device tree."""
    return int(tree.token_to_kv_pool_allocator.available_size() + tree.evictable_size_)


def load_back(tree: HcRadixCache, meeting: Meeting, req: Any) -> tuple[torch.Tensor, Any] | None:
    """As `HcRadixCache.load_back`, of a history of which nothing is still to come. None where it
    cannot be restored. The meeting is over."""
    start, stop = len(req.prefix_indices), restorable(tree, meeting, req)
    tree.prerestored.prove(serial_of(req))
    blocks = tree.meetings.join(serial_of(req), start)
    if blocks is None or stop <= start:
        tree.prerestored.forget([serial_of(req)])
        return None
    return tree.load_back(req, blocks, stop)
