"""SGLang's arguments: the only place that knows where they are and what they are called.

While SGLang resolves them they have names, for our tables of flags: `asked` and `choose`. Behind
that, what they came to has a function each. `args`: SGLang's `ServerArgs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, Phase
from sglang.srt.server_args import ServerArgs


def of(owner: Any) -> Any:
    """The arguments of a model runner, a scheduler or the tokenizer's manager."""
    return owner.server_args


# -- while they are resolved ---------------------------------------------------------------------


def asked(args: Any, name: str) -> Any:
    """An argument as it stands: the user's, or what SGLang or we have put in its place."""
    return getattr(args, name)


def choose(args: Any, name: str, value: object) -> None:
    """Put a value in place of an argument."""
    setattr(args, name, value)


def default(name: str) -> Any:
    """What SGLang has for an argument that nobody gave."""
    return getattr(ServerArgs, name)


def keep_options(args: Any, options: dict[str, Any]) -> None:
    """Let our own options go with SGLang's arguments, into every process."""
    object.__setattr__(args, "_hc_config", options)


def kept_options(args: Any) -> dict[str, Any] | None:
    """What `keep_options` put there; None where nobody asked for the tiers."""
    return getattr(args, "_hc_config", None)


def prefill_graphs(args: Any) -> str | None:
    """SGLang's choice of a back end for CUDA graphs of prefill, one of its `Backend`. None for a
    dummy model, for which it makes none."""
    graphs = args.cuda_graph_config
    return graphs.prefill.backend if isinstance(graphs, CudaGraphConfig) else None


def prefill_graphs_were_asked(args: Any, wished: str | None) -> bool:
    """Whether a flag named the back end, and not SGLang. wished: `cuda_graph_backend_prefill` as it
    was before SGLang resolved it: for some models it writes its own choice there."""
    chosen_by_sglang = wished is None and args.cuda_graph_backend_prefill is not None
    return (Phase.PREFILL, "backend") in args._cuda_graph_config_locked and not chosen_by_sglang


def leave_out_prefill_graphs(args: Any) -> None:
    """Run prefill without CUDA graphs."""
    args.cuda_graph_config.prefill.backend = Backend.DISABLED


# -- what they came to ---------------------------------------------------------------------------


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
    chunk = args.chunked_prefill_size or -1
    return PassSizes(
        chunk if chunk > 0 else None,
        args.max_prefill_tokens,
        args.enable_mixed_chunk,
        int(args.max_running_requests or 2 * args.cuda_graph_config.decode.max_bs),
        args.max_speculative_num_draft_tokens or 0,
    )


def quantization(args: Any) -> str | None:
    """How the weights are quantised."""
    return args.quantization


def kv_cache_dtype(args: Any) -> str:
    """The flag for the KV pool's elements: "auto" for the model's own type."""
    return args.kv_cache_dtype


def attention_backend(args: Any) -> str | None:
    return args.attention_backend


def is_deterministic(args: Any) -> bool:
    """Whether results are not to depend on the batch."""
    return args.enable_deterministic_inference


def has_radix_cache(args: Any) -> bool:
    """Whether SGLang keeps prefixes. It switches that off for some attention back ends."""
    return not args.disable_radix_cache


def may_have_adapters(args: Any) -> bool:
    """Whether LoRAs were named or may come."""
    return bool(args.enable_lora or args.lora_paths)


def runs_adapters(args: Any) -> bool:
    """Whether the model runner has a manager of LoRAs."""
    return bool(args.enable_lora)


def has_forward_stream(args: Any) -> bool:
    """Whether passes run on a stream of their own: with overlap scheduling and in a pipeline."""
    return not args.disable_overlap_schedule or args.pp_size > 1


def first_gpu(args: Any) -> tuple[int, float]:
    """(its number, the share of its memory for weights and KV pool)."""
    return args.base_gpu_id, args.mem_fraction_static


def replicas(args: Any) -> int:
    """Data-parallel replicas of the server."""
    return args.dp_size


def draft_algorithm(args: Any) -> str | None:
    """Of speculative decoding."""
    return args.speculative_algorithm


def served_name(args: Any) -> str:
    """What clients call the model."""
    return str(args.served_model_name or args.model_path)


def model_config(args: Any) -> Any:
    """SGLang's `ModelConfig` of the model that they name."""
    return args.get_model_config()


def api_keys(args: Any) -> tuple[str | None, str | None]:
    """(of every client, of administrators)."""
    return args.api_key, args.admin_api_key
