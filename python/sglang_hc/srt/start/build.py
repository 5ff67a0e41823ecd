"""Builds the tiers of one scheduler process, and the tree above them.

This is the second half of a start. The first, `after_load_model` in `srt/model/model_state.py`,
settles costs, layer plan and taps before SGLang makes its KV pool. `build_tree_cache` comes behind
that and reads top to bottom: every part is given what it needs when it is made.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_hc.capture.capture import Capture
from sglang_hc.capture.direct import DirectRows
from sglang_hc.capture.ends import EndSaver
from sglang_hc.capture.saving import DeviceState, HiddenPath
from sglang_hc.capture.snapshots import Snapshots
from sglang_hc.config import GIB, ConfigError
from sglang_hc.device.copy_stream import CopyStream, SideStream, copy_stream_for
from sglang_hc.device.exactness import Exactness
from sglang_hc.device.gather_scatter import gather
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.policy.pins import RetentionPriority, SessionPins
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.policy.soft_retention import SoftRetention
from sglang_hc.profile_file import CachedProfile
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.queue.mover import BlockMover
from sglang_hc.queue.queue_view import QueueRules, QueueView
from sglang_hc.ranks.agreement import Ranks
from sglang_hc.restore.cost_observer import CostObserver, timer_for
from sglang_hc.restore.path import RestorePath, Rotation
from sglang_hc.restore.prerestored import PrerestoredBlocks
from sglang_hc.restore.staging import StagingRing
from sglang_hc.restore.timed_restorer import TimedRestorer
from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments, parallel
from sglang_hc.srt.engine import in_place
from sglang_hc.srt.engine.guard import counters as own_errors
from sglang_hc.srt.engine.scheduler import BUILDING
from sglang_hc.srt.engine.streams import ComputeStream, model_streams
from sglang_hc.srt.model.capture_memory import SNAPSHOT_BUFFERS
from sglang_hc.srt.model.columns import columns_of
from sglang_hc.srt.model.identity import model_identity
from sglang_hc.srt.model.kv_pool import KvPoolRows, UnsupportedPool, draft_pool, fastest_gather
from sglang_hc.srt.model.model_state import MODEL_STATE, ModelState, refuse_other_pools
from sglang_hc.srt.model.projection import by_sglang, fastest_projection, fastest_stream
from sglang_hc.srt.model.recompute import LayerRecomputer, recomputer_for
from sglang_hc.srt.model.rotation import checked_rotation
from sglang_hc.srt.model.scratch_layer import model_shape
from sglang_hc.srt.model.state_pool import StatePool, gate_of, state_pool
from sglang_hc.srt.model.weight_versions import WeightVersions
from sglang_hc.srt.model.window_pool import WindowPool, full_attention, window_pool
from sglang_hc.srt.ranks.decisions import ranks_of
from sglang_hc.srt.ranks.replicas import host_share, place_of
from sglang_hc.srt.ranks.start_group import StartGroup
from sglang_hc.srt.requests.images import known_images
from sglang_hc.srt.requests.recording import served_with
from sglang_hc.srt.scheduling.speculation import draft_layers
from sglang_hc.srt.start.build_ends import (
    end_path,
    end_tokens,
    ends_of,
    of_full_layers,
    states_of,
    tree_states,
)
from sglang_hc.srt.start.build_host import host_tier
from sglang_hc.srt.start.model import Model
from sglang_hc.srt.start.stores import lower_tier
from sglang_hc.srt.tree.audit import Audit, can_audit
from sglang_hc.srt.tree.audit_compare import Comparison
from sglang_hc.srt.tree.device_eviction import DeviceOrder
from sglang_hc.srt.tree.device_tree import unified_tree
from sglang_hc.srt.tree.events import Events
from sglang_hc.srt.tree.tree_backend import HcRadixCache
from sglang_hc.store.executor import ThreadExecutor
from sglang_hc.store.host_memory import HostMemory, MemorySpec, divided, least_bytes
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.store.scatter_queue import ScatterQueue
from sglang_hc.tiers.recording import recorder_of
from sglang_hc.tiers.retention import Retention
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.ends import Ends
from sglang_hc.tree.host_tier import HostTier

logger = logging.getLogger(__name__)


def build_tree_cache(ctx: Any) -> HcRadixCache:
    """The factory SGLang calls for `--radix-cache-backend hc`. Raises ConfigError."""
    model = _loaded(ctx)
    device = _device(model)
    config, state, runner = model.config, model.state, model.runner
    layout, fingerprint = _layout(model, device)
    ranks = ranks_of(state.group)
    counters: Counter[str] = Counter()
    memory = _host_memory(model, device, layout)
    pool = memory.pool

    # Which blocks exist, and which of them stay.
    window = LookAhead()
    pins = SessionPins.sized_for(pool.num_slots)
    wanted = RetentionPriority(window, pins)
    soft = SoftRetention.sized_for(pool.num_slots)
    host, away = host_tier(config, pool.num_slots, fingerprint, window, pins, soft, ranks.clock)
    ends = ends_of(config, memory, host, window, pins, soft)
    planner = _planner(model, device, layout, counters, ranks)
    disk = lower_tier(model, memory, fingerprint, host, planner, counters, ranks, ends)
    retention = Retention(host, disk, pins, wanted, ranks.clock, soft, config.ttl or 0.0)
    served = served_with(config, runner, state.plan, pool, disk)
    recorder = recorder_of(config, model.place.suffix, served, fingerprint, ranks.clock)

    # What moves them: to host memory for waiting requests, to the device, and from there.
    executor = ranks.executor(ThreadExecutor(pool, memory.snapshots))
    scatters = ScatterQueue(executor, host, points_too=ranks.count > 1)
    mover = None
    if device.rotation is not None:
        mover = BlockMover(host, disk, scatters, counters, ranks.clock)
    rules = QueueRules(config.prefetch, config.schedule == "ready-first", _can_meet(model, device))
    hints = wanted if config.eviction != "lru" else None
    copies, side = device.copy_stream, _side_stream(model, device, layout.shape)
    gathers, ends_path = parallel.tp_size() > 1, end_path(device.windows, memory)
    row = sum(device.windows.rows.part_bytes) if device.windows is not None else 0
    ring = StagingRing.sized_for(layout.shape, device.pool.device, copies, gathers, row)
    path = RestorePath(
        *(pool, device.pool, ring, device.recomputer, side, device.rotation, state.in_turn),
        ends_path,
    )
    observer = profile = None
    if state.cost is not None and ranks.count == 1 and ends is None:
        # What one rank sees corrects no costs of several, which must decide alike; nor what is seen
        # of layers that differ.
        observer = CostObserver(state.cost, layout, timer_for(copies), copies)
    restorer = TimedRestorer(host, path, planner, observer, counters, ranks, ends)
    compute = ComputeStream.of(runner)
    ahead = PrerestoredBlocks(model.allocator, restorer, compute)
    met = ahead.drop_unproven
    queue = QueueView(host, disk, window, rules, planner, hints, mover, met, away)
    capture = _capture(model, device, memory, host, disk, scatters, ranks, ends)

    states = states_of(device.states, memory, host, ends, scatters, copies, counters, ranks)

    # What SGLang sees of it.
    if planner.costs and state.measured and config.profile is None and not state.group.rank:
        # Rank 0 keeps what it learns; a user's profile stays as it is.
        profile = CachedProfile(planner.costs, state.measured)
    exact = device.exactness
    events = None
    if model.params.enable_kv_cache_events:
        events = Events(model.params, host, disk, counters)
    residence = events.residence if events is not None else None
    tiers = Tiers(
        *(host, disk, capture, restorer, queue, retention, exact, ranks),
        *(own_errors, recorder, profile, ends, states, residence),
    )
    order = None
    if config.eviction != "lru" and model.params.eviction_policy.lower() == "lru":
        order = DeviceOrder(fingerprint, wanted)
    taps, audit = state.memory.taps, None
    if config.audit and can_audit(tiers, runner, taps):
        own = device.pool, device.windows, device.states, taps, runner
        audit = Audit(
            *(tiers, Comparison(memory, *own), device.states, taps, runner, compute, counters),
            config.audit,
        )
    own_states = tree_states(device.states, tiers)
    weights = WeightVersions(state.group)
    images = known_images(runner, state.plan, device.whole)
    parts = tiers, model.scheduler, compute, ahead, weights, audit, own_states, events, images
    tree: HcRadixCache = unified_tree(ctx, order, lambda params: HcRadixCache(params, *parts))
    tree.ahead_of_decode = arguments.slots_ahead()
    kv_pool = runner.token_to_kv_pool
    kv_pool.register_layer_transfer_counter(gate_of(kv_pool, restorer.gate))
    ctx.tp_worker.register_hicache_layer_transfer_counter(restorer.gate)
    return tree


# -- what SGLang loaded --------------------------------------------------------------------------


def _loaded(ctx: Any) -> Model:
    """What SGLang and `after_load_model` left; refuses what the tiers cannot serve."""
    missing = in_place.missing()
    if missing:
        raise ConfigError(f"sglang-hc is not in place in this process: {', '.join(missing)}")
    config = config_of(arguments.of(ctx))
    runner = ctx.tp_worker.model_runner
    state: ModelState | None = getattr(runner, MODEL_STATE, None)
    if config is None or state is None:
        raise ConfigError(
            "the radix cache backend hc needs sglang-hc's own options; start the server with "
            "python -m sglang_hc.launch_server"
        )
    refuse_other_pools(ctx)
    scheduler = BUILDING.get()
    draft, place = scheduler.draft_runner, place_of(runner)
    return Model(config, runner, ctx.params, state, scheduler, draft, place)


# -- the device ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """The model's device. pool: of the layers with full attention. windows, states: of others, None
    where there are none. copy_stream: for copies beside the computation. recomputer: runs the
    model's first layers; None where it cannot. rotation: takes stored K to new positions; None
    where nothing moves. exactness: of what may be restored."""

    pool: KvPoolRows
    windows: WindowPool | None
    states: StatePool | None
    copy_stream: CopyStream
    recomputer: LayerRecomputer | None
    rotation: Rotation | None
    exactness: Exactness

    @property
    def whole(self) -> bool:
        """Whether all layers have full attention."""
        return self.windows is None and self.states is None

    @property
    def is_gpu(self) -> bool:
        return self.pool.device.type == "cuda"


def _device(model: Model) -> Device:
    """The KV pool with the fastest ways to read and write it, and what was proven of it."""
    runner, state = model.runner, model.state
    draft = model.draft.token_to_kv_pool if model.draft is not None else None
    whole = runner.token_to_kv_pool
    own = partial(KvPoolRows, full_attention(whole), state.layers)
    reach = model.params.sliding_window_size
    if reach and model.params.is_eagle:
        reach += runner.page_size  # SGLang's tree compares a token more: it goes on before an end
    try:
        draft = draft_pool(draft, model.params.is_eagle)
        rows = partial(own, columns=columns_of, draft=draft)
        windows = window_pool(whole, model.allocator, reach, runner.page_size)
        pool = rows()
        states = state_pool(runner)
    except UnsupportedPool as error:
        raise ConfigError(f"{error}. Add --hc-disable to serve without the tiers") from None
    if windows is not None and model.config.overflow == "reembed":
        raise ConfigError(
            "--hc-overflow reembed: what layers with sliding windows keep does not move to other "
            "positions; use --hc-overflow recompute"
        )
    stage = StartGroup.of_stage()
    recomputer, pieces = recomputer_for(
        model.config, runner, pool, model.allocator, state.own_plan, state.memory.taps, stage
    )
    project, read = by_sglang, gather
    if pool.device.type == "cuda" and state.layers is not None:
        project = fastest_projection(runner, state.layers, model.allocator)
    if state.memory.ring is not None and state.own_plan.kv:
        layers = state.own_plan.kv_layers if windows is None else range(pool.num_layers)
        read = fastest_gather(pool, layers, model.allocator, state.memory.ring)
    pool = rows(project, read)
    copy_stream = copy_stream_for(pool.device, [*model_streams(runner), *state.memory.streams])
    rotation = None
    if model.config.overflow == "reembed":
        rotation = checked_rotation(runner, state.plan)
    exactness = state.exactness(model.config.restore, pieces)
    return Device(pool, windows, states, copy_stream, recomputer, rotation, exactness)


# -- blocks and their memory ---------------------------------------------------------------------


def _layout(model: Model, device: Device) -> tuple[BlockLayout, bytes]:
    """Of this rank's part of a block; and what identities of blocks begin with, the same on all
    ranks."""
    runner, state, group = model.runner, model.state, model.state.group
    taps = state.memory.taps
    dtype = str(runner.dtype).removeprefix("torch.")
    hidden_bytes = taps.row_bytes if taps is not None else 0
    shape = StateShape(device.pool.num_layers, hidden_bytes, device.pool.part_bytes, dtype)
    lags = model.params.is_eagle and device.states is None  # as SGLang's tree compares tokens
    draft, drafted = draft_layers(model.draft, lags, group)
    plan, ends = state.own_plan, None
    if device.windows is not None:
        plan, ends = LayerPlan(0, 0, shape.num_layers), device.windows.layout
    if device.states is not None:
        ends = device.states.layout
    layout = BlockLayout(plan, shape, draft, ends)
    product = []
    if model.config.exact and state.plan.hidden:
        # Hidden states that another product made K and V of do not give those bits here.
        assert state.proof is not None
        product = [f"exact {state.proof.digest}"]
    own = layout.fingerprint(*model_identity(runner, group), *product, *drafted)
    return layout, bytes.fromhex(group.digest(own.hex()))


def _host_memory(model: Model, device: Device, layout: BlockLayout) -> HostMemory:
    """As many slots as fit on every rank, and snapshots. Raises ConfigError."""
    state, size = model.state, host_share(model.config, model.place)
    num_slots, end_slots = map(state.group.least, divided(size, layout))
    if num_slots < 1:
        raise ConfigError(
            f"--hc-host-size-gb leaves {size / GIB:.3g} GiB for each rank and holds no block; "
            f"what this model needs at least takes {least_bytes(layout) / GIB:.3g} GiB; give more"
        )
    logger.info(
        "sglang-hc: layer plan %s, host tier of %.2f GiB: %d blocks, %d tokens",
        state.plan,
        num_slots * layout.slot_bytes / GIB,
        num_slots,
        num_slots * BLOCK_TOKENS,
    )
    buffers = SNAPSHOT_BUFFERS if layout.plan.hidden else 0
    spec = MemorySpec(layout, num_slots, state.memory.sizes.snapshot_rows, buffers, end_slots)
    try:
        memory = HostMemory(spec)
    except OSError as error:
        raise ConfigError(f"--hc-host-size-gb: {error}") from None
    device.copy_stream.pin(memory.pool.buffer)
    if memory.ends is not None:
        device.copy_stream.pin(memory.ends.buffer)
    return memory


# -- restoring and saving ------------------------------------------------------------------------


def _planner(
    model: Model, device: Device, layout: BlockLayout, counters: Counter[str], ranks: Ranks
) -> RestorePlanner:
    """Decides what is restored."""
    state = model.state
    # Pages lie in the slots of one block then. Of a draft model rows lie behind their block's.
    alone = BLOCK_TOKENS % model.runner.page_size == 0 and model.draft is None
    alone = alone and device.whole
    cost, plan = state.cost, state.plan
    if device.windows is not None:
        plan = LayerPlan(0, 0, len(device.windows.full))
        row = sum(device.pool.part_bytes) / model_shape(model.runner).kv_bytes
        windows = device.windows.layout.window
        cost = of_full_layers(cost, plan.num_layers, windows, row)
    return RestorePlanner(
        cost,
        plan,
        device.recomputer is not None and not state.has_stages,
        counters,
        always=model.config.restore == "always",
        as_they_come=alone and not state.has_stages and not state.in_turn,
        end_tokens=end_tokens(layout),
    )


def _can_meet(model: Model, device: Device) -> bool:
    """Prompts come in chunks, and where bits count a prefill was proven to make those of decoding:
    what is stored of the end of a history may have any computed front before it then. Not tested
    with the stages of a pipeline."""
    if model.draft is not None or model.state.has_stages or not device.whole:
        return False
    chunk = arguments.pass_sizes(arguments.of(model.runner)).chunk
    return chunk is not None and (device.recomputer is not None or not model.config.exact)


def _side_stream(model: Model, device: Device, shape: StateShape) -> SideStream | None:
    """Where restorations run: beside the compute stream only where that was measured faster. Ranks
    gather hidden states in the order of the model's own collectives, so in its stream."""
    layers = model.state.layers
    if not device.is_gpu or layers is None or model.state.group.size > 1 or model.state.in_turn:
        return None
    return fastest_stream(layers, model.allocator, device.copy_stream, shape, device.pool)


def _capture(
    model: Model, device: Device, memory: HostMemory, host: HostTier, disk: LowerTier | None,
    scatters: ScatterQueue, ranks: Ranks, ends: Ends | None,
) -> Capture:  # fmt: skip
    """Saving copies in the opposite direction of restoring; a GPU does both at the same time."""
    taken, pool, copies = model.state.memory, memory.pool, device.copy_stream.opposite()
    hidden = kv = None
    ways = copies, scatters, taken.ring
    if pool.layout.plan.hidden:
        snapshots = Snapshots(memory.snapshots, taken.staging, copies, scatters)
        hidden = HiddenPath(snapshots, DirectRows([pool.hidden], *ways))
    if pool.layout.kv_layers:
        kv = DirectRows(pool.kv, *ways)
    state = DeviceState(device.pool, taken.taps, taken.verified, hidden, kv)

    def on_ready(node: BlockNode) -> None:
        if disk is not None:
            disk.write_through(node)

    saver = None
    if ends is not None and memory.ends is not None and device.windows is not None:
        rows = DirectRows(memory.ends.window, *ways)
        saver = EndSaver(ends, rows, device.windows.rows, scatters)
    return Capture(pool.layout, host, scatters, state, on_ready, ranks.clock, saver)
