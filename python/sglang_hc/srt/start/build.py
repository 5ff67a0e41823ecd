"""Builds the tree and the tiers below it for one scheduler process.

`build_tree_cache` reads top to bottom: what SGLang loaded, the KV pool and what can be recomputed,
sizes, memory, what lies below host memory, the tiers, the tree.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from sglang_hc.capture.capture import Capture
from sglang_hc.capture.direct import DirectRows
from sglang_hc.capture.saving import DeviceState, HiddenPath
from sglang_hc.capture.snapshots import ScatterQueue
from sglang_hc.config import GIB, ConfigError, read_buffer_bytes
from sglang_hc.device.copy_stream import SideStream
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, StateShape
from sglang_hc.policy.cost_correction import CorrectedCosts
from sglang_hc.policy.eviction import make_policy
from sglang_hc.policy.pins import RetentionPriority, SessionPins, TimeToLive
from sglang_hc.queue.lookahead import QueueRules, QueueView
from sglang_hc.ranks.agreement import Ranks
from sglang_hc.restore.cost_watch import CostWatch, timer_for
from sglang_hc.restore.path import RestorePath
from sglang_hc.restore.planner import RestorePlanner
from sglang_hc.restore.read_buffer import ReadBuffer, frames_for
from sglang_hc.restore.restorer import Restorer
from sglang_hc.restore.staging import StagingRing
from sglang_hc.srt.arguments.storage_backends import remote_store
from sglang_hc.srt.engine.guard import counters as own_errors
from sglang_hc.srt.engine.guard import protect
from sglang_hc.srt.engine.scheduler import BUILDING
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.srt.model.capture_memory import SNAPSHOT_BUFFERS
from sglang_hc.srt.model.identity import model_identity
from sglang_hc.srt.model.projection import fastest_stream
from sglang_hc.srt.ranks.replicas import directories, host_share, place_of
from sglang_hc.srt.ranks.verdicts import ranks_of
from sglang_hc.srt.scheduling.speculation import draft_layers
from sglang_hc.srt.start.build_device import Device, Model, device_of, loaded
from sglang_hc.srt.start.recorded_tree import recording
from sglang_hc.srt.start.tier_factories import TierFactories, TierSizes
from sglang_hc.srt.tree.audit import Audit, cannot_audit
from sglang_hc.srt.tree.device_eviction import DeviceOrder
from sglang_hc.srt.tree.tree_backend import HcRadixCache
from sglang_hc.store.block_io import BlockIo
from sglang_hc.store.disk import DirectoryError
from sglang_hc.store.disk.format import WHOLE
from sglang_hc.store.disk_tier import DiskTier, LayerDisk
from sglang_hc.store.host_memory import MemorySpec
from sglang_hc.store.opening import DiskSpec, Io, open_io
from sglang_hc.store.read_watch import not_observed
from sglang_hc.store.remote import Chain, RemoteBlocks
from sglang_hc.store.remote.envelope import fingerprint_of_part
from sglang_hc.tiers.grafts import Grafts
from sglang_hc.tiers.retention import Retention
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.block_tree import BlockNode, BlockTree
from sglang_hc.tree.host_tier import HostTier

logger = logging.getLogger(__name__)


def build_tree_cache(ctx: Any) -> HcRadixCache:
    """The factory SGLang calls for `--radix-cache-backend hc`. Raises ConfigError."""
    model = loaded(ctx)
    device = device_of(model)
    sizes = _sizes(model, device)
    ranks = ranks_of(model.state.group)
    factories = _factories(model, sizes, ranks)
    io = _open_io(model, sizes)
    device.copy_stream.pin(io.memory.pool.buffer)
    tiers = _tiers(model, device, sizes, factories, io, ranks)
    compute = ComputeStream.of(model.runner)
    order = _device_order(model, tiers)
    audit = _audit(model, device, tiers, io, compute)
    tree = factories.tree(model.params, tiers, BUILDING.get(), compute, order, audit)
    model.runner.token_to_kv_pool.register_layer_transfer_counter(tiers.restorer.gate)
    ctx.tp_worker.register_hicache_layer_transfer_counter(tiers.restorer.gate)
    protect(tree)
    return tree


# -- sizes ---------------------------------------------------------------------------------------


def _sizes(model: Model, device: Device) -> TierSizes:
    runner, state, group = model.runner, model.state, model.state.group
    taps = state.memory.taps
    dtype = str(runner.dtype).removeprefix("torch.")
    hidden_bytes = taps.row_bytes if taps is not None else 0
    shape = StateShape(device.pool.num_layers, hidden_bytes, device.pool.part_bytes, dtype)
    draft, drafted = draft_layers(model.draft, model.params.is_eagle, group)
    layout = BlockLayout(state.own_plan, shape, draft)
    size = host_share(model.config, place_of(runner))
    num_slots = group.least(size // layout.slot_bytes)
    if num_slots < 1:
        raise ConfigError(
            f"--hc-host-size-gb leaves {size / GIB:.3g} GiB for each rank and holds no block; "
            f"one block of this model takes {layout.slot_bytes / GIB:.3g} GiB; give more"
        )
    logger.info(
        "sglang-hc: layer plan %s, host tier of %.2f GiB: %d blocks, %d tokens",
        state.plan,
        num_slots * layout.slot_bytes / GIB,
        num_slots,
        num_slots * BLOCK_TOKENS,
    )
    own = layout.fingerprint(*model_identity(runner, group), *_product(model), *drafted)
    return TierSizes(layout, num_slots, bytes.fromhex(group.digest(own.hex())))


def _product(model: Model) -> list[str]:
    """Part of a block's identity where bit identity is demanded: hidden states that another
    product made K and V of do not give those bits here."""
    if not model.config.exact or not model.state.plan.hidden:
        return []
    assert model.state.proof is not None
    return [f"exact {model.state.proof.digest}"]


def _factories(model: Model, sizes: TierSizes, ranks: Ranks) -> TierFactories:
    if model.config.trace is None:
        return TierFactories()
    return recording(model.config, model.runner, sizes, ranks.clock)


# -- memory and what lies below it ---------------------------------------------------------------


def _open_io(model: Model, sizes: TierSizes) -> Io:
    """Host memory, executor and disk."""
    config, runner, capture = model.config, model.runner, model.state.memory
    snapshots = SNAPSHOT_BUFFERS if sizes.layout.plan.hidden else 0
    rows = capture.sizes.snapshot_rows
    memory = MemorySpec(sizes.layout, sizes.num_slots, rows, snapshots)
    disk = None
    if config.disk:
        label = str(runner.server_args.served_model_name or runner.server_args.model_path)
        place = place_of(runner)
        part = fingerprint_of_part(sizes.fingerprint, place.part) if place.part else WHOLE
        folders = directories(config, place)
        disk = DiskSpec(folders, sizes.fingerprint, label, part, config.ttl or None)
    try:
        io = open_io(memory, disk)
    except DirectoryError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"--hc-host-size-gb, --hc-disk: {error}") from None
    if disk is not None:
        paths = ", ".join(directory.path for directory in disk.directories)
        logger.info("sglang-hc: disk tier in %s", paths)
    return io


# -- tiers ---------------------------------------------------------------------------------------


def _tiers(
    model: Model, device: Device, sizes: TierSizes, factories: TierFactories, io: Io, ranks: Ranks
) -> Tiers:
    config, state, copy_stream = model.config, model.state, device.copy_stream
    counters = io.counts
    costs = CorrectedCosts(state.cost) if state.cost is not None else None
    watch = None
    # What one rank sees corrects no costs of several: they must decide alike. Reads are seen alike.
    if costs is not None and ranks.count == 1:
        watch = CostWatch(costs, state.plan, timer_for(copy_stream), copy_stream)
    whole_pages = BLOCK_TOKENS % model.runner.server_args.page_size == 0  # in the slots of a block
    planner = RestorePlanner(
        costs,
        state.plan,
        device.recomputer is not None and not state.has_stages,
        counters,
        ranks.clock,
        always=config.restore == "always",
        as_they_come=whole_pages,
    )
    pins = SessionPins.sized_for(sizes.num_slots)
    ttl: TimeToLive[BlockNode] | None = TimeToLive(config.ttl) if config.ttl else None
    window = factories.window()
    policy = make_policy(config.eviction, window, pinned=pins)
    host = factories.host(BlockTree(sizes.fingerprint), sizes.num_slots, policy, ttl)
    disk = _disk(model, sizes, io, host, planner, ranks)
    priority = RetentionPriority(window, pins)
    executor = ranks.executor(io.executor)
    scatters = ScatterQueue(executor, host, points_too=ranks.count > 1)
    mover = None
    if device.rotation is not None:
        mover = Grafts(host, disk, scatters, counters, ranks.clock)
    queue = QueueView(
        host,
        disk,
        window,
        QueueRules(config.prefetch, config.schedule == "ready-first", _can_meet(model, device)),
        planner,
        priority if config.eviction == "queue" else None,
        mover,
    )
    path = RestorePath(
        io.memory.pool,
        device.pool,
        StagingRing.sized_for(
            sizes.layout.shape, device.pool.device, copy_stream, model.runner.ps.tp_size > 1
        ),
        device.recomputer,
        _read_buffer(model, device, io, host, queue, ranks),
        _side_stream(model, device, sizes.layout.shape),
        device.rotation,
    )
    return Tiers(
        host,
        disk,
        _capture(model, device, io, host, disk, scatters, ranks),
        Restorer(host, path, planner, watch, counters, ranks),
        queue,
        Retention(host, disk, pins, priority, ranks.clock),
        device.exactness,
        ranks,
        own_errors,
    )


def _can_meet(model: Model, device: Device) -> bool:
    """Prompts come in chunks, and where bits count a prefill was proven to make those of decoding:
    what is stored of the end of a history may have any computed front before it then. Not tested
    with the stages of a pipeline."""
    if model.draft is not None or model.state.has_stages:
        return False
    chunked = (model.runner.server_args.chunked_prefill_size or 0) > 0
    return chunked and (device.recomputer is not None or not model.config.exact)


def _disk(
    model: Model,
    sizes: TierSizes,
    io: Io,
    host: HostTier,
    planner: RestorePlanner,
    ranks: Ranks,
) -> DiskTier | None:
    """What lies below the host tier: disk, a remote store, both, or nothing."""
    below: BlockIo | None = None
    layers = None
    if io.blocks is not None:
        below = ranks.blocks(io.blocks, model.state.group.least(io.blocks.capacity))
        if ranks.count == 1:  # several would have to agree on each layer
            layers = LayerDisk(io.blocks, sizes.layout.stored_layers)
    if model.config.remote is not None:
        part = fingerprint_of_part(sizes.fingerprint, place_of(model.runner).part)
        store = remote_store(model.config, io.memory.pool, part, io.counts)
        far = RemoteBlocks(ranks.store(store), io.counts, ranks.clock)
        below = far if below is None else Chain(below, far)
    if below is None:
        return None
    costs, seconds = planner.costs, planner.block_read_seconds
    on_read = partial(costs.observe_read, planner.plan) if costs is not None else not_observed
    return DiskTier(below, host, ranks.clock, on_read, ranks.pause, seconds, layers)


def _capture(
    model: Model,
    device: Device,
    io: Io,
    host: HostTier,
    disk: DiskTier | None,
    scatters: ScatterQueue,
    ranks: Ranks,
) -> Capture:
    """Saving copies in the opposite direction of restoring; a GPU does both at the same time."""
    taken, pool, copies = model.state.memory, io.memory.pool, device.copy_stream.opposite()
    hidden = kv = None
    if pool.layout.plan.hidden:
        snapshots = io.memory.snapshots
        hidden = HiddenPath(pool, snapshots, taken.twins, copies, scatters, taken.ring)
    if pool.layout.kv_layers:
        kv = DirectRows(pool.kv, copies, scatters, taken.ring)
    state = DeviceState(device.pool, taken.taps, taken.verified, hidden, kv)
    on_ready = disk.spill if disk is not None else lambda node: None
    return Capture(pool.layout, host, scatters, state, on_ready, ranks.clock)


def _side_stream(model: Model, device: Device, shape: StateShape) -> SideStream | None:
    """Where restorations run: beside the compute stream only where that was measured faster. Ranks
    gather hidden states in the order of the model's own collectives, so in its stream."""
    layers, pool = model.state.layers, device.pool
    if pool.device.type != "cuda" or layers is None or model.state.group.size > 1:
        return None
    return fastest_stream(layers, model.allocator, device.copy_stream, shape, pool)


