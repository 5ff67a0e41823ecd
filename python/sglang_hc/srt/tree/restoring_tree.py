"""The half of the tree that restores: what is below comes back to the device at admission."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.restore_plan import Reason, RestorePlan
from sglang_hc.queue.meeting import Meeting, Meetings
from sglang_hc.restore.path import Restoration, WindowRows
from sglang_hc.restore.prerestored import PrerestoredBlocks
from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.tree.ahead import RestoreAhead, restorable
from sglang_hc.srt.tree.capturing_tree import CapturingTree
from sglang_hc.srt.tree.host_match import HostMatch
from sglang_hc.srt.tree.reporting import Reporting
from sglang_hc.tree.block_tree import BlockNode

REFUSED = "hc_refused"
"""Attribute of a request: the handle under which a refusal was counted; it gets another one when it
is retracted."""


class _Restoring(NamedTuple):
    """A restoration that is not over; its node is locked. SGLang's checks ask for `node_id`."""

    node_id: int
    lock: Any


class RestoringTree(CapturingTree):
    """The device tree with restorations. Its attributes are made by `HcRadixCache`."""

    meetings: Meetings
    host_match: HostMatch
    prerestored: PrerestoredBlocks
    ahead: RestoreAhead
    reporting: Reporting
    _lag: int
    _numbers: Iterator[int]

    def load_met(self, meeting: Meeting, req: Any) -> tuple[torch.Tensor, Any] | None:
        """As `load_back`, of a history of which nothing is still to come. None where it cannot be
        restored. The meeting is over."""
        request, start = serial_of(req), fields.prefix_length(req)
        stop = restorable(meeting, req, self.page_size)
        self.prerestored.prove(request)
        blocks = self.meetings.join(request, start)
        if blocks is None or stop <= start:
            self.prerestored.forget([request])
            return None
        return self.load_back(req, blocks, stop, met=True)

    def load_back(
        self, req: Any, blocks: Sequence[BlockNode], stop: int, *, met: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Slots for the tokens from the end of the request's prefix to `stop`, whose path `blocks`
        are ready, and the node that has them; or none. The request holds a lock on its prefix. met:
        see `place`."""
        if self.states is not None:
            return self.states.load_back(self, req, blocks, stop)
        if self.ends is not None:
            return self._load_to_end(req, blocks, stop)
        placed = self.ahead.place(self, req, blocks, stop, met=met)
        if isinstance(placed, Reason):
            return self.refuse(req, placed)
        slots, plan, missing, early = placed
        loaded = self.insert_restoring_node(req, blocks, slots, plan, missing)
        if len(loaded[0]):
            self.restorer.join_early(early)
        return loaded

    def _load_to_end(
        self, req: Any, blocks: Sequence[BlockNode], stop: int
    ) -> tuple[torch.Tensor, Any]:
        """As `load_back`, all or nothing: behind the last of `blocks` the path can be continued."""
        restorer, before = self.restorer, fields.prefix_slots(self, req)
        start, prompt = len(before), fields.prompt_of(req)
        plan = restorer.planner.choose(stop - start, start, max(1, len(prompt) - stop))
        if plan.tokens < stop - start:
            return self.refuse(req, plan.reason)
        parts = self.host_match.parts(blocks)
        if parts is None:
            return self.refuse(req, Reason.BLOCKS_GONE)
        key = RadixKey(prompt[: stop + self._lag], fields.namespace_of(req))
        grown = self.grow(before, key, fields.priority_of(req))
        if grown is None:
            return self.refuse(req, Reason.NO_DEVICE_SLOTS)
        queued, window = restorer.num_queued, None
        try:
            self.compute_stream.will_read(grown.slots)
            self.compute_stream.will_read(grown.windows)
            restorer.planner.take(plan)
            if grown.ranges:
                first = len(blocks) - len(parts)
                window = WindowRows(parts, first, grown.ranges, grown.windows)
            restoration = Restoration(tuple(blocks), grown.there, stop, grown.slots, window=window)
            self._queue_one(restoration, grown.node)
        except Exception:
            restorer.unqueue(queued)
            self.take_back(key, grown)
            raise
        self.reporting.restored(req, blocks, plan, start, stop)
        if self.audit is not None:
            self.audit.restored(req, blocks, min([start, *(low for low, _ in grown.ranges)]), stop)
        if fields.was_retracted(req):
            restorer.counters["retracted_restored_tokens"] += stop - start
        return self.path_device_indices(grown.node)[start:stop], grown.node

    def insert_restoring_node(
        self, req: Any, blocks: Sequence[BlockNode], slots: torch.Tensor, plan: RestorePlan,
        missing: Sequence[tuple[int, int]],
    ) -> tuple[torch.Tensor, Any]:  # fmt: skip
        """As `load_back`, into these slots. Tokens [begin, end) of `missing` are restored; of the
        others the slots hold K and V already."""
        before, restorer = fields.prefix_slots(self, req), self.restorer
        stop = len(before) + len(slots) + self._lag
        try:
            key = RadixKey(fields.prompt_of(req)[:stop], fields.namespace_of(req))
            end, priority = fields.prefix_node(req), fields.priority_of(req)
            node = self.extend(end, before, key, slots, priority)
        except Exception:
            self.token_to_kv_pool_allocator.free(slots)
            raise
        if node is None:
            self.token_to_kv_pool_allocator.free(slots)
            return self.refuse(req, Reason.TREE_CHANGED)
        queued = restorer.num_queued
        try:
            self.queue_restorations(blocks, slots, node, before, plan, missing)
        except Exception:
            # Nobody may read what is not restored: the promise is taken back.
            restorer.unqueue(queued)
            self.remove(node)
            raise
        self.reporting.restored(req, blocks, plan, len(before), len(before) + len(slots))
        if self.audit is not None:
            self.audit.restored(req, blocks, len(before), len(before) + len(slots))
        if fields.was_retracted(req):
            restorer.counters["retracted_restored_tokens"] += len(slots)
        return slots, node

    def queue_restorations(
        self, blocks: Sequence[BlockNode], slots: torch.Tensor, node: Any, before: torch.Tensor,
        plan: RestorePlan, missing: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        """Restorations of `missing` into `slots`, which `node` has behind the slots `before`."""
        restorer, lag = self.restorer, self._lag
        self.compute_stream.will_read(slots)
        restorer.planner.take(plan)
        for begin, end in missing:
            path = tuple(blocks[: -(-(end + lag) // BLOCK_TOKENS)])
            own = slots[begin - len(before) : end - len(before)]
            above = torch.cat([before, slots[: begin - len(before)]])
            self.compute_stream.will_read(above)
            recompute = restorer.recomputed(plan)
            self._queue_one(Restoration(path, begin, end, own, recompute, above), node)

    def _queue_one(self, restoration: Restoration, node: Any) -> None:
        number = next(self._numbers)
        self.ongoing_load_back[number] = _Restoring(node, self.lock(node))
        release = partial(self._restored, number)
        try:
            self.restorer.queue(restoration, release)
        except Exception:
            release()
            raise

    def _restored(self, number: int) -> None:
        """A restoration is over."""
        one = self.ongoing_load_back.pop(number, None)
        if one is not None:  # the tree was not reset since
            self.unlock(one.lock)

    def refuse(self, req: Any, reason: Reason) -> tuple[torch.Tensor, Any]:
        """Nothing is restored for this request; it recomputes. SGLang may admit it some passes
        later, and asks in each."""
        handle = fields.handle_of(req)
        if getattr(req, REFUSED, None) is not handle:
            setattr(req, REFUSED, handle)
            self.restorer.planner.refuse(reason)
        fields.set_host_hit(req, 0)
        return torch.empty(0, dtype=torch.int64, device=self.device), fields.prefix_node(req)
