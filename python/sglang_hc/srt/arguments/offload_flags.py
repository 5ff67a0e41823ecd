"""What of SGLang goes with weights in host memory (`--hc-offload-gb`)."""

from __future__ import annotations

import logging
from typing import Any

from sglang_hc.config import ConfigError
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.binding.arguments import asked, choose

logger = logging.getLogger(__name__)

SWITCHES = {
    "enable_lora": "adapters beside them were not tested",
    "lora_paths": "adapters beside them were not tested",
    "speculative_algorithm": "verify passes over them were not tested",
    "enable_eplb": "experts move between the places of their weights",
    "enable_elastic_expert_backup": "it reads the weights of experts where it left them",
    "kt_weight_path": "its experts lie in host memory already",
    "enable_memory_saver": "it takes weights from the device and brings them back",
    "enable_weights_cpu_backup": "it takes weights from the device and brings them back",
    "ple_offload_embedding": "SGLang leaves such a model to one way of offloading",
    "remote_instance_weight_loader_start_seed_via_transfer_engine": (
        "other servers would read weights that are not there"
    ),
}
"""Arguments of SGLang that are refused beside it, and why."""

LOAD_FORMATS = ("auto", "pt", "safetensors", "npcache", "dummy", "mistral")
"""Whose loaders fill weights in place, wherever these are."""

QUANTISED_ELSEWHERE = (
    *("bitsandbytes", "gguf", "expert_pack"),
    *("modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mixed"),
)
"""Quantisations whose weights are not all in the parameters of their layer."""


def begin(args: Any) -> None:
    """Refuse what cannot go with weights in host memory, and have passes take what there is: each
    has to wait for all of them. Raises ConfigError."""
    refuse_modes(args)
    choose(args, "enable_mixed_chunk", True)
    logger.info("sglang-hc: --hc-offload-gb: mixed chunks are on: each pass waits for all weights")


def refuse_modes(args: Any) -> None:
    """Raise ConfigError for what cannot go with weights in host memory."""
    for name, why in SWITCHES.items():
        if asked(args, name):
            raise _refusal(f"--{name.replace('_', '-')}", why)
    for name, good in (("load_format", LOAD_FORMATS), ("weight_cache_mode", ("off",))):
        value = str(getattr(asked(args, name), "value", asked(args, name)))
        if value not in good:
            why = f"weights in host memory were tested only with {', '.join(good)}"
            raise _refusal(f"--{name.replace('_', '-')} {value}", why)
    if asked(args, "quantization") in QUANTISED_ELSEWHERE:
        why = "not all of its weights are parameters of their layer"
        raise _refusal(f"--quantization {asked(args, 'quantization')}", why)


def check_graphs(args: Any) -> None:
    """Behind SGLang's choice of CUDA graphs: none replays a layer whose weights have to come.
    Raises ConfigError for those that a flag asks for."""
    why = "a graph replays kernels, and waits for no weights"
    for phase in arguments.asked_graphs(args):
        raise _refusal(f"--cuda-graph-backend-{phase} (or the same in --cuda-graph-config)", why)
    arguments.leave_out_graphs(args)
    logger.info("sglang-hc: --hc-offload-gb: passes run without CUDA graphs: %s", why)


def _refusal(what: str, why: str) -> ConfigError:
    return ConfigError(f"--hc-offload-gb and {what}: {why}; leave one of the two out")
