"""Assembly for models whose layers do not all have full attention: ends, and what moves them."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

from sglang_hc.capture.direct import DeviceRing, DirectRows
from sglang_hc.capture.states import StateCapture
from sglang_hc.config import HcConfig
from sglang_hc.device.copy_stream import CopyStream
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, WindowLayers
from sglang_hc.policy.cost_model import CostModel
from sglang_hc.policy.eviction import EvictionPolicy, make_policy
from sglang_hc.policy.pins import SessionPins
from sglang_hc.policy.soft_retention import SoftRetention
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.ranks.agreement import Ranks
from sglang_hc.restore.path import EndPath
from sglang_hc.restore.states import StateRestorer
from sglang_hc.srt.model.state_pool import StatePool
from sglang_hc.srt.model.window_pool import WindowPool
from sglang_hc.srt.tree.states import TreeStates
from sglang_hc.store.host_memory import HostMemory
from sglang_hc.store.scatter_queue import ScatterQueue
from sglang_hc.tiers.tiers import States, Tiers
from sglang_hc.tree.ends import End, Ends
from sglang_hc.tree.host_tier import HostTier

logger = logging.getLogger(__name__)

STATES_UNDER_WAY = 2
"""States that pass through the device memory of their own on their way to the host."""


def ends_of(
    config: HcConfig, memory: HostMemory, host: HostTier, window: LookAhead, pins: SessionPins,
    soft: SoftRetention,
) -> Ends | None:  # fmt: skip
    """Where paths can be continued; None where all layers have full attention."""
    pool = memory.ends
    if pool is None:
        return None
    size = pool.layout.slot_bytes
    logger.info("sglang-hc: %d slots of %.3g MiB for ends", pool.num_slots, size / 2**20)
    name = "lru" if config.eviction == "lru" else "queue"
    policy: EvictionPolicy[End] = make_policy(name, window, pins, soft)
    return Ends(pool.layout, pool.num_slots, host, policy, window.next_use)


def end_tokens(layout: BlockLayout) -> float:
    """Tokens whose blocks are as large as what comes back at one end: states of recurrent layers,
    or windows."""
    ends = layout.ends
    if ends is None:
        return 0.0
    states = len(ends.state.layers) * ends.state_chunk_bytes
    windows = len(ends.window.layers) * ends.window.tokens * sum(ends.window.parts)
    return (states + windows) * BLOCK_TOKENS / layout.slot_bytes


def of_full_layers(
    cost: CostModel | None, full: int, windows: WindowLayers, row: float
) -> CostModel | None:
    """`cost` for the `full` layers with full attention of a model, each of which takes its share of
    those with windows with it. row: bytes of a token in one of them, over those of the layer that
    was measured."""
    if cost is None:
        return None
    count = len(windows.layers)
    share, prefill = 1 + count / full, cost.prefill
    prefill = replace(
        prefill.of_layers(share),
        per_pair=prefill.per_pair * share,
        per_context=prefill.per_context * share,
        window=windows.tokens,
        windowed=count / (full + count),
    )
    copies = cost.copies
    if row != 1:
        copies = {tier: replace(one, kv=one.kv.of_bytes(row)) for tier, one in copies.items()}
    return replace(cost, prefill=prefill, copies=copies, weights=cost.weights * share)


def end_path(windows: WindowPool | None, memory: HostMemory) -> EndPath | None:
    """What rows of sliding windows pass through; None without them."""
    if memory.ends is None or windows is None:
        return None
    return EndPath(memory.ends, windows.rows, windows.numbers(memory.pool.layout.draft.count))


def states_of(
    pool: StatePool | None, memory: HostMemory, host: HostTier, ends: Ends | None,
    scatters: ScatterQueue, copies: CopyStream, counters: Counter[str], ranks: Ranks,
) -> States | None:  # fmt: skip
    """What moves states of recurrent layers; None without them."""
    parts = memory.ends
    if pool is None or parts is None or ends is None:
        return None
    ring = None
    if pool.device.type == "cuda":
        ring = DeviceRing(STATES_UNDER_WAY * parts.layout.slot_bytes, pool.device)
    rows = DirectRows(parts.state, copies.opposite(), scatters, ring)
    return States(
        StateCapture(host, ends, rows, scatters),
        StateRestorer(ends, parts.state, pool, copies, counters, ranks),
    )


def tree_states(pool: StatePool | None, tiers: Tiers) -> TreeStates | None:
    """The same, for SGLang's tree."""
    if pool is None or tiers.ends is None or tiers.states is None:
        return None
    return TreeStates(pool, tiers.ends, tiers.states)
