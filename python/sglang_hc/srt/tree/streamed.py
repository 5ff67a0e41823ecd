"""The pass of a request some of whose history is still being read, layer by layer.

The request is promised all of its stored history when nothing is missing but the streamed blocks
(`queue/meeting.py`), and its pass waits in each layer for theirs (`restore/arrival.py`). Behind the
pass they join the trees like all blocks of a meeting. A pass that has waited too long, or for
something lost, is run once more with these blocks recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.restore_plan import Reason
from sglang_hc.queue.meeting import Action, Meeting
from sglang_hc.restore.arrival import LayerArrival
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.tree.early import Slots, gaps, standing_for, woven
from sglang_hc.tree.block_tree import BlockNode

if TYPE_CHECKING:
    from sglang_hc.srt.tree.tree_backend import HcRadixCache


class _Pass(NamedTuple):
    """Of a request whose first `head` tokens were on the device. slots: of its path, in host
    memory."""

    req: Any
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
        step = self._tree.tiers.queue.meetings.stream_step(serial_of(req), head)
        return step is not None and step.action is Action.STREAM

    def load_back(self, req: Any) -> tuple[torch.Tensor, Any]:
        """As `HcRadixCache.load_back`, for a request that `is_due`."""
        tree, head, disk = self._tree, len(req.prefix_indices), self._tree.tiers.disk
        meeting = tree.tiers.queue.meetings.of(serial_of(req))
        assert meeting is not None and disk is not None
        reads = meeting.take_streamed()
        tree.early.drop_before(head)
        there = tree.early.hand_over()
        stop, path = restorable(tree, meeting, req), meeting.path_to(head)
        if path is None or stop <= head:
            tree.early.give_back(there)
            return tree.refuse(req, Reason.BLOCKS_GONE)
        nodes = [*path, *(standing_for(meeting, n) for n in range(len(path), meeting.end))]
        planner = tree.tiers.restorer.planner
        patience = planner.prefill_seconds(len(reads.promotions) * BLOCK_TOKENS, head)
        arrival = LayerArrival(reads, disk.poll, patience)
        promised = load_rest(tree, req, nodes, stop, there, arrival)
        if len(promised[0]):
            self._pass = _Pass(req, head, [node.slot for node in nodes])
        return promised

    def over(self) -> None:
        """A pass was submitted, or what was queued was restored without one: what was streamed for
        it joins the tree."""
        if self._pass is None:
            return
        (req, head, slots), self._pass = self._pass, None
        meetings, restorer = self._tree.tiers.queue.meetings, self._tree.tiers.restorer
        request = serial_of(req)
        nodes = (meetings.join(request, head) if meetings.of(request) is not None else None) or ()
        restorer.keep(nodes)
        if self._tree.audit is not None and nodes:
            self._tree.audit.restored(req, nodes, head, len(nodes) * BLOCK_TOKENS)
        if [node.slot for node in nodes] != slots:
            # Some of the slots are free, and nobody may write them before they are copied.
            restorer.path.copy_stream.record().wait()


def restorable(tree: HcRadixCache, meeting: Meeting, req: Any) -> int:
    """Tokens of the prompt that may be restored; of the others at least one is computed."""
    limit: int = req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))
    return min(meeting.stop, limit) // tree.page_size * tree.page_size


def load_rest(
    tree: HcRadixCache, req: Any, blocks: Sequence[BlockNode], stop: int, there: Slots,
    arrival: LayerArrival | None = None,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """As `HcRadixCache.load_back`, of what `there` lacks; its slots are the tree's from now on, or
    given back. arrival: see `Restoration`."""
    restorer, start = tree.tiers.restorer, len(req.prefix_indices)
    missing = gaps(there, start, stop)
    count = sum(end - begin for begin, end in missing)
    others = tree.allocate(count)
    if others is None:
        tree.early.give_back(there)
        return tree.refuse(req, Reason.NO_DEVICE_SLOTS)
    slots, plan = woven(there, others, start, stop), restorer.planner.as_stored(count)
    promised = tree.promise(req, blocks, slots, plan, missing, arrival)
    if len(promised[0]):
        restorer.join_early(len(slots) - count)
    return promised
