"""The `--hc-*` flags inside SGLang's argument handling, and the modes that cannot be right yet.

A command line is parsed with our flags, and SGLang's arguments keep what they said. Later SGLang
resolves its arguments once, in steps; ours are around some of them (`STEPS`).
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.environ import envs

from sglang_hc.command_line import add_flags, config_from, given_flags
from sglang_hc.config import CONFIG_ENV, ConfigError, HcConfig, flag_of, refuse_same_directory
from sglang_hc.srt.arguments import (
    hicache_flags,
    offload_flags,
    state_flags,
    throughput_flags,
    window_flags,
)
from sglang_hc.srt.arguments.graphs import check_prefill_graphs
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.binding.arguments import asked
from sglang_hc.srt.engine import cpu

logger = logging.getLogger(__name__)

ALWAYS_ENV = "SGLANG_HC_ENABLE"
"""Set by our launcher: the tier is on without any flag. The plain launcher needs a flag for it."""

CUT_KEY_ENV = "SGLANG_HC_CUT_KEY"
"""What the tokenizers of a server mark cuts with. All its processes inherit it; it is no argument,
because SGLang shows those to clients."""

WORKER_APP = "sglang_hc.srt.start.worker:app"
"""What a tokenizer worker serves (`--tokenizer-worker-num` above 1)."""

OFFLOADED = (
    "weights that are moved for each layer are not where projections and recomputed layers look; "
    "--hc-offload-gb leaves them in host memory too"
)

SKIPPED = "its kernels skip the taps that capture hidden states"

UNCHECKED = "its requests reach the scheduler without the checks of the tokenizer"

SWITCHES = {
    "enable_multi_layer_eagle": "every step of the draft model has a KV pool of its own",
    "speculative_adaptive": "verify passes change their width, which was never tested",
    "enable_pdmux": "layers of one pass run in pieces",
    "dllm_algorithm": "positions are computed several times",
    "enable_torch_compile": "a compiled model skips the taps that capture hidden states",
    "enable_nvidia_megakernel": SKIPPED,
    "enable_amd_monokernel": SKIPPED,
    "enable_two_batch_overlap": "batches are split",
    "enable_hisparse": "the KV pool is translated",
    "disable_radix_cache": "the tiers hang on the radix cache",
    "enable_session_radix_cache": "its references of sessions are another order of eviction",
    "enable_streaming_session": "sessions hold KV outside the tree",
    "enable_lmcache": "the tiers take its place in the radix cache",
    "enable_flexkv": "the tiers take its place in the radix cache",
    "enable_unified_cache_external_linker": "the tiers take its place in the radix cache",
    "enable_mis": "it switches the radix cache off",
    "is_embedding": "nothing is generated, so nothing returns",
    "enable_unified_memory": "slots are virtual there and move",
    "enable_int8_mamba_checkpoint": "states of the tree are in another pool, and rounded",
    "enable_kv_cache_sharding": "a rank holds a part of the tokens only",
    "enable_prefill_cp": "a rank holds a part of the tokens only",
    "enable_layernorm_sp": "a rank sees the hidden states of a part of the tokens only",
    "enable_paged_experts": "experts that come and go were not tested",
    "elastic_ep_backend": "ranks that come and go were not tested",
    "speculative_draft_kv_cache_dtype": "a draft model with K and V of its own type was not tested",
    "use_ray": "its actors load no plugins",
    "smg_grpc_mode": UNCHECKED,
    "grpc_mode": UNCHECKED,
    "encoder_only": "nothing is generated, so nothing returns",
}
"""Arguments of SGLang that are refused when they are set, and why."""

SIZES = {
    "attn_dp_size": "batches are padded per rank",
    "attn_cp_size": "a rank holds a part of the tokens only",
    "dcp_size": "a rank holds a part of the tokens only",
    "dwdp_size": "batches are padded per rank",
}
"""Those that are refused above 1, and why."""

VALUES = {
    "startup_weight_load_mode": ("overlap", "the checks at the start need the weights"),
}
"""Those that are refused with one value, and why."""

WITH_STAGES = {
    "speculative_algorithm": "proposed tokens in a pipeline were not tested",
    "pp_async_batch_depth": "results that are handled later were not tested",
    "enable_dynamic_chunking": (
        "stages would learn the sizes of chunks beside requests that restore"
    ),
}
"""Those that are refused with several stages of a pipeline, and why."""

SPECULATION = ("NGRAM", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Algorithms of speculative decoding that are served."""

Step = Callable[[Any], None]
"""What SGLang does with its arguments, or we in its place."""


def add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER ServerArgs.add_cli_args."""
    add_flags(parser)
    hicache_flags.forget_defaults(parser)


def from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """AROUND ServerArgs.from_cli_args: our options go with SGLang's arguments."""
    config = _asked_for(args)
    if config is not None and not config.disable:
        hicache_flags.refuse(hicache_flags.given(args))
    made = original(cls, hicache_flags.with_defaults(args))
    if config is not None:
        arguments.keep_options(made, config.to_dict())
    return made


