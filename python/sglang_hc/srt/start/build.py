"""Builds the tree and the tiers below it for one scheduler process.

`build_tree_cache` reads top to bottom: what SGLang loaded, the KV pool and what can be recomputed,
sizes, memory, what lies below host memory, the tiers, the tree.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from sglang_hc.capture.capture import Capture
from sglang_hc.capture.direct import DirectRows
from sglang_hc.capture.saving import DeviceState, HiddenPath
from sglang_hc.capture.snapshots import ScatterQueue, Snapshots
from sglang_hc.config import GIB, ConfigError, shared_directory
from sglang_hc.device.copy_stream import SideStream
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, StateShape
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.eviction import make_policy
from sglang_hc.policy.pins import RetentionPriority, SessionPins, TimeToLive
from sglang_hc.profile_file import CachedProfile
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.queue.queue_view import QueueRules, QueueView
from sglang_hc.queue.requests import Serial
from sglang_hc.ranks.agreement import Ranks
from sglang_hc.restore.cost_observer import CostObserver, timer_for
from sglang_hc.restore.path import RestorePath
from sglang_hc.restore.planner import RestorePlanner
from sglang_hc.restore.restorer import Restorer
from sglang_hc.restore.staging import StagingRing
from sglang_hc.srt.arguments.storage_backends import remote_key, remote_store
from sglang_hc.srt.engine.guard import counters as own_errors
from sglang_hc.srt.engine.guard import protect
from sglang_hc.srt.engine.scheduler import BUILDING, TREE
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.srt.model.capture_memory import SNAPSHOT_BUFFERS
from sglang_hc.srt.model.identity import model_identity
from sglang_hc.srt.model.projection import fastest_stream
from sglang_hc.srt.ranks.decisions import ranks_of
from sglang_hc.srt.ranks.replicas import directories, host_share, place_of
from sglang_hc.srt.scheduling.speculation import draft_layers
from sglang_hc.srt.start.build_device import Device, Model, device_of, loaded
from sglang_hc.srt.start.recorded_tree import RecordedRadixCache, recorder_of
from sglang_hc.srt.start.sizes import TierSizes
from sglang_hc.srt.tree.audit import audit_of
from sglang_hc.srt.tree.device_eviction import DeviceOrder
from sglang_hc.srt.tree.tree_backend import HcRadixCache
from sglang_hc.store.block_io import BlockIo, LocalBlockIo
from sglang_hc.store.chain import Chain
from sglang_hc.store.disk import DirectoryError
from sglang_hc.store.disk.format import part_of
from sglang_hc.store.host_memory import MemorySpec
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.store.opening import DiskSpec, Io, open_directories, open_io
from sglang_hc.store.read_watch import not_observed
from sglang_hc.tiers.mover import BlockMover
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
    recorder = recorder_of(model.config, model.runner, sizes, ranks.clock)
    io = _open_io(model, sizes)
    device.copy_stream.pin(io.memory.pool.buffer)
    tiers = _tiers(model, device, sizes, io, ranks)
    compute = ComputeStream.of(model.runner)
    make = HcRadixCache if recorder is None else partial(RecordedRadixCache, recorder)
    tree = make(model.params, tiers, BUILDING.get(), compute, _device_order(model, tiers))
    tree.audit = audit_of(tree, model.runner, model.config.audit)
    model.runner.token_to_kv_pool.register_layer_transfer_counter(tiers.restorer.gate)
    ctx.tp_worker.register_hicache_layer_transfer_counter(tiers.restorer.gate)
    setattr(model.runner, TREE, tree)
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


# -- memory and what lies below it ---------------------------------------------------------------


def _open_io(model: Model, sizes: TierSizes) -> Io:
    """Host memory, executor and disk."""
    config, capture = model.config, model.state.memory
    snapshots = SNAPSHOT_BUFFERS if sizes.layout.plan.hidden else 0
    rows = capture.sizes.snapshot_rows
    memory = MemorySpec(sizes.layout, sizes.num_slots, rows, snapshots)
    disk = None
    if config.disk:
        disk = _directories(model, sizes, config.disk)
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


def _directories(
    model: Model, sizes: TierSizes, texts: Sequence[str], key: bytes | None = None
) -> DiskSpec:
    """Directories as `--hc-disk` names them, for this rank. Raises DirectoryError."""
    args, place = model.runner.server_args, place_of(model.runner)
    label = str(args.served_model_name or args.model_path)
    part = part_of(sizes.fingerprint, place.part)
    folders, ttl = directories(texts, place), model.config.ttl or None
    return DiskSpec(folders, sizes.fingerprint, label, part, ttl, key)


def _remote_store(model: Model, sizes: TierSizes, io: Io) -> LocalBlockIo:
    """The store of `--hc-remote`. Raises ConfigError."""
    config, pool, shared = model.config, io.memory.pool, shared_directory(model.config)
    spec = _directories(model, sizes, [shared] if shared else [], remote_key(config))
    if shared is None:
        return remote_store(config, pool, spec.model(pool.layout), io.counts)
    try:
        return open_directories(spec, pool, io.counts, SourceTier.REMOTE)
    except DirectoryError as error:
        raise ConfigError(str(error).replace("--hc-disk", "--hc-remote file")) from None


# -- tiers ---------------------------------------------------------------------------------------


def _tiers(model: Model, device: Device, sizes: TierSizes, io: Io, ranks: Ranks) -> Tiers:
    config, state, copy_stream = model.config, model.state, device.copy_stream
    counters = io.counts
    costs, observer = state.cost, None
    # What one rank sees corrects no costs of several: they must decide alike. Reads are seen alike.
    if costs is not None and ranks.count == 1:
        observer = CostObserver(costs, sizes.layout, timer_for(copy_stream), copy_stream)
    # Pages lie in the slots of one block then. Of a draft model rows lie behind their block's.
    alone = BLOCK_TOKENS % model.runner.server_args.page_size == 0 and model.draft is None
    planner = RestorePlanner(
        costs,
        state.plan,
        device.recomputer is not None and not state.has_stages,
        counters,
        ranks.clock,
        always=config.restore == "always",
        as_they_come=alone and not state.has_stages,
    )
    pins = SessionPins.sized_for(sizes.num_slots)
    ttl: TimeToLive[BlockNode] | None = TimeToLive(config.ttl) if config.ttl else None
    window: LookAhead[Serial] = LookAhead()
    policy = make_policy(config.eviction, window, pinned=pins)
    host = HostTier(BlockTree(sizes.fingerprint), sizes.num_slots, policy, ttl)
    disk = _disk(model, sizes, io, host, planner, ranks)
    priority = RetentionPriority(window, pins)
    executor = ranks.executor(io.executor)
    scatters = ScatterQueue(executor, host, points_too=ranks.count > 1)
    mover = None
    if device.rotation is not None:
        mover = BlockMover(host, disk, scatters, counters, ranks.clock)
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
        _side_stream(model, device, sizes.layout.shape),
        device.rotation,
    )
    return Tiers(
        host,
        disk,
        _capture(model, device, io, host, disk, scatters, ranks),
        Restorer(host, path, planner, observer, counters, ranks),
        queue,
        Retention(host, disk, pins, priority, ranks.clock),
        device.exactness,
        ranks,
        own_errors,
        _cached_profile(model),
    )


def _cached_profile(model: Model) -> CachedProfile | None:
    """Rank 0 keeps what it learns; a profile that the user gave stays as it is."""
    cost = model.state.cost
    if cost is None or model.config.profile is not None or model.state.group.rank:
        return None
    return CachedProfile(cost)


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
) -> LowerTier | None:
    """What lies below the host tier: disk, a remote store, both, or nothing."""
    below: BlockIo | None = None
    if io.blocks is not None:
        capacity = model.state.group.least(io.blocks.capacity)
        below = KnownBlocks(ranks.blocks(io.blocks, capacity), ranks.clock)
    if model.config.remote is not None:
        store = _remote_store(model, sizes, io)
        capacity = model.state.group.least(store.capacity)
        far = KnownBlocks(ranks.blocks(store, capacity), ranks.clock)
        below = far if below is None else Chain(below, far)
    if below is None:
        return None
    costs, seconds = planner.costs, planner.block_read_seconds
    on_read = partial(costs.observe_read, planner.plan) if costs is not None else not_observed
    return LowerTier(below, host, ranks.clock, on_read, ranks.pause, seconds)


def _capture(
    model: Model,
    device: Device,
    io: Io,
    host: HostTier,
    disk: LowerTier | None,
    scatters: ScatterQueue,
    ranks: Ranks,
) -> Capture:
    """Saving copies in the opposite direction of restoring; a GPU does both at the same time."""
    taken, pool, copies = model.state.memory, io.memory.pool, device.copy_stream.opposite()
    hidden = kv = None
    ways = copies, scatters, taken.ring
    if pool.layout.plan.hidden:
        snapshots = Snapshots(io.memory.snapshots, taken.staging, copies, scatters)
        hidden = HiddenPath(snapshots, DirectRows([pool.hidden], *ways))
    if pool.layout.kv_layers:
        kv = DirectRows(pool.kv, *ways)
    state = DeviceState(device.pool, taken.taps, taken.verified, hidden, kv)
    on_ready = disk.write_through if disk is not None else lambda node: None
    return Capture(pool.layout, host, scatters, state, on_ready, ranks.clock)


def _side_stream(model: Model, device: Device, shape: StateShape) -> SideStream | None:
    """Where restorations run: beside the compute stream only where that was measured faster. Ranks
    gather hidden states in the order of the model's own collectives, so in its stream."""
    layers, pool = model.state.layers, device.pool
    if pool.device.type != "cuda" or layers is None or model.state.group.size > 1:
        return None
    return fastest_stream(layers, model.allocator, device.copy_stream, shape, pool)


# -- tree ----------------------------------------------------------------------------------------


def _device_order(model: Model, tiers: Tiers) -> DeviceOrder | None:
    """The queue's order for the device, unless another one is asked for on either side."""
    if model.config.eviction != "queue" or model.params.eviction_policy.lower() != "lru":
        return None
    retention = tiers.retention
    return DeviceOrder(tiers.host.tree.fingerprint, retention.priority)
