"""The pass of a request some of whose history is still being read, layer by layer.

The request is promised all of its stored history when nothing is missing but the streamed blocks
(`queue/meeting.py`), and its pass waits in each layer for theirs (`restore/arrival.py`). Behind the
pass they join the trees like all blocks of a meeting. A pass that has waited too long, or for
something lost, is run once more with these blocks recomputed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.restore_plan import Reason
from sglang_hc.queue.meeting import Action, Meeting
from sglang_hc.restore.arrival import LayerArrival
from sglang_hc.srt.early import gaps, standing_for, woven

if TYPE_CHECKING:
    from sglang_hc.srt.tree_backend import HcRadixCache


class _Pass(NamedTuple):
    """Of a request whose first `head` tokens were on the device. slots: of its path, in host
    memory."""

    rid: str
    head: int
    slots: list[int]


class StreamedPass:
    """At most one at a time, because there is one meeting. Belongs to the scheduler thread."""

    def __init__(self, tree: HcRadixCache) -> None:
        self._tree = tree
        self._pass: _Pass | None = None
        """Comes next or runs."""

    def is_due(self, req: Any, head: int) -> bool:
        """Whether a request whose first `head` tokens are on the device can have it now."""
        step = self._tree.tiers.queue.meetings.stream_step(req.rid, head)
        return step is not None and step.action is Action.STREAM

    def load_back(self, req: Any) -> tuple[torch.Tensor, Any]:
        """As `HcRadixCache.load_back`, for a request that `is_due`."""
        tree, head = self._tree, len(req.prefix_indices)
        tiers, restorer = tree.tiers, tree.tiers.restorer
        meeting = tiers.queue.meetings.of(req.rid)
        assert meeting is not None and tiers.disk is not None
        reads = meeting.take_streamed()
        tree.early.drop_before(head)
        there = tree.early.hand_over()
        stop, path = restorable(tree, meeting, req), meeting.path_to(head)
        missing = gaps(there, head, stop)
        count = sum(end - begin for begin, end in missing)
        others = tree.allocate(count) if path is not None and count else None
        if path is None or others is None:
            tree.early.give_back(there)
            return tree.refuse(req, Reason.BLOCKS_GONE if path is None else Reason.NO_DEVICE_SLOTS)
        nodes = [*path, *(standing_for(meeting, n) for n in range(len(path), meeting.end))]
        patience = restorer.planner.prefill_seconds(len(reads.promotions) * BLOCK_TOKENS, head)
        arrival = LayerArrival(reads, tiers.disk.poll, patience)
        slots = woven(there, others, head, stop)
        plan = restorer.planner.as_stored(count)
        promised = tree.promise(req, nodes, slots, plan, missing, arrival)
        if len(promised[0]):
            restorer.join_early(len(slots) - count)
            self._pass = _Pass(req.rid, head, [node.slot for node in nodes])
        return promised

    def over(self) -> None:
        """A pass was submitted, or what was queued was restored without one: what was streamed for
        it joins the tree."""
        if self._pass is None:
            return
        (rid, head, slots), self._pass = self._pass, None
        meetings, restorer = self._tree.tiers.queue.meetings, self._tree.tiers.restorer
        nodes = (meetings.join(rid, head) if meetings.of(rid) is not None else None) or ()
        restorer.keep(nodes)
        if [node.slot for node in nodes] != slots:
            # Some of the slots are free, and nobody may write them before they are copied.
            restorer.path.copy_stream.record().wait()


def restorable(tree: HcRadixCache, meeting: Meeting, req: Any) -> int:
    """Tokens of the prompt that may be restored; of the others at least one is computed."""
    limit: int = req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))
    return min(meeting.stop, limit) // tree.page_size * tree.page_size