def _asked_for(args: argparse.Namespace) -> HcConfig | None:
    """What a command line and the environment say together; None when nobody asks for the tier."""
    flags = given_flags(args)
    if CONFIG_ENV in os.environ:
        if flags:
            raise ConfigError(
                f"{CONFIG_ENV} and {flag_of(min(flags))}: options come from one place; unset "
                f"{CONFIG_ENV}, or leave the --hc flags out"
            )
        return HcConfig.from_json(os.environ[CONFIG_ENV])
    if flags or os.environ.get(ALWAYS_ENV) == "1":
        return config_from(args)
    return None


def begin(args: Any, previous: Step) -> None:
    """Before anything depends on them: choose backends, switch the tier on, refuse what cannot be.

    `sgl.Engine` has no flags: there the options come from the environment (see `CONFIG_ENV`).
    """
    if arguments.kept_options(args) is None and CONFIG_ENV in os.environ:
        config = HcConfig.from_json(os.environ[CONFIG_ENV])
        if not config.disable:
            hicache_flags.refuse(hicache_flags.changed(args))
        arguments.keep_options(args, config.to_dict())
    options = arguments.kept_options(args)
    if options is not None:
        _begin(args, HcConfig.from_mapping(options, "server arguments"))
    previous(args)


def _begin(args: Any, config: HcConfig) -> None:
    if config.disable:
        idle = [flag_of(name) for name in config.changed() if name not in ("disable", "trace")]
        if idle:
            logger.warning("sglang-hc: --hc-disable: %s without effect", ", ".join(idle))
    if not torch.cuda.is_available():
        chosen = cpu.choose_backends(args)
        if chosen:
            logger.info("sglang-hc: no CUDA device; chose %s", ", ".join(chosen))
    if not config.disable:
        refuse_modes(args, config)
        refuse_same_directory(config)
        if config.offload_gb:
            offload_flags.begin(args)
        if config.throughput is not None:
            throughput_flags.begin(args, config)
        if config.remote is not None:
            from sglang_hc.srt.arguments.storage_backends import check_remote

            check_remote(config)
        drafts = asked(args, "speculative_draft_model_path") is not None
        if config.overflow == "reembed" and drafts:
            raise ConfigError(
                "--hc-overflow reembed and --speculative-draft-model-path: a draft model's "
                "state does not move; use --hc-overflow recompute or leave one of the two out"
            )
        if config.schedule == "ready-first" and asked(args, "enable_priority_scheduling"):
            raise ConfigError(
                "--hc-schedule ready-first and --enable-priority-scheduling both put the "
                "waiting queue in order; leave one of them out"
            )
        if config.throughput is None:
            hicache_flags.take_its_place(args)
        else:
            throughput_flags.stream_state(args)
        envs.SGLANG_HTTP_SERVER_APP_PATH.set(WORKER_APP)
    if not torch.cuda.is_available():
        cpu.check_speculation(args)
    os.environ.setdefault(CUT_KEY_ENV, secrets.token_hex(32))


def model_known(args: Any, previous: Step) -> None:
    """Around SGLang's choices for the model."""
    if config_of(args) is None:
        previous(args)
        return
    state_flags.begin(args)
    with window_flags.own_pool(args):
        previous(args)


def graphs_chosen(args: Any, previous: Step) -> None:
    """Behind the step that chooses CUDA graphs; those after it size memory by that."""
    previous(args)
    config = config_of(args)
    if config is not None and config.offload_gb:
        offload_flags.check_graphs(args)
    elif config is not None:
        check_prefill_graphs(args)


def settled(args: Any, previous: Step) -> None:
    """Refuse what SGLang has chosen by itself, for this model or device."""
    config = config_of(args)
    if config is not None:
        check_radix_cache(args)
        refuse_modes(args, config)
        if config.offload_gb:
            offload_flags.refuse_modes(args)
        if config.throughput is not None:
            throughput_flags.refuse_modes(args, config)
            throughput_flags.refuse_model(args)
    previous(args)
    if config is not None:
        state_flags.settle(args, config)


STEPS: dict[str, Callable[[Any, Step], None]] = {
    "handle_hicache_ratio_default": begin,
    "handle_model_specific_adjustments": model_known,
    "handle_cuda_graph_config": graphs_chosen,
    "handle_cache_compatibility": settled,  # it would end the start with another sentence
    "validate_deepep_v2_dispatch_token_budget": settled,  # the last one
}
"""Ours, by the name of SGLang's that each is put around."""


def check_radix_cache(args: Any) -> None:
    """Raise ConfigError where deterministic inference left the tiers nothing to hang on.

    SGLang switches its radix cache off for attention backends whose results would depend on what is
    cached; among them is its own default on some GPUs.
    """
    if arguments.is_deterministic(args) and not arguments.has_radix_cache(args):
        backend = arguments.attention_backend(args)
        raise ConfigError(
            f"--enable-deterministic-inference with --attention-backend {backend} "
            "switches SGLang's radix cache off, and the tiers hang on it; give "
            "--attention-backend fa3 or triton, or add --hc-disable to serve without the tiers"
        )


