"""The radix tree SGLang talks to: its own device tree, with the tiers below.

What leaves the device stays findable in the host tier by its tokens. A request that matches further
there than on the device gets slots allocated and inserted into the device tree at admission; their
content arrives layer by layer while the request's own tokens are prefilled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey

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
from sglang_hc.srt.tree.facades import ControllerFacade, HostPoolFacade
from sglang_hc.srt.tree.host_match import HostMatch
from sglang_hc.srt.tree.reporting import Reporting
from sglang_hc.tiers.forgetting import Forgetter
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.block_tree import BlockNode

REFUSED = "hc_refused"
"""Attribute of a request: the handle under which a refusal was counted; it gets another one when it
is retracted."""

OTHER_STORES = "the tiers are those of --hc-disk and --hc-remote until the server is started again"


class _Restoring(NamedTuple):
    """A restoration that is not over; its node is locked. SGLang's checks ask for `node_id`."""

    node_id: int
    lock: Any


class HcRadixCache(CapturingTree):
    """UnifiedRadixCache whose evicted prefixes come back from the tiers.

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
        audit: Audit | None = None,
    ) -> None:
        """compute: where the model runs. prerestored: told of the end of each meeting. audit:
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
        self._numbers = count()
        self.token_to_kv_pool_host = HostPoolFacade(tiers.host)
        if self._disk is not None:
            shown = ControllerFacade(self.token_to_kv_pool_host, self._disk.name)
            self.cache_controller = shown
        self.host_match = HostMatch(tiers.host, layout)
        self.waiting = SchedulerQueue(tiers.queue, self.has, tiers.recorder)
        self.prerestored, planner = prerestored, self.restorer.planner
        self.ahead = RestoreAhead(
            prerestored, self.meetings, self.waiting, planner, self.host_match
        )
        self.forgetter = Forgetter(self._disk)
        self.reporting = Reporting(tiers, scheduler, self.metrics_collector)
        self._is_built = True

    # -- look up ---------------------------------------------------------------------------------

    @method()
    def match_prefix(self, theirs: SglangMethod, params: MatchPrefixParams) -> MatchResult:
        """Device match, with what the host tier adds for a request in `host_hit_length`."""
        result = self._with_host_hit(self.match(theirs, params), params)
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
        node = self.node(result.last_device_node)
        usable = self.host_match.tokens(params.req, key, node, on_device)
        hit = (usable - on_device) // self.page_size * self.page_size
        return result._replace(host_hit_length=hit) if hit > 0 else result

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
            self._queue(blocks, slots, node, before, plan, missing)
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
            number = next(self._numbers)
            self.ongoing_load_back[number] = _Restoring(node, self.lock(node))
            release = partial(self._restored, number)
            try:
                restorer.queue(restoration, release)
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

    # -- evict -----------------------------------------------------------------------------------

    def evictable_size(self) -> int:
        """Device slots that can be had back."""
        held = self.prerestored.tokens + (self.audit.tokens if self.audit is not None else 0)
        return held + int(self.tree_core.evictable_size())

    full_evictable_size = evictable_size

    @method()
    def evict(self, theirs: SglangMethod, params: EvictParams) -> EvictResult:
        """Free device slots: an audit's, leaves of the tree, then those of prerestored blocks."""
        return self._evict_beside(theirs, params)

    @method()
    def evict_for_alloc(self, theirs: SglangMethod, params: EvictParams) -> EvictResult:
        """As `evict`, of what an allocation lacks."""
        return self._evict_beside(theirs, params)

    def _evict_beside(self, theirs: SglangMethod, params: EvictParams) -> EvictResult:
        freed = self.audit.release() if self.audit is not None else 0
        if freed >= params.num_tokens:
            return EvictResult(num_tokens_evicted=freed)
        result = theirs(replace(params, num_tokens=params.num_tokens - freed))
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
        if self._disk is not None and self._disk.is_busy and not self.scheduler.decoding:
            # Threads that read a store would wait 5 ms each time that they need the interpreter.
            time.sleep(0)
        self.tiers.poll()
        self.reporting.publish()

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

    @method(answer=lambda *_: (0, None))
    def pop_prefetch_loaded_span(self, handle: Any) -> tuple[int, None]:
        """Tokens that came from disk for this request, which is the one that is ready."""
        return self.waiting.take_loaded(), None

    @method(answer=lambda *_: False)
    def clear_storage_backend(self, ended: Callable[[bool], object] = bool) -> bool:
        """See `Forgetter.clear`."""
        return self.forgetter.clear(ended)

    def attach_storage_backend(self, *_: Any, **__: Any) -> tuple[bool, str]:
        """Nor is one taken away: SGLang would tell of no waiting request any more."""
        return False, OTHER_STORES

    detach_storage_backend = attach_storage_backend

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
        return self.reporting.stats()

    def sanity_check(self) -> None:
        """Of the device tree and the tiers. Raises AssertionError."""
        super().sanity_check()
        self.tiers.check_integrity()
