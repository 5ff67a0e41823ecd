"""Builds the tree and the tiers below it for one scheduler process."""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang_hc.capture.capture import Capture
from sglang_hc.capture.saving import save_path
from sglang_hc.capture.snapshots import Filing
from sglang_hc.config import GIB, ConfigError, HcConfig, read_buffer_bytes
from sglang_hc.device.copy_stream import Lane, Side, lane_for
from sglang_hc.device.exactness import Exactness
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, StateShape
from sglang_hc.policy.pins import RetentionPriority, TimeToLive
from sglang_hc.queue.lookahead import QueueView
from sglang_hc.restore.read_buffer import ReadBuffer, frames_for
from sglang_hc.srt import plugin
from sglang_hc.srt.capture_memory import SNAPSHOT_BUFFERS, CaptureMemory
from sglang_hc.srt.device_eviction import DeviceOrder
from sglang_hc.srt.gathering import fastest_gather
from sglang_hc.srt.kv_pool import KvPoolRows, UnsupportedPool
from sglang_hc.srt.model.identity import model_identity
from sglang_hc.srt.model.projection import fastest_projection, fastest_stream
from sglang_hc.srt.model.recompute import (
    LayerRecomputer,
    Pieces,
    cannot_recompute,
    compare_pieces,
    not_exact,
    recompute_excluded,
)
from sglang_hc.srt.recorded_tree import recorder_for, tree_over
from sglang_hc.srt.replicas import directories, host_share, replica_of
from sglang_hc.srt.runner import MODEL_STATE, ModelState
from sglang_hc.srt.server_args import config_of
from sglang_hc.srt.storage_backends import with_remote
from sglang_hc.srt.streams import ComputeStream
from sglang_hc.srt.tree_backend import HcRadixCache
from sglang_hc.store.disk import DirectoryError
from sglang_hc.store.disk_tier import DiskTier
from sglang_hc.store.host_memory import PAGE_SETTING, MemorySpec, page_setting
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.process.messages import DiskSpec
from sglang_hc.store.process.opening import Io, open_io
from sglang_hc.tiers.recording import host_tier
from sglang_hc.tiers.retention import Retention, pins_for
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.block_tree import BlockNode, BlockTree

logger = logging.getLogger(__name__)


def build_tree_cache(ctx: Any) -> HcRadixCache:
    """The factory SGLang calls for `--radix-cache-backend hc`."""
    missing = plugin.missing()
    if missing:
        raise ConfigError(f"sglang-hc is not in place in this process: {', '.join(missing)}")
    config = config_of(ctx.server_args)
    runner = ctx.tp_worker.model_runner
    state: ModelState | None = getattr(runner, MODEL_STATE, None)
    if config is None or state is None:
        raise ConfigError(
            "the radix cache backend hc needs sglang-hc's own options; start the server with "
            "python -m sglang_hc.launch_server"
        )
    for wrong, what in (
        (ctx.is_hybrid_swa, "models with sliding-window layers"),
        (ctx.is_hybrid_ssm, "models with recurrent (Mamba) layers"),
        (ctx.is_dsa, "models with sparse-attention indexes"),
    ):
        if wrong:
            raise ConfigError(
                f"sglang-hc does not support {what} yet: part of their state is outside the KV "
                "pool. Add --hc-disable to serve without the tiers"
            )
    try:
        rows = KvPoolRows(runner.token_to_kv_pool, state.layers)
        part_bytes = rows.part_bytes
    except UnsupportedPool as error:
        raise ConfigError(f"{error}. Add --hc-disable to serve without the tiers") from None
    allocator = ctx.params.token_to_kv_pool_allocator
    recomputer, pieces = _recomputer(config, runner, state, rows, allocator)
    if rows.device.type == "cuda" and state.layers is not None:
        rows.project = fastest_projection(runner, state.layers, allocator)
    if state.memory.ring is not None and state.plan.kv:
        rows.read = fastest_gather(rows, state.plan.kv_layers, allocator, state.memory.ring)
    exactness = _exactness(config, state, pieces)
    tiers = _tiers(config, runner, state, rows, part_bytes, recomputer, exactness)
    order = _device_order(config, ctx.params, tiers)
    cache = tree_over(ctx.params, tiers, ComputeStream.of(runner), order)
    runner.token_to_kv_pool.register_layer_transfer_counter(tiers.gate)
    ctx.tp_worker.register_hicache_layer_transfer_counter(tiers.gate)
    state.tree = cache
    return cache