def config_of(args: Any) -> HcConfig | None:
    """The tier's options inside SGLang's arguments; None when it is off."""
    config = options_of(args)
    return None if config is None or config.disable else config


def options_of(args: Any) -> HcConfig | None:
    """As `config_of`, of a server without tiers too; None where nobody gave any."""
    values = arguments.kept_options(args)
    return None if values is None else HcConfig.from_mapping(values, "server arguments")


def refuse_modes(args: Any, config: HcConfig) -> None:
    """Raise ConfigError for a mode in which restored state could be wrong."""
    _refuse_algorithm(asked(args, "speculative_algorithm"))
    for name, why in SWITCHES.items():
        _refuse(asked(args, name), _flag(name), why)
    for name, why in SIZES.items():
        old = " (--enable-dp-attention)" if name == "attn_dp_size" else ""
        _refuse(asked(args, name) > 1, f"{_flag(name)} above 1{old}", why)
    for name, (value, why) in VALUES.items():
        _refuse(asked(args, name) == value, f"{_flag(name)} {value}", why)
    for name in ("cpu_offload_gb", "offload_group_size"):
        _refuse(asked(args, name) > 0, _flag(name), OFFLOADED)
    _refuse(envs.SGLANG_RUST_SERVER.get(), "SGLANG_RUST_SERVER", UNCHECKED)
    sizing = envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING
    _refuse(sizing.get(), sizing.name, "a KV pool that grows behind CUDA graphs was not tested")
    app = envs.SGLANG_HTTP_SERVER_APP_PATH
    another = app.is_set() and app.get() != WORKER_APP
    _refuse(another, app.name, "tokenizer workers serve an application of ours")
    apart = asked(args, "disaggregation_mode") not in (None, "null")
    _refuse(apart, "--disaggregation-mode", "prefill and decode do not share a cache")
    backend = asked(args, "radix_cache_backend")
    another = backend not in (None, "hc")
    _refuse(another, f"--radix-cache-backend {backend}", "there is one tree per server")
    apart = asked(args, "enable_http2") and asked(args, "tokenizer_worker_num") > 1
    why = "workers of that HTTP server were not tested"
    _refuse(apart, "--enable-http2 with --tokenizer-worker-num above 1", why)
    stages = asked(args, "pp_size")
    if asked(args, "tp_size") * stages > 1:
        _refuse_with_ranks(args, config)
    if stages > 1:
        _refuse_with_stages(args, config)


def _refuse_algorithm(algorithm: str | None) -> None:
    wrong = algorithm is not None and algorithm.upper() not in SPECULATION
    why = "its draft model keeps state that is not restored"
    if algorithm == "FROZEN_KV_MTP":
        why = (
            "SGLang chooses it for NEXTN and EAGLE with a draft model of Gemma 4, which reads the "
            "model's own K and V, and that was not tested"
        )
    _refuse(wrong, f"--speculative-algorithm {algorithm}", why)


def _refuse_with_ranks(args: Any, config: HcConfig) -> None:
    """What the ranks of one model cannot do together."""
    ranks = f"with {'--tp-size' if asked(args, 'pp_size') == 1 else '--pp-size'} above 1"
    why = "ranks tell each other what they have through the memory of one machine"
    _refuse(asked(args, "nnodes") > 1, f"--nnodes above 1 {ranks}", why)
    why = "a rank sees the hidden states of a part of the tokens only"
    scattered = "enable_attn_tp_input_scattered"
    _refuse(asked(args, scattered), _flag(scattered), why)
    why = "state that moves was not tested on several ranks"
    _refuse(config.overflow == "reembed", f"--hc-overflow reembed {ranks}", why)


def _refuse_with_stages(args: Any, config: HcConfig) -> None:
    """What the stages of a pipeline cannot do, beside what ranks cannot."""
    stages = "with --pp-size above 1"
    all_three = asked(args, "dp_size") > 1 and asked(args, "tp_size") > 1
    why = "all three together were not tested"
    _refuse(all_three, f"--dp-size and --tp-size above 1 {stages}", why)
    for name, why in WITH_STAGES.items():
        _refuse(asked(args, name), f"{_flag(name)} {stages}", why)
    why = "recomputed layers are proven on the first stage only"
    _refuse(config.exact, f"--hc-exact {stages}", why)
    has_adapters = arguments.may_have_adapters(args)
    _refuse(has_adapters, f"--enable-lora {stages}", "both together were not tested")


def _refuse(wrong: object, what: str, why: str) -> None:
    if wrong:
        raise ConfigError(
            f"sglang-hc does not support {what} yet: {why}. Leave it out, or add "
            "--hc-disable to serve without the tiers"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
