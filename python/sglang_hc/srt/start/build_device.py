"""What a scheduler process has before its tiers are built: the model as SGLang loaded it, and the
device with the fastest ways to its KV pool."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang.srt.runtime_context import get_resources

from sglang_hc.config import ConfigError, HcConfig
from sglang_hc.device.copy_stream import CopyStream, copy_stream_for
from sglang_hc.device.exactness import Exactness
from sglang_hc.device.gather_scatter import gather
from sglang_hc.restore.path import Rotation
from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.engine import in_place
from sglang_hc.srt.engine.scheduler import BUILDING
from sglang_hc.srt.model.columns import columns_of
from sglang_hc.srt.model.kv_pool import Gather, KvPoolRows, UnsupportedPool, fastest_gather
from sglang_hc.srt.model.model_state import MODEL_STATE, ModelState
from sglang_hc.srt.model.projection import Projection, by_sglang, fastest_projection
from sglang_hc.srt.model.recompute import LayerRecomputer, recomputer_for
from sglang_hc.srt.model.rotation import checked_rotation
from sglang_hc.srt.ranks.start_group import StartGroup


@dataclass(frozen=True)
class Model:
    """A loaded model. runner, params: SGLang's model runner and the parameters of its radix
    cache. draft: the runner of a draft model; None without one."""

    config: HcConfig
    runner: Any
    params: Any
    state: ModelState
    draft: Any

    @property
    def allocator(self) -> Any:
        """SGLang's allocator of device slots."""
        return self.params.token_to_kv_pool_allocator


@dataclass(frozen=True)
class Device:
    """The model's device. copy_stream: for copies beside the computation. recomputer: runs the
    model's first layers; None where it cannot. rotation: takes stored K to new positions; None
    where nothing moves. exactness: of what may be restored."""

    pool: KvPoolRows
    copy_stream: CopyStream
    recomputer: LayerRecomputer | None
    rotation: Rotation | None
    exactness: Exactness


def loaded(ctx: Any) -> Model:
    """What SGLang and `model_state.after_load_model` left; refuses what the tiers cannot serve."""
    missing = in_place.missing()
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
        (ctx.is_hybrid_swa, "models whose sliding-window layers have a pool of their own"),
        (ctx.is_hybrid_ssm, "models with recurrent (Mamba) layers"),
        (ctx.is_dsa, "models with sparse-attention indexes"),
    ):
        if wrong:
            raise ConfigError(
                f"sglang-hc does not support {what} yet: part of their state is outside the KV "
                "pool. Add --hc-disable to serve without the tiers"
            )
    return Model(config, runner, ctx.params, state, BUILDING.get().draft_runner)


def device_of(model: Model) -> Device:
    """The KV pool with the fastest ways to read and write it, and what was proven of it."""
    runner, state = model.runner, model.state
    columns = partial(columns_of, runner)
    draft = model.draft.token_to_kv_pool if model.draft is not None else None
    try:
        pool = KvPoolRows(runner.token_to_kv_pool, state.layers, columns=columns, draft=draft)
    except UnsupportedPool as error:
        raise ConfigError(f"{error}. Add --hc-disable to serve without the tiers") from None
    stage = StartGroup.of_stage(runner)
    recomputer, pieces = recomputer_for(
        model.config, runner, pool, model.allocator, state.own_plan, state.memory.taps, stage
    )
    project: Projection = by_sglang
    read: Gather = gather
    if pool.device.type == "cuda" and state.layers is not None:
        project = fastest_projection(runner, state.layers, model.allocator)
    if state.memory.ring is not None and state.own_plan.kv:
        layers = state.own_plan.kv_layers
        read = fastest_gather(pool, layers, model.allocator, state.memory.ring)
    pool = KvPoolRows(runner.token_to_kv_pool, state.layers, project, read, columns, draft)
    copy_stream = copy_stream_for(pool.device, [*model_streams(runner), *state.memory.streams])
    rotation = None
    if model.config.overflow == "reembed":
        rotation = checked_rotation(runner, state.plan)
    exactness = state.exactness(model.config.restore, pieces)
    return Device(pool, copy_stream, recomputer, rotation, exactness)


def model_streams(runner: Any) -> list[Any]:
    """Streams on which SGLang runs the model: that of the passes, and the named ones, such as the
    one beside it for norms of queries and keys.

    Its streams for scheduling and for results come later and are other ones: torch hands out 32 in
    turn, and the tiers take a few.
    """
    return [runner.forward_stream, *get_resources().streams.values()]