def _device_order(config: Any, params: Any, tiers: Tiers) -> DeviceOrder | None:
    """The queue's order for the device, unless another one is asked for on either side."""
    if config.eviction != "queue" or params.eviction_policy.lower() != "lru":
        return None
    assert tiers.retention is not None
    retention = tiers.retention
    return DeviceOrder(tiers.host.tree.fingerprint, retention.priority, retention.keeps)


def _recomputer(
    config: HcConfig, runner: Any, state: ModelState, rows: KvPoolRows, allocator: Any
) -> tuple[LayerRecomputer | None, Pieces | None]:
    """Runs the model's first layers, and what was measured of it; None where it cannot, or where
    --hc-exact demands more than was proven, and no layer of the plan asks for it."""
    planned = bool(state.plan.recompute)
    reason = recompute_excluded(runner.server_args, type(runner.model).__name__)
    if reason is None:
        recomputer = LayerRecomputer(runner, state.memory.taps)
        count = 2 * max(allocator.page_size, 16)
        slots = allocator.alloc(count)
        if slots is None:
            reason = f"the KV pool holds fewer than the {count} tokens of the self-check"
        else:
            layers = rows.num_layers if config.exact else min(2, rows.num_layers)
            pieces = compare_pieces(recomputer, rows, slots, runner.kv_cache_dtype, layers)
            allocator.free(slots)
            reason = pieces.wrong
            if reason is None and config.exact and not pieces.bit:
                why = f"a prefill and decode steps differ by {pieces.difference:.1e}"
                if planned:
                    raise ConfigError(not_exact(config.forms, "recomputed layers", why))
                logger.info("sglang-hc: --hc-exact: no layer is recomputed: %s", why)
                return None, None
            if reason is None:
                return recomputer, pieces
        logger.error("sglang-hc: self-check failed, no layer is recomputed: %s", reason)
    if planned:
        raise ConfigError(cannot_recompute(config.forms, reason))
    return None, None


def _exactness(config: HcConfig, state: ModelState, pieces: Pieces | None) -> Exactness:
    """Of everything that a restoration of this server may bring back; KV form is a copy."""
    found = [(True, 0.0)]
    if state.plan.hidden:
        assert state.proof is not None
        found.append((state.proof.wrong is None, state.proof.difference))
    chosen = state.cost is not None and config.restore == "cost"  # then more may be recomputed
    if pieces is not None and (state.plan.recompute or chosen):
        found.append((pieces.bit, pieces.difference))
    exactness = Exactness(all(bit for bit, _ in found), max(error for _, error in found))
    word, error = exactness.stats().values()
    logger.info(
        "sglang-hc: exactness of what is restored: %s, measured difference at most %.1e",
        word,
        error,
    )
    return exactness


def _tiers(
    config: Any,
    runner: Any,
    state: ModelState,
    rows: KvPoolRows,
    part_bytes: tuple[int, ...],
    recomputer: LayerRecomputer | None,
    exactness: Exactness,
) -> Tiers:
    dtype = str(runner.dtype).removeprefix("torch.")
    hidden_bytes = 0
    if state.memory.taps is not None:
        hidden_bytes = state.memory.taps.row_bytes
    shape = StateShape(rows.num_layers, hidden_bytes, part_bytes, dtype)
    layout = BlockLayout(state.plan, shape)
    size = host_share(config, replica_of(runner))
    num_slots = size // layout.slot_bytes
    if num_slots < 1:
        raise ConfigError(
            f"--hc-host-size-gb leaves {size / GIB:.3g} GiB for each replica and holds no block; "
            f"one block of this model takes {layout.slot_bytes / GIB:.3g} GiB"
        )
    fingerprint = layout.fingerprint(*model_identity(runner), *_product(config, state))
    recorder = recorder_for(config, runner, layout, num_slots, fingerprint)
    pins = pins_for(num_slots)
    ttl: TimeToLive[BlockNode] | None = TimeToLive(config.ttl) if config.ttl else None
    blocks = BlockTree(fingerprint)
    window, tier = host_tier(config.eviction, blocks, num_slots, recorder, pins, ttl)
    priority = RetentionPriority(window, pins)
    io = _open_io(config, runner, state.memory, layout, num_slots, fingerprint)
    pool = io.memory.pool
    lane = lane_for(rows.device, [runner.forward_stream, *state.memory.streams])
    saving = lane.opposite()
    lane.pin(pool.buffer, layout.slot_bytes)
    hidden_buffers, kv_buffers = io.memory.hidden_buffers, io.memory.kv_buffers
    filing = Filing(io.executor)
    hidden = kv = None
    memory = state.memory
    if state.plan.hidden:
        hidden = save_path(
            "hidden", hidden_buffers, 0, pool, saving, filing, memory.ring, memory.twins
        )
    if state.plan.kv:
        first = len(hidden_buffers)
        kv = save_path("kv", kv_buffers, first, pool, saving, filing, memory.ring, None)
    capture = Capture(layout, tier, filing, hidden, kv, rows, time.monotonic)
    logger.info(
        "sglang-hc: layer plan %s, host tier of %.2f GiB: %d blocks, %d tokens",
        state.plan,
        num_slots * layout.slot_bytes / GIB,
        num_slots,
        num_slots * BLOCK_TOKENS,
    )
    below = io.blocks
    if config.remote is not None:
        below = with_remote(below, config, pool, fingerprint)
    disk = DiskTier(below, tier) if below is not None else None
    sizes = (num_slots, disk.capacity if disk is not None else 0)
    eviction_hints = priority if config.eviction == "queue" else None
    ready_first = config.schedule == "ready-first"
    queue = QueueView(
        tier, disk, window, sizes, config.prefetch, eviction_hints, ready_first=ready_first
    )
    return Tiers(
        layout,
        tier,
        pool,
        capture,
        filing,
        rows,
        lane,
        rows.device,
        state.memory.taps,
        disk,
        queue,
        recomputer,
        read_buffer=_read_buffer(config, state, layout, tier, pool, lane, rows.device, queue),
        cost=state.cost,
        always=config.restore == "always",
        side=_side(runner, state, lane, shape, rows),
        retention=Retention(tier, disk, pins, priority),
        exactness=exactness,
    )


