"""SGLang's arguments: the only place that knows where they are and what they are called.

While SGLang resolves them they have names, for our tables of flags: `asked` and `choose`. Behind
that, what they came to has a function each. `args`: SGLang's `ServerArgs`, whose fields are what
was given; what is decided stands beside them, and in the context of the process that serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from sglang.srt.arg_groups.overrides import (
    declare_resolution,
    mamba_cache_chunk_size,
    max_speculative_num_draft_tokens,
    model_config_of,
    resolution_result,
    resolving_view,
    supports_mamba_cache_extra_buffer,
)
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, Phase, with_phase
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

SOURCE = "sglang-hc"
"""Who decided, in SGLang's list of decisions."""


def of(owner: Any) -> Any:
    """The arguments of a model runner, a scheduler or the tokenizer's manager."""
    return owner.server_args


# -- while they are resolved ---------------------------------------------------------------------


def asked(args: Any, name: str) -> Any:
    """An argument as it stands: the user's, or what SGLang or we have put in its place."""
    return getattr(resolving_view(args), name)


def choose(args: Any, name: str, value: object) -> None:
    """Put a value in place of an argument."""
    declare_resolution(args, SOURCE, **{name: value})


def resolve(args: Any) -> None:
    """Have SGLang decide what nobody gave, and refuse what does not go together."""
    args.resolve_once()


def default(name: str) -> Any:
    """What SGLang has for an argument that nobody gave."""
    return next(field.default for field in msgspec.structs.fields(ServerArgs) if field.name == name)


def keep_options(args: Any, options: dict[str, Any]) -> None:
    """Let our own options go with SGLang's arguments, into every process."""
    args._hc_config = options


def kept_options(args: Any) -> dict[str, Any] | None:
    """What `keep_options` put there; None where nobody asked for the tiers."""
    return getattr(args, "_hc_config", None)


def can_keep_states(args: Any) -> bool:
    """Whether the model has recurrent layers that can leave states within a prefill."""
    config = model_config_of(args).hf_config
    return bool(supports_mamba_cache_extra_buffer(resolving_view(args), config))


def architecture(args: Any) -> str:
    """The model's, as its config.json names it."""
    return str((model_config_of(args).hf_config.architectures or [""])[0])


def state_chunk(args: Any) -> int:
    """Tokens between two places of a prefill at which recurrent layers can leave a state."""
    return int(mamba_cache_chunk_size(args))


def prefill_graphs(args: Any) -> str:
    """SGLang's choice of a back end for CUDA graphs of prefill, one of its `Backend`."""
    graphs: CudaGraphConfig = asked(args, "cuda_graph_config")
    return graphs.prefill.backend


def prefill_graphs_were_asked(args: Any) -> bool:
    """Whether a flag named the back end, and not SGLang, which for some models chooses by the same
    argument."""
    chosen = asked(args, "cuda_graph_backend_prefill") != args.cuda_graph_backend_prefill
    return (Phase.PREFILL, "backend") in args._cuda_graph_config_locked and not chosen


def leave_out_prefill_graphs(args: Any) -> None:
    """Run prefill without CUDA graphs."""
    graphs = asked(args, "cuda_graph_config")
    without = with_phase(graphs, Phase.PREFILL, backend=Backend.DISABLED)
    choose(args, "cuda_graph_config", without)


def asked_graphs(args: Any) -> list[str]:
    """Phases of passes for which a flag named a back end that makes CUDA graphs."""
    graphs: CudaGraphConfig = asked(args, "cuda_graph_config")
    found = []
    for phase in (Phase.DECODE, Phase.PREFILL):
        flag = f"cuda_graph_backend_{phase}"
        by_model = asked(args, flag) != getattr(args, flag)
        makes = getattr(graphs, phase).backend != Backend.DISABLED
        if makes and (phase, "backend") in args._cuda_graph_config_locked and not by_model:
            found.append(phase)
    return found


def leave_out_graphs(args: Any) -> None:
    """Run all passes without CUDA graphs."""
    graphs = asked(args, "cuda_graph_config")
    for phase in (Phase.DECODE, Phase.PREFILL):
        graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
    choose(args, "cuda_graph_config", graphs)


# -- what they came to ---------------------------------------------------------------------------


def _now(args: Any, name: str) -> Any:
    """What was decided. A process that serves with `args` may have changed its mind since."""
    return get_context().config_leaf(name) if _serves(args) else resolution_result(args, name)


def _serves(args: Any) -> bool:
    """Whether this process serves with them."""
    try:
        return get_context().server_args is args
    except ValueError:  # none do here
        return False


@dataclass(frozen=True)
class PassSizes:
    """What one forward pass may have.

    chunk: tokens of a prompt; None where prompts are not cut. uncut: tokens of the prompts in a
    pass then. is_mixed: requests decode in the passes of chunks. requests: that decode, as many as
    the options say, or twice what SGLang's decode graphs are for on this device. proposed: rows of
    each that are verified with speculative decoding; 0 without.
    """

    chunk: int | None
    uncut: int
    is_mixed: bool
    requests: int
    proposed: int


def pass_sizes(args: Any) -> PassSizes:
    chunk = _now(args, "chunked_prefill_size") or -1
    graphs: CudaGraphConfig = _now(args, "cuda_graph_config")
    return PassSizes(
        chunk if chunk > 0 else None,
        _now(args, "max_prefill_tokens"),
        _now(args, "enable_mixed_chunk"),
        int(_now(args, "max_running_requests") or 2 * graphs.decode.max_bs),
        max_speculative_num_draft_tokens(args) or 0,
    )


