"""The radix tree SGLang talks to: its own device tree, with the tiers below.

What leaves the device stays findable in the host tier by its tokens. A request that matches further
there than on the device gets slots allocated and inserted into the device tree at admission; their
content arrives layer by layer while the request's own tokens are prefilled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.restore_plan import Reason, RestorePlan
from sglang_hc.queue.meeting import Meeting
from sglang_hc.restore.path import Restoration
from sglang_hc.restore.prerestored import PrerestoredBlocks
from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.guard import SglangMethod, method, nothing
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.engine.scheduler import OwnScheduler
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.srt.requests.scheduler_queue import SchedulerQueue
from sglang_hc.srt.tree.ahead import RestoreAhead, restorable
from sglang_hc.srt.tree.audit import Audit
from sglang_hc.srt.tree.capturing_tree import CapturingTree
from sglang_hc.srt.tree.device_eviction import DeviceOrder
from sglang_hc.srt.tree.host_match import HostMatch, HostPoolFacade
from sglang_hc.tiers.forgetting import Forgetter
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.block_tree import BlockNode


class HcRadixCache(CapturingTree):
    """RadixCache whose evicted prefixes come back from the tiers.

    Belongs to the scheduler thread.
    """

    _is_built = False  # the base class's constructor calls `reset`

    def __init__(
        self,
        params: Any,
        tiers: Tiers,
        scheduler: OwnScheduler,
        compute: ComputeStream,
        prerestored: PrerestoredBlocks,
        device_order: DeviceOrder | None,
        audit: Audit | None = None,
    ) -> None:
        """compute: where the model runs. prerestored: told of the end of each meeting.
        device_order: which leaves of the device tree leave first; None for SGLang's order. audit:
        of what is restored; None for none."""
        super().__init__(params)
        layout = tiers.layout
        self.tiers = tiers
        self.decides_alone = tiers.decides_alone
        self.capture, self.restorer = tiers.capture, tiers.restorer
        self.meetings, self._disk = tiers.meetings, tiers.disk
        self._lag = layout.draft.lag
        self._recorder, self.audit = tiers.recorder, audit
        self.scheduler = scheduler
        self.compute_stream = compute
        self._device_order = device_order
        self.token_to_kv_pool_host = HostPoolFacade(tiers.host)
        # SGLang reads the sizes of these to know whether anything is under way.
        self.ongoing_write_through: dict[int, Any] = {}
        self.ongoing_prefetch: dict[str, Any] = {}
        self.ongoing_backup: dict[int, Any] = {}
        self.enable_storage = True  # has SGLang tell us of every request that is queued
        self.hicache_storage_pass_prefix_keys = False
        if self._disk is not None:  # a class's name is shown as the storage back end of a hit
            shown = type(self._disk.name, (), {})
            self.cache_controller = SimpleNamespace(
                storage_backend=shown(), storage_backend_type=self._disk.name
            )
        self.host_match = HostMatch(tiers.host, layout)
        self.waiting = SchedulerQueue(tiers.queue, self._on_device, tiers.recorder)
        self.prerestored, planner = prerestored, self.restorer.planner
        self.ahead = RestoreAhead(
            prerestored, self.meetings, self.waiting, planner, self.host_match
        )
        self.forgetter = Forgetter(self._disk)
        self._is_built = True

    @property
    def ongoing_load_back(self) -> range:
        return range(self.restorer.under_way)

    # -- look up ---------------------------------------------------------------------------------

    @method()
    def match_prefix(self, theirs: SglangMethod, params: MatchPrefixParams) -> MatchResult:
        """Device match, with what the host tier adds for a request in `host_hit_length`."""
        result = self._with_host_hit(theirs(params), params)
        if self._recorder is not None and params.req is not None:
            on_device, hit = result.device_prefix_len, result.host_hit_length
            self._recorder.matched(serial_of(params.req), on_device, hit)
        return result

    def _with_host_hit(self, result: MatchResult, params: MatchPrefixParams) -> MatchResult:
        if params.req is not None:
            self.waiting.matched(params.req)
        if params.req is None or self.disable or self.stopped or len(params.key) == 0:
            return result
        key, on_device = params.key, result.device_prefix_len
        if len(key) - on_device < self.page_size:
            return result
        usable = self.host_match.tokens(params.req, key, result.last_device_node, on_device)
        hit = (usable - on_device) // self.page_size * self.page_size
        return result._replace(host_hit_length=hit) if hit > 0 else result

    def _on_device(self, key: RadixKey) -> int:
        """Tokens of `key` that the device has now."""
        return RadixCache.match_prefix(self, MatchPrefixParams(key=key)).device_prefix_len

    @method(answer=nothing)
    def promise(self, req: Any) -> None:
        """A request is about to be admitted. SGLang takes all of its host hit or nothing of it:
        promise the part that is worth restoring. If none is, `init_load_back` counts why."""
        hit = fields.host_hit(req)
        blocks = self.host_match.blocks(req, fields.prefix_length(req) + hit) if hit else None
        if blocks is not None:
            worth = self.ahead.promise(self, req, blocks, fields.prefix_length(req) + hit)
            fields.set_host_hit(req, worth or hit)

    @method(answer=lambda tree, params: (0, fields.prefix_node(params.req)))
    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any]:
        """Allocate and insert slots for a request's host hit, and queue their restoration.

        Returns what was promised, or 0 tokens, which are recomputed then; and the node at the end
        of the prefix.
        """
        req = params.req
        stop = fields.prefix_length(req) + params.host_hit_length
        meeting = self.meetings.of(serial_of(req))
        if meeting is not None and stop == restorable(meeting, req, self.page_size):
            found = self.load_met(meeting, req)
            slots, node = found or self.refuse(req, Reason.BLOCKS_GONE)
            fields.set_host_hit(req, len(slots), from_below=True)
            return len(slots), node
        blocks = self.host_match.blocks(req, stop)
        if blocks is None:
            slots, node = self.refuse(req, Reason.BLOCKS_GONE)
        else:
            slots, node = self.load_back(req, blocks, stop)
        return len(slots), node

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
        placed = self.ahead.place(self, req, blocks, stop, met=met)
        if isinstance(placed, Reason):
            return self.refuse(req, placed)
        slots, plan, missing, early = placed
        loaded = self.insert_restoring_node(req, blocks, slots, plan, missing)
        if len(loaded[0]):
            self.restorer.join_early(early)
        return loaded

    def insert_restoring_node(
        self, req: Any, blocks: Sequence[BlockNode], slots: torch.Tensor, plan: RestorePlan,
        missing: Sequence[tuple[int, int]],
    ) -> tuple[torch.Tensor, Any]:  # fmt: skip
        """As `load_back`, into these slots. Tokens [begin, end) of `missing` are restored; of the
        others the slots hold K and V already."""
        before, restorer = fields.prefix_slots(self, req), self.restorer
        try:
            node = self._extend(req, slots)
        except Exception:
            self.token_to_kv_pool_allocator.free(slots)
            raise
        if node is None:
            self.token_to_kv_pool_allocator.free(slots)
            return self.refuse(req, Reason.TREE_CHANGED)
        queued = restorer.num_queued
        try:
            self._queue(blocks, slots, node, before, plan, missing)
        except Exception:
            # Nobody may read what is not restored: the promise is taken back.
            restorer.unqueue(queued)
            self._delete_leaf(node)
            self.token_to_kv_pool_allocator.free(slots)
            raise
        if self.audit is not None:
            self.audit.restored(req, blocks, len(before), len(before) + len(slots))
        if fields.was_retracted(req):
            restorer.counters["retracted_restored_tokens"] += len(slots)
        return slots, node

    def _queue(
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
            restoration = Restoration(path, begin, end, own, recompute, above)
            self.inc_lock_ref(node)
            try:
                restorer.queue(restoration, release=lambda: self.dec_lock_ref(node))
            except Exception:
                self.dec_lock_ref(node)
                raise

    def _extend(self, req: Any, slots: torch.Tensor) -> Any:
        """A new node with `slots` for the tokens behind the locked node of a request's prefix.

        None when the tree has changed since: the path goes on there by now, or has left the tree.
        The path above is not compared again; a lock keeps it, and a node's end never moves.
        """
        node, start = fields.prefix_node(req), fields.prefix_length(req)
        stop = start + len(slots) + self._lag
        tokens = fields.prompt_of(req)[start:stop]
        key = RadixKey(tokens, fields.namespace_of(req), is_bigram=self.is_eagle)
        if node.lock_ref == 0 or key.child_key(self.page_size) in node.children:
            return None
        return self._insert_helper(node, key, slots)[1]

    def refuse(self, req: Any, reason: Reason) -> tuple[torch.Tensor, Any]:
        """Nothing is restored for this request; it recomputes."""
        self.restorer.planner.refuse(reason)
        return self._without_host_hit(req)

    def _without_host_hit(self, req: Any) -> tuple[torch.Tensor, Any]:
        fields.set_host_hit(req, 0)
        return self._empty_device_indices, fields.prefix_node(req)

    # -- evict -----------------------------------------------------------------------------------

    def evictable_size(self) -> int:
        """Device slots that can be had back."""
        held = self.prerestored.tokens + (self.audit.tokens if self.audit is not None else 0)
        return held + int(self.evictable_size_)

    @method()
    def evict(self, theirs: SglangMethod, params: EvictParams) -> EvictResult:
        """Free device slots: an audit's, leaves of the tree, then those of prerestored blocks."""
        freed = self.audit.release() if self.audit is not None else 0
        if freed >= params.num_tokens:
            return EvictResult(num_tokens_evicted=freed)
        if self._device_order is None or self.disable:
            result = theirs(EvictParams(num_tokens=params.num_tokens - freed))
        else:
            left = self._device_order.evict(self, params.num_tokens - freed)
            result = EvictResult(num_tokens_evicted=left)
        result.num_tokens_evicted += freed
        if result.num_tokens_evicted < params.num_tokens:
            result.num_tokens_evicted += self.prerestored.release()
        return result

    # -- restore ---------------------------------------------------------------------------------

    def ready_to_load_host_cache(self) -> int:
        """Start what admission queued; the batch about to run waits for it layer by layer."""
        restorer = self.restorer
        if not restorer.num_queued:
            return -1
        with self.compute_stream.entered():
            return restorer.start()

    def check_hicache_events(self) -> None:
        """Top of every scheduling pass: take in completions, finish what no batch picked up."""
        self.take_in()
        self.look_at_queue()
        if self.restorer.num_queued:
            with self.compute_stream.entered():
                self.restorer.run_now()

    @method(answer=nothing)
    def take_in(self) -> None:
        """Completions of all tiers."""
        tiers, disk, exporter = self.tiers, self._disk, self.scheduler.exporter
        if disk is not None and disk.is_busy and not self.scheduler.decoding:
            # Threads that read a store would wait 5 ms each time that they need the interpreter.
            time.sleep(0)
        tiers.poll()
        if exporter is not None and exporter.due(time.monotonic()):
            exporter.publish(tiers.levels(), tiers.counts())

    def _forget_queue(self) -> None:
        """Whoever waits is admitted with what is there."""
        for req in self.scheduler.waiting_queue:
            self.waiting.give_up(req)

    @method(_forget_queue, answer=nothing)
    def look_at_queue(self) -> None:
        """What the waiting requests need is fetched and kept."""
        self.waiting.on_schedule_step(self.scheduler.waiting_queue, self.scheduler.decoding)
        self.ahead.restore_waiting(self)

    # -- the waiting queue -----------------------------------------------------------------------

    def is_backuped(self, node: Any) -> bool:
        """Blocks are found by their tokens, whatever the device node knows of them."""
        return True

    def get_last_hash_value(self, node: Any) -> None:
        """SGLang's own stores find pages by a hash; blocks are found by their tokens."""

    def _give_up_one(self, handle: Any, *_: Any, **__: Any) -> None:
        self.waiting.give_up_handle(handle)

    @method(_give_up_one, answer=nothing)
    def prefetch_from_storage(self, handle: Any, *_: Any, **__: Any) -> None:
        """A request was queued, and matched just before."""
        if not self.stopped:
            self.waiting.queued(handle)

    @method(_give_up_one, answer=lambda *_: True)
    def check_prefetch_progress(self, handle: Any) -> bool:
        """False: pass the request over in this pass. SGLang asks in the order of the queue."""
        return self.waiting.ready(handle)

    @method(answer=lambda *_: 0)
    def pop_prefetch_loaded_tokens(self, handle: Any) -> int:
        """Tokens that came from disk for this request, which is the one that is ready."""
        return self.waiting.take_loaded()

    @method(answer=nothing)
    def release_aborted_request(self, handle: Any) -> None:
        """A request is about to leave the queue, or has left it: the next pass sees it
        (`SchedulerQueue.on_schedule_step`)."""

    @method(answer=lambda *_: False)
    def clear_storage_backend(self, ended: Callable[[bool], object] = bool) -> bool:
        """See `Forgetter.clear`."""
        return self.forgetter.clear(ended)

    def release_host_resources(self) -> None:
        """Orderly shutdown."""
        with self.compute_stream.entered():
            self.tiers.close()

    # -- upkeep ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every tier. SGLang calls it when nothing runs, before it clears the pools."""
        if self._is_built:
            self._clear()
        super().reset()

    def forget_saved(self) -> None:
        """The weights changed: nothing saved is valid. Requests may be running, but not in a
        pipeline."""
        self._clear()
        if self._disk is not None:
            self._disk.disown()

    def _clear(self) -> None:
        if self.audit is not None:
            self.audit.clear()
        self.prerestored.release()
        with self.compute_stream.entered():
            self.tiers.clear()

    def stats(self) -> dict[str, object]:
        """Plain numbers for /server_info."""
        return self.tiers.stats()

    def sanity_check(self) -> None:
        """Asked by SGLang's idle checks."""
        self.tiers.check_integrity()