def _product(config: HcConfig, state: ModelState) -> list[str]:
    """Part of a block's identity where bit identity is demanded: hidden states that another
    product made K and V of do not give those bits here."""
    if not config.exact or not state.plan.hidden:
        return []
    assert state.proof is not None
    return [f"exact {state.proof.digest}"]


def _side(
    runner: Any, state: ModelState, lane: Lane, shape: StateShape, rows: KvPoolRows
) -> Side | None:
    """Where restorations run: beside the compute stream only where that was measured faster."""
    if rows.device.type != "cuda" or state.layers is None:
        return None
    return fastest_stream(state.layers, runner.token_to_kv_pool_allocator, lane, shape, rows)


def _read_buffer(
    config: Any,
    state: ModelState,
    layout: BlockLayout,
    tier: Any,
    pool: HostPool,
    lane: Lane,
    device: Any,
    queue: QueueView,
) -> ReadBuffer | None:
    size = read_buffer_bytes(config, on_gpu=device.type == "cuda")
    if not size:
        return None
    try:
        frames = frames_for(size, layout, device, lane)
    except RuntimeError as error:  # torch's out of memory, on any device
        raise ConfigError(
            f"--hc-read-buffer-gb {size / GIB:.3g} does not fit beside the KV pool; give less, 0 "
            f"for none, or lower --mem-fraction-static ({error})"
        ) from None
    return ReadBuffer(layout, tier, pool, lane, frames, state.cost, queue.fetching)


def _open_io(
    config: HcConfig,
    runner: Any,
    capture: CaptureMemory,
    layout: BlockLayout,
    num_slots: int,
    fingerprint: bytes,
) -> Io:
    """Host memory, executor and disk. The I/O process is started here and not by the launcher,
    because only now the sizes are known; see docs/decisions/io-process.md."""
    plan = layout.plan
    memory = MemorySpec(
        layout,
        num_slots,
        capture.sizes.snapshot_rows,
        SNAPSHOT_BUFFERS if plan.hidden else 0,
        SNAPSHOT_BUFFERS if plan.kv and capture.ring is None else 0,
    )
    disk = None
    if config.disk:
        label = str(runner.server_args.served_model_name or runner.server_args.model_path)
        scrub = int(config.scrub_mb_s * 1e6)
        folders = directories(config, replica_of(runner))
        disk = DiskSpec(folders, fingerprint, label, scrub, config.ttl or None)
    try:
        io = open_io(config.io, memory, disk)
    except DirectoryError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"--hc-io {config.io}: {error}") from None
    if disk is not None:
        paths = ", ".join(directory.path for directory in disk.directories)
        logger.info("sglang-hc: disk tier in %s", paths)
        if config.io == "process" and page_setting() in ("never", "deny"):
            logger.info(
                "sglang-hc: the disk is read and written faster when shared memory may come in "
                "huge pages: as root, echo advise > %s, and start again",
                PAGE_SETTING,
            )
    return io
