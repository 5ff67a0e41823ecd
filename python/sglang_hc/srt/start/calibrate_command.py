"""Loads one model as a server would, up to its weights, and measures it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import PortArgs, prepare_server_args

from sglang_hc.errors import ConfigError
from sglang_hc.forms import StateShape
from sglang_hc.policy.cost_model import CostModel
from sglang_hc.policy.fit import fit_prefill, fit_step
from sglang_hc.srt.arguments.server_args import ALWAYS_ENV
from sglang_hc.srt.binding import arguments, parallel
from sglang_hc.srt.engine import in_place
from sglang_hc.srt.model import calibrate, families
from sglang_hc.srt.model.exactness import choose_product, disagreement, prepare
from sglang_hc.srt.model.model_state import hidden_excluded
from sglang_hc.srt.model.scratch_layer import model_shape
from sglang_hc.srt.ranks.start_group import StartGroup
from sglang_hc.srt.start.timed_engine import Timed, timed_engine


class Loaded(NamedTuple):
    """A model whose weights are loaded; hidden: its layers can be kept as hidden states."""

    runner: Any
    layers: list[families.LayerAdapter] | None
    hidden: bool


def profile_model(model: str, disks: tuple[str, ...], flags: Sequence[str]) -> CostModel:
    """Costs of `model` under SGLang's `flags`, with those of the passes of a whole engine, which
    runs and ends before. Raises ConfigError for what cannot be measured."""
    timed = timed_engine(model, flags)
    loaded = load_model(model, flags)
    alone = StartGroup.of_model()
    cost = calibrate.measured(loaded.runner, disks, loaded.layers, loaded.hidden, alone)
    return with_passes(cost, model_shape(loaded.runner), timed)


def with_passes(cost: CostModel, shape: StateShape, timed: Timed) -> CostModel:
    """The costs of layers with those of passes, which are shared among the layers."""
    layers = shape.num_layers
    steps, passes = ([(n, c, took / layers) for n, c, took in found] for found in timed)
    return replace(cost, step=fit_step(steps), passes=fit_prefill(passes), shape=shape)


def load_model(model: str, flags: Sequence[str]) -> Loaded:
    """Load `model` under SGLang's `flags`; once per process. Raises ConfigError."""
    os.environ[ALWAYS_ENV] = "1"
    load_plugins()
    missing = in_place.missing()
    if missing:
        raise ConfigError(f"not in place: {', '.join(missing)}; install sglang-hc here")
    # Disabled, because the start of a server would measure by itself.
    args = prepare_server_args(["--model-path", model, "--hc-disable", *flags])
    if arguments.asked(args, "tp_size") > 1 or arguments.asked(args, "pp_size") > 1:
        raise ConfigError("--tp-size and --pp-size above 1 are not supported yet; leave them out")
    arguments.resolve(args)
    gpu, share = arguments.first_gpu(args)
    publish(args, role="scheduler", ranks=parallel.one_rank(gpu))
    model_config, port = ModelConfig.from_server_args(args), PortArgs.init_new(args).nccl_port
    parallel.make_groups(args, model_config, port)
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=share,
        gpu_id=gpu,
        nccl_port=port,
        server_args=args,
    )
    layers = families.restorable_layers(runner.model)
    exact = bool(arguments.kept_options(args)["exact"])
    prepare(args, layers, exact)
    hidden = hidden_excluded(runner, layers) is None
    if hidden:
        assert layers is not None
        proof = choose_product(layers, exact)
        hidden = disagreement(proof, runner.dtype) is None and (proof.wrong is None or not exact)
    return Loaded(runner, layers, hidden)