def _read_buffer(
    model: Model, device: Device, io: Io, host: HostTier, queue: QueueView, ranks: Ranks
) -> ReadBuffer | None:
    size = read_buffer_bytes(model.config, on_gpu=device.pool.device.type == "cuda")
    # What it holds is pinned. Stages, whose layers differ in size, would not pin the same blocks.
    if not size or model.state.has_stages:
        return None
    try:
        frames = frames_for(size, io.memory.pool.layout, device.pool.device, device.copy_stream)
    except RuntimeError as error:  # torch's out of memory, on any device
        raise ConfigError(
            f"--hc-read-buffer-gb {size / GIB:.3g} does not fit beside the KV pool; give less, 0 "
            f"for none, or lower --mem-fraction-static ({error})"
        ) from None
    pool, cost = io.memory.pool, model.state.cost
    return ReadBuffer(host, pool, frames, cost, queue.requests.is_fetching, ranks)


# -- tree ----------------------------------------------------------------------------------------


def _device_order(model: Model, tiers: Tiers) -> DeviceOrder | None:
    """The queue's order for the device, unless another one is asked for on either side."""
    if model.config.eviction != "queue" or model.params.eviction_policy.lower() != "lru":
        return None
    retention = tiers.retention
    return DeviceOrder(tiers.host.tree.fingerprint, retention.priority, retention.keeps)


def _audit(
    model: Model, device: Device, tiers: Tiers, io: Io, compute: ComputeStream
) -> Audit | None:
    """Audits of what is restored; None where there are none, which the log explains."""
    share, runner, taps = model.config.audit, model.runner, model.state.memory.taps
    if not share:
        return None
    reason = cannot_audit(runner, taps, model.state.group.size)
    if reason is not None:
        logger.info("sglang-hc: --hc-audit is off: %s", reason)
        return None
    return Audit(tiers, io.memory.pool, device.pool, taps, runner, compute, io.counts, share)