def slots_ahead() -> int:
    """Device slots that are taken ahead for a request that decodes, behind its last token."""
    return get_alloc_reserve_per_decode()


def makes_graphs(args: Any) -> bool:
    """Whether any passes run as CUDA graphs."""
    graphs: CudaGraphConfig = _now(args, "cuda_graph_config")
    return {graphs.decode.backend, graphs.prefill.backend} != {Backend.DISABLED}


def chunk_was_given(args: Any) -> bool:
    """Whether the user named the tokens of a pass."""
    return args.chunked_prefill_size is not None


def exchanges_tokens(args: Any) -> bool:
    """Whether experts get their tokens by an exchange, whose buffers were sized by the chunk."""
    return _now(args, "moe_a2a_backend") != "none"


def grow_chunk(args: Any, tokens: int, static: float) -> None:
    """Let passes have so many tokens of prompts, and weights and KV pool this share of the device.
    Before the KV pool is made; this process serves with `args`."""
    get_context().override(SOURCE, chunked_prefill_size=tokens, mem_fraction_static=static)


def leave_out_mixed_chunks(args: Any) -> None:
    """Let no pass decode beside a prompt. Before the scheduler is complete."""
    get_context().override(SOURCE, enable_mixed_chunk=False)


def pool_tokens(args: Any) -> int | None:
    """The KV pool's tokens; None where what is left of the device decides."""
    found: int | None = _now(args, "max_total_tokens")
    return found


def most_running(args: Any) -> int | None:
    """Requests that may run at once; None where the user does not say."""
    found: int | None = args.max_running_requests
    return found


def set_pool_tokens(args: Any, tokens: int) -> None:
    """Let the KV pool have at most so many. Before it is made; this process serves with `args`."""
    get_context().override(SOURCE, max_total_tokens=tokens)


def quantization(args: Any) -> str | None:
    """How the weights are quantised."""
    return _now(args, "quantization")


def page_size(args: Any) -> int:
    """Tokens of a page of the KV pool."""
    return _now(args, "page_size")


def skips_warmup(args: Any) -> bool:
    """Whether the server is ready before it has served a request."""
    return _now(args, "skip_server_warmup")


def kv_cache_dtype(args: Any) -> str:
    """The flag for the KV pool's elements: "auto" for the model's own type."""
    return _now(args, "kv_cache_dtype")


def attention_backend(args: Any) -> str | None:
    return _now(args, "attention_backend")


def image_backend(args: Any) -> str | None:
    """What attends in the encoder of images; None for SGLang's choice."""
    return _now(args, "mm_attention_backend")


def sparse_backends(args: Any) -> list[str]:
    """What chooses the tokens of sparse attention and attends to them, by flag."""
    names = ("prefill", "decode", "topk", "paged_mqa_logits")
    return [f"{name} {_now(args, f'dsa_{name}_backend')}" for name in names]


def is_deterministic(args: Any) -> bool:
    """Whether results are not to depend on the batch."""
    return _now(args, "enable_deterministic_inference")


def has_radix_cache(args: Any) -> bool:
    """Whether SGLang keeps prefixes. It switches that off for some attention back ends."""
    return not _now(args, "disable_radix_cache")


def has_states(args: Any) -> bool:
    """Whether the model has recurrent layers, whose states SGLang's tree keeps."""
    return bool(_now(args, "uses_mamba_radix_cache"))


def may_have_adapters(args: Any) -> bool:
    """Whether LoRAs were named or may come."""
    return bool(_now(args, "enable_lora") or _now(args, "lora_paths"))


def runs_adapters(args: Any) -> bool:
    """Whether the model runner has a manager of LoRAs."""
    return bool(_now(args, "enable_lora"))


def has_overlap(args: Any) -> bool:
    """Whether the scheduler looks at the results of a pass when the next one runs."""
    return not _now(args, "disable_overlap_schedule")


def has_forward_stream(args: Any) -> bool:
    """Whether passes run on a stream of their own: with overlap scheduling and in a pipeline."""
    return has_overlap(args) or _now(args, "pp_size") > 1


def first_gpu(args: Any) -> tuple[int, float]:
    """(its number, the share of its memory for weights and KV pool)."""
    return _now(args, "base_gpu_id"), _now(args, "mem_fraction_static")


def replicas(args: Any) -> int:
    """Data-parallel replicas of the server."""
    return _now(args, "dp_size")


def stages(args: Any) -> int:
    """Of the pipeline, each with some of the layers."""
    return _now(args, "pp_size")


def tokenizer_workers(args: Any) -> int:
    """Processes that take requests."""
    return _now(args, "tokenizer_worker_num")


def draft_algorithm(args: Any) -> str | None:
    """Of speculative decoding."""
    return _now(args, "speculative_algorithm")


def served_name(args: Any) -> str:
    """What clients call the model."""
    return str(_now(args, "served_model_name") or _now(args, "model_path"))


def model_config(args: Any) -> Any:
    """SGLang's `ModelConfig` of the model that they name."""
    return model_config_of(args)


def has_latent_attention(args: Any) -> bool:
    """Whether the layers keep one compressed row for K and V."""
    found: bool = model_config_of(args).attention_arch == AttentionArch.MLA
    return found


def api_keys(args: Any) -> tuple[str | None, str | None]:
    """(of every client, of administrators)."""
    return _now(args, "api_key"), _now(args, "admin_api_key")
