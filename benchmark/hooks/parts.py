"""What the workloads share: tiers of a toy model, and how a time is taken."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_hc.capture.capture import Capture
from sglang_hc.capture.direct import DirectRows
from sglang_hc.capture.saving import DeviceState, HiddenPath
from sglang_hc.capture.snapshots import Snapshots
from sglang_hc.capture.taps import TapBuffer
from sglang_hc.device.copy_stream import HostCopyStream
from sglang_hc.device.exactness import Exactness
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.policy.eviction import EvictionPolicy, LruPolicy, make_policy
from sglang_hc.policy.pins import RetentionPriority, SessionPins
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.queue.queue_view import QueueRules, QueueView
from sglang_hc.restore.path import RestorePath
from sglang_hc.restore.prerestored import PrerestoredBlocks
from sglang_hc.restore.staging import StagingRing
from sglang_hc.restore.timed_restorer import TimedRestorer
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.srt.model.weight_versions import WeightVersions
from sglang_hc.srt.ranks.start_group import StartGroup
from sglang_hc.srt.tree.device_eviction import DeviceOrder
from sglang_hc.srt.tree.device_tree import readable
from sglang_hc.srt.tree.tree_backend import HcRadixCache
from sglang_hc.store.block_io import BlockIo
from sglang_hc.store.executor import ThreadExecutor
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.store.scatter_queue import ScatterQueue
from sglang_hc.tiers.retention import Retention
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.block_tree import BlockNode, BlockTree
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import BLOCK_BYTES, Prefix

CPU = torch.device("cpu")


def tiers_of(
    slots: int, disk: BlockIo | None = None, *, by_queue: bool = False, ready_first: bool = False
) -> Tiers:
    """Real parts, a layer of 8 bytes a token, kept as hidden states. by_queue: the host tier and
    the disk evict what no waiting request needs."""
    plan = LayerPlan(0, 1, 0)
    layout = BlockLayout(plan, StateShape(1, 8, (8, 8), "float32"))
    window = LookAhead()
    pins = SessionPins.sized_for(slots)
    priority = RetentionPriority(window, pins)
    policy: EvictionPolicy[BlockNode] = LruPolicy()
    if by_queue:
        policy = make_policy("queue", window, pinned=pins)
    host = HostTier(BlockTree(layout.fingerprint("benchmark")), slots, policy)
    below = LowerTier(disk, host) if disk is not None else None
    pool = HostPool(layout, slots)
    buffers = list(np.zeros((2, 1, 64, 8), dtype=np.uint8))
    scatters = ScatterQueue(ThreadExecutor(pool, buffers), host)
    copy_stream = HostCopyStream()
    device: Any = None  # nothing is restored or gathered from the device here
    taps = TapBuffer(1, 64, 2, torch.float32, CPU)
    snapshots = Snapshots(buffers, None, copy_stream, scatters)
    hidden = HiddenPath(snapshots, DirectRows([pool.hidden], copy_stream, scatters, None))
    source = DeviceState(device, taps, None, hidden, None)
    capture = Capture(layout, host, scatters, source, on_ready=lambda node: None)
    counters: Counter[str] = Counter()
    planner = RestorePlanner(None, plan, False, counters)
    path = RestorePath(pool, device, StagingRing.sized_for(layout.shape, CPU, copy_stream))
    restorer = TimedRestorer(host, path, planner, None, counters)
    rules = QueueRules(ready_first=ready_first)
    queue = QueueView(host, below, window, rules, planner, priority if by_queue else None)
    retention = Retention(host, below, pins, priority)
    return Tiers(host, below, capture, restorer, queue, retention, Exactness(True, 0.0))


def cache_over(
    tiers: Tiers, order: DeviceOrder | None = None, scheduler: Any = None
) -> HcRadixCache:
    """The tree of a scheduler, by default one with nobody waiting."""
    params, compute = readable(cache_params(), order), ComputeStream(CPU)
    ahead = PrerestoredBlocks(params.token_to_kv_pool_allocator, tiers.restorer, compute)
    own = scheduler or scheduler_with(0)
    return HcRadixCache(params, tiers, own, compute, ahead, WeightVersions(StartGroup(0, 1)))


def scheduler_with(decoding: int) -> SimpleNamespace:
    """In place of `srt.engine.scheduler.OwnScheduler`: so many decode, nobody waits."""
    return SimpleNamespace(exporter=None, decoding=decoding, waiting_queue=[])


def fill(tiers: Tiers, namespace: str | None, tokens: bytes) -> None:
    """Make the blocks of a path servable without moving bytes."""
    known = tiers.host.tree.match(Prefix(namespace, tokens))
    whole = known.tokens // BLOCK_TOKENS
    node = known.nodes[whole - 1] if whole else tiers.host.tree.root(namespace)
    for at in range(whole * BLOCK_BYTES, len(tokens), BLOCK_BYTES):
        slot = tiers.host.stage(0.0)
        assert slot is not None
        outcome = tiers.host.publish(node, tokens[at : at + BLOCK_BYTES], slot, 0.0)
        if not outcome.created:
            tiers.host.unstage(slot)
        node = outcome.node
        node.ready = True


class FullDevice:
    """An allocator of device slots that has none left."""

    device = CPU

    def available_size(self) -> int:
        return 0

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        """What a tree gives back goes nowhere."""


def cache_params() -> CacheInitParams:
    """Of a tree for full attention."""
    slots: Any = FullDevice()
    return CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=slots,
        page_size=1,
        tree_components=(ComponentType.FULL,),
    )


def stock_cache() -> UnifiedRadixCache:
    """The tree that SGLang builds for such a model."""
    return UnifiedRadixCache(cache_params())


def microseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1000


def summary(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "median_us": round(statistics.median(ordered), 2),
        "p99_us": round(ordered[int(0.99 * len(ordered))], 2),
    }
