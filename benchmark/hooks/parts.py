"""What the workloads share: tiers of a toy model, and how a time is taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams

from sglang_hc.capture.capture import Capture
from sglang_hc.capture.saving import save_path
from sglang_hc.capture.snapshots import Filing
from sglang_hc.capture.taps import TapBuffer
from sglang_hc.device.copy_stream import HostLane
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.policy.eviction import EvictionPolicy, LruPolicy
from sglang_hc.store.executor import ThreadExecutor
from sglang_hc.store.host_pool import HostPool, SnapshotBuffer
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.block_tree import BLOCK_BYTES, BlockNode, BlockTree
from sglang_hc.tree.host_tier import HostTier

CPU = torch.device("cpu")


def tiers_of(slots: int, policy: EvictionPolicy[BlockNode] | None = None) -> Tiers:
    """Real parts, a layer of 8 bytes a token, kept as hidden states."""
    layout = BlockLayout(LayerPlan(0, 1, 0), StateShape(1, 8, (8, 8), "float32"))
    policy = LruPolicy() if policy is None else policy  # an empty one is falsy
    host = HostTier(BlockTree(layout.fingerprint("benchmark")), slots, policy)
    pool = HostPool(layout, slots)
    buffers = [SnapshotBuffer(layout, 64, hidden=True, kv=False) for _ in range(2)]
    filing = Filing(ThreadExecutor(pool, buffers))
    lane = HostLane()
    hidden = save_path("hidden", buffers, 0, pool, lane, filing)
    device: Any = None  # nothing is restored or gathered from the device here
    capture = Capture(layout, host, filing, hidden, None, device, time.monotonic)
    taps = TapBuffer(1, 64, 2, torch.float32, CPU)
    return Tiers(layout, host, pool, capture, filing, device, lane, CPU, taps)


def fill(tiers: Tiers, namespace: str | None, tokens: bytes) -> None:
    """Make the blocks of a path servable without moving bytes."""
    known = tiers.host.tree.match(namespace, tokens)
    node = known.full_parent or tiers.host.tree.root(namespace)
    first = known.tokens // BLOCK_TOKENS * BLOCK_BYTES
    for at in range(first, len(tokens), BLOCK_BYTES):
        slot = tiers.host.stage(0.0)
        assert slot is not None
        outcome = tiers.host.publish(node, tokens[at : at + BLOCK_BYTES], slot, 0.0)
        if not outcome.created:
            tiers.host.unstage(slot)
        node = outcome.node
        node.ready = True


def cache_params() -> CacheInitParams:
    return CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=None, page_size=1
    )


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
