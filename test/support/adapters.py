"""Adapters for tests, and what lets SGLang's LoRA run on a CPU: it pins memory at every step, which
needs an accelerator, so nothing is pinned. The rest is its own code with its back end
`torch_native`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.core import MODELS, Core

RANK = 4


ATTENTION = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
MLP = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"


def write_adapter(folder: Path, seed: int, model: str, adapted: tuple[str, ...] = ATTENTION) -> str:
    """A folder like one of PEFT: random weights for projections of all layers. model: a name in
    `MODELS`, or a path."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    with safe_open(MODELS / model / "model.safetensors", "pt") as checkpoint:
        for key in sorted(checkpoint.keys()):
            place = key.removesuffix(".weight")
            if not place.endswith(adapted):
                continue
            rows, columns = checkpoint.get_slice(key).get_shape()
            for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                random_part = torch.randn(shape, generator=generator) * 0.1
                weights[f"base_model.model.{place}.lora_{part}.weight"] = random_part
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    targets = sorted(name.partition(".")[2] for name in adapted)
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return str(folder)


def adapter_flags(paths: Mapping[str, str], at_once: int) -> tuple[str, ...]:
    """Flags of an engine with these adapters, by name, so many of them on the device at once. A
    process that has no GPU pins nothing from then on."""
    pin_nothing()
    named = (f"{name}={path}" for name, path in paths.items())
    back_end = ("--lora-backend", "torch_native", "--max-loras-per-batch", str(at_once))
    return ("--lora-paths", *named, *back_end)


def adapter_ids(core: Core) -> dict[str, str]:
    """By name."""
    refs = core.scheduler.tp_worker.model_runner.lora_manager.lora_refs
    return {ref.lora_name: lora for lora, ref in refs.items()}


def pin_nothing() -> None:
    """From now on this thread's tensors are not pinned, whoever asks for it."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Unpinned(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.pin_memory:
                return args[0]
            given = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
            return func(*args, **given)

    Unpinned().__enter__()
