"""What SGLang 0.5.23 needs to serve on a machine without an accelerator."""

from __future__ import annotations

from typing import Any

from sglang_hc.config import ConfigError
from sglang_hc.srt.binding.arguments import asked, choose

SGLANGS_ATTENTION = "SGLANG_HC_SGLANGS_ATTENTION"
"""Environment variable of comparisons: with "1" SGLang's own attention stays in place on a CPU, see
`srt.model.cpu_attention`."""


def enable() -> None:
    """Let rotary embeddings be built without CUDA, and MLA models choose their attention.

    Without this SGLang looks for a CUDA kernel in another package and fails; the kernel is not used
    by the native path that a CPU takes. For a back end that it does not list, it splits prefill
    from the latent KV, which torch_native cannot do.
    """
    from sglang.srt.layers.rotary_embedding import base

    if not hasattr(base, "_is_cpu"):
        raise RuntimeError(
            "sglang.srt.layers.rotary_embedding.base has no _is_cpu: "
            "this SGLang cannot serve on a CPU"
        )
    base._is_cpu = True
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register("torch_native", handler._dispatch_mla_subtype)


def check_speculation(args: Any) -> None:
    """Raise ConfigError where SGLang has no kernels to verify proposed tokens with: its own CPU
    build, which SGLANG_USE_CPU_ENGINE selects, brings them, and the wheel does not."""
    from sglang.srt.utils import is_cpu

    algorithm = asked(args, "speculative_algorithm")
    if algorithm is not None and not is_cpu():
        raise ConfigError(
            f"--speculative-algorithm {algorithm} needs a GPU: SGLang's wheel has "
            "no kernels for it without one; leave the flag out"
        )


def choose_backends(args: Any) -> list[str]:
    """Fill in what a CPU needs and the user did not choose; returns that as `name=value`."""
    chosen = {
        "device": (None, "cpu"),
        "attention_backend": (None, "torch_native"),
        "sampling_backend": (None, "pytorch"),
        "grammar_backend": (None, "none"),
        "sleep_on_idle": (False, True),
    }
    if asked(args, "grammar_backend") == "xgrammar":
        raise ConfigError(
            "--grammar-backend xgrammar needs a GPU: its masks are made for one, and the first "
            "request with a grammar would end the server; give outlines"
        )
    if asked(args, "enable_deterministic_inference"):
        raise ConfigError(
            "--enable-deterministic-inference needs a GPU: SGLang's operators that do not depend "
            "on the batch are kernels for one; on a CPU --hc-exact makes restored state bit-exact"
        )
    said = []
    for name, (unset, value) in chosen.items():
        if asked(args, name) == unset:
            choose(args, name, value)
            said.append(f"{name}={value}")
    return said
