"""The radix tree SGLang talks to: its own device tree, with the tiers below.

What leaves the device stays findable in the host tier by its tokens. A request that matches further
there than on the device gets slots allocated and inserted into the device tree at admission; their
content arrives layer by layer while the request's own tokens are prefilled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)

from sglang_hc.policy.restore_plan import Reason
from sglang_hc.restore.prerestored import PrerestoredBlocks
from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.guard import SglangMethod, method, nothing
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.engine.scheduler import OwnScheduler
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.srt.model.weight_versions import Models, WeightVersions
from sglang_hc.srt.requests.images import KnownImages
from sglang_hc.srt.requests.namespaces import keeps_state, leave_version
from sglang_hc.srt.requests.scheduler_queue import SchedulerQueue
from sglang_hc.srt.tree.ahead import RestoreAhead, restorable
from sglang_hc.srt.tree.audit import Audit
from sglang_hc.srt.tree.audit_room import Freed
from sglang_hc.srt.tree.events import Events
from sglang_hc.srt.tree.facades import ControllerFacade, HostPoolFacade
from sglang_hc.srt.tree.host_match import HostMatch
from sglang_hc.srt.tree.reporting import Reporting
from sglang_hc.srt.tree.restoring_tree import RestoringTree
from sglang_hc.srt.tree.states import TreeStates
from sglang_hc.tiers.forgetting import Forgetter
from sglang_hc.tiers.tiers import Tiers

OTHER_STORES = "the tiers are those of --hc-disk and --hc-remote until the server is started again"


class HcRadixCache(RestoringTree):
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
        weights: WeightVersions,
        audit: Audit | None = None,
        states: TreeStates | None = None,
        events: Events | None = None,
        images: KnownImages | None = None,
    ) -> None:
        """compute: where the model runs. prerestored: told of the end of each meeting. weights:
        that it has. audit: of what is restored; None for none. states: of recurrent layers; None
        without them. events: for routers; None where nobody is told. images: None where none are
        kept."""
        super().__init__(params)
        self.weights, self._keeps_host = weights, False
        self.events, self.images = events, images
        if events is not None:
            self.tree_core.kv_events = events.recorder
        layout = tiers.layout
        self.tiers = tiers
        self.decides_alone = tiers.decides_alone
        self.capture, self.restorer = tiers.capture, tiers.restorer
        self.meetings, self._disk = tiers.meetings, tiers.disk
        self._lag, self.states = layout.draft.lag, states
        self.ends = layout.ends if states is None else None
        self._recorder, self.audit, self._away = tiers.recorder, audit, tiers.away
        self.scheduler = scheduler
        self.compute_stream = compute
        self._numbers = count()
        self.token_to_kv_pool_host = HostPoolFacade(tiers.host)
        if self._disk is not None:
            shown = ControllerFacade(self.token_to_kv_pool_host, self._disk.name)
            self.cache_controller = shown
        self.host_match = HostMatch(tiers.host, layout, tiers.ends)
        self.waiting = SchedulerQueue(tiers.queue, self.has, tiers.recorder)
        self.prerestored, planner = prerestored, self.restorer.planner
        self.ahead = RestoreAhead(
            prerestored, self.meetings, self.waiting, planner, self.host_match
        )
        self.forgetter = Forgetter(self._disk)
        self.reporting = Reporting(tiers, scheduler, self.metrics_collector, weights)
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
        if not keeps_state(params.req):  # nor is what is kept its state
            return result
        key, on_device = params.key, result.device_prefix_len
        if len(key) - on_device < self.page_size:
            return result
        node = self.node(result.last_device_node)
        usable = self.host_match.tokens(params.req, key, node, on_device)
        if self.states is not None:
            result = self.states.track_branch(self, result, self.host_match.last_block_end)
        hit = (usable - on_device) // self.page_size * self.page_size
        if hit <= 0:
            return result
        windows = min(self.kept, on_device + hit)
        if windows and not self.has_space_for(windows, len(key) - on_device - hit):
            return result
        return result._replace(host_hit_length=hit, swa_host_hit_length=windows)

    @method(answer=nothing)
    def promise(self, req: Any) -> None:
        """A request is about to be admitted. SGLang takes all of its host hit or nothing of it:
        promise the part that is worth restoring. If none is, `init_load_back` counts why."""
        hit = fields.host_hit(req)
        blocks = self.host_match.blocks(req, fields.prefix_length(req) + hit) if hit else None
        if blocks is not None:
            stop = fields.prefix_length(req) + hit
            whole = self.ends is not None or self.states is not None
            worth = hit if whole else self.ahead.promise(self, req, blocks, stop)
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

    # -- evict -----------------------------------------------------------------------------------

    def evictable_size(self) -> int:
        """Device slots that can be had back."""
        held = self.prerestored.tokens + self._audits.slots
        return held + int(self.tree_core.evictable_size())

    full_evictable_size = evictable_size

    def swa_evictable_size(self) -> int:
        """Second slots that can be had back."""
        return self._audits.windows + int(self.tree_core.swa_evictable_size())

    def mamba_evictable_size(self) -> int:
        """Slots for states that can be had back."""
        return self._audits.states + int(self.tree_core.mamba_evictable_size())

    @property
    def _audits(self) -> Freed:
        """What an audit would give back."""
        return Freed() if self.audit is None else self.audit.held

    @method()
    def evict(self, theirs: SglangMethod, params: EvictParams) -> EvictResult:
        """Free device slots: an audit's, leaves of the tree, then those of prerestored blocks."""
        return self._evict_beside(theirs, params)

    @method()
    def evict_for_alloc(self, theirs: SglangMethod, params: EvictParams) -> EvictResult:
        """As `evict`, of what an allocation lacks."""
        return self._evict_beside(theirs, params)

    def _evict_beside(self, theirs: SglangMethod, params: EvictParams) -> EvictResult:
        freed = Freed() if self.audit is None else self.audit.release()
        params = replace(
            params,
            num_tokens=max(0, params.num_tokens - freed.slots),
            swa_num_tokens=max(0, params.swa_num_tokens - freed.windows),
            mamba_num=max(0, params.mamba_num - freed.states),
        )
        result = theirs(params)
        if result.swa_num_tokens_evicted < params.swa_num_tokens:
            self.give_way(self.scheduler.replying)
        if result.num_tokens_evicted < params.num_tokens:
            result.num_tokens_evicted += self.prerestored.release()
        result.num_tokens_evicted += freed.slots
        result.swa_num_tokens_evicted += freed.windows
        result.mamba_num_evicted += freed.states
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
        self.tiers.fetch_wished()
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

    @method(answer=lambda *_: [])
    def take_events(self) -> list[Any]:
        """KV events go to SGLang's publisher on a thread of their own, so SGLang gets none."""
        if self.events is not None:
            self.events.hand_over(self.scheduler.event_publisher, self.nodes())
        return []

    def release_host_resources(self) -> None:
        """Orderly shutdown."""
        if self.events is not None:
            self.events.close()
        with self.compute_stream.entered():
            self.tiers.close()

    # -- upkeep ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every tier. SGLang calls it when nothing runs, before it clears the pools. A
        flush of new weights is of the device alone: below it their namespaces are others."""
        if self._is_built and not self._keeps_host:
            self._let_go()
            with self.compute_stream.entered():
                self.tiers.clear()
        super().reset()

    @contextmanager
    def weights_change(self, models: Models) -> Iterator[None]:
        """The weights of these models change. Requests may be running, but not in a pipeline. Until
        `weights_settled` nothing is saved or restored."""
        self.weights.change(models)
        self._begin_version()
        self._keeps_host = True
        try:
            yield
        finally:
            self._keeps_host = False

    def weights_settled(self) -> None:
        """The weights do not change any more. Of all ranks of the model at once."""
        self.weights.settled()
        self._begin_version()
        self.tiers.end_pins_of_others(self.weights.name)

    def _begin_version(self) -> None:
        """State of now is of no version that was before."""
        self._let_go()
        with self.compute_stream.entered():
            self.tiers.begin_version(self.weights.made)
        met, _ = self.meetings.current
        if met is not None:
            self.meetings.end(met)
        for req in self.scheduler.requests:
            self.waiting.give_up(req)
            self.capture.counters["mixed_requests"] += leave_version(req, self.weights.name)
            if self.events is not None:
                self.events.renamed(req)
        if self.events is not None:
            self.events.begin_anew(self.weights.name)

    def _let_go(self) -> None:
        if self.audit is not None:
            self.audit.clear()
        self.prerestored.release()

    def stats(self) -> dict[str, object]:
        """Plain numbers for /server_info."""
        return self.reporting.stats()

    def sanity_check(self) -> None:
        """Of the device tree and the tiers. Raises AssertionError."""
        super().sanity_check()
        self.tiers.check_integrity()
