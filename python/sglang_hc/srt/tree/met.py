"""Device slots for a history that comes while its request waits or computes (`queue/meeting.py`).

What has come is restored early, as long as there is room for all of the prompt; the rest is
restored in the request's next pass, when nothing is missing any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.restore_plan import Reason
from sglang_hc.queue.meeting import Meeting
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.tree.early import gaps, woven

if TYPE_CHECKING:
    from sglang_hc.srt.tree.tree_backend import HcRadixCache


def restorable(tree: HcRadixCache, meeting: Meeting, req: Any) -> int:
    """Tokens of the prompt that may be restored; of the others at least one is computed."""
    limit: int = req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))
    return min(meeting.stop, limit) // tree.page_size * tree.page_size


def restore_early(tree: HcRadixCache, meeting: Meeting, req: Any, head: int, has: int) -> bool:
    """Restore what has come behind `head` tokens, while there is room for all of the prompt, of
    which the request has device slots for the first `has` tokens. False for nothing."""
    early = tree.early
    blocks = early.wanted(meeting, head, restorable(tree, meeting, req))
    if not blocks or meeting.path_to(head) is None:
        return False
    without_them = tree.token_to_kv_pool_allocator.available_size() + tree.evictable_size_
    if without_them < len(req.full_untruncated_fill_ids) - has - early.tokens:
        early.release()
        meeting.as_they_come = False
        return False
    slots = tree.allocate(BLOCK_TOKENS * len(blocks))
    if slots is None:
        return False
    early.restore(meeting, blocks, slots)
    return True


def load_back(tree: HcRadixCache, meeting: Meeting, req: Any) -> tuple[torch.Tensor, Any] | None:
    """As `HcRadixCache.load_back`, of a history of which nothing is still to come. None where it
    cannot be restored. The meeting is over."""
    restorer, start = tree.tiers.restorer, len(req.prefix_indices)
    stop = restorable(tree, meeting, req)
    tree.early.drop_before(start)
    there = tree.early.hand_over()
    blocks = tree.tiers.queue.meetings.join(serial_of(req), start)
    if blocks is None or stop <= start:
        tree.early.give_back(there)
        return None
    if not there:
        return tree.load_back(req, blocks, stop)
    missing = gaps(there, start, stop)
    count = sum(end - begin for begin, end in missing)
    others = tree.allocate(count)
    if others is None:
        tree.early.give_back(there)
        return tree.refuse(req, Reason.NO_DEVICE_SLOTS)
    plan = restorer.planner.as_stored(count)
    promised = tree.promise(req, blocks, woven(there, others, start, stop), plan, missing)
    restorer.join_early(len(promised[0]) - count if len(promised[0]) else 0)
    return promised
