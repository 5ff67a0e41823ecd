"""Which model made a state. A path does not say, neither on another host nor next week."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import sglang
import torch
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.environ import envs

from sglang_hc import __version__
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.model.offload import weights_of
from sglang_hc.srt.ranks.start_group import StartGroup

SAMPLES = 1024
"""Elements of each tensor that enter the digest with their places."""


def model_identity(runner: Any, group: StartGroup) -> list[str]:
    """What a state depends on beside its tokens and its layout: the weights as they were loaded,
    how they are used, and the versions of this package and of SGLang, which computes it. Where the
    checkpoint lies is not part of it. The same on all ranks of the group."""
    args = arguments.of(runner)
    config = json.loads(runner.model_config.hf_config.to_json_string(use_diff=False))
    return [
        __version__,
        sglang.__version__,
        json.dumps(_without_paths(config), sort_keys=True),
        str(arguments.quantization(args)),
        group.digest(cache_scales(runner.model)),
        str(arguments.attention_backend(args)),
        str(arguments.kv_cache_dtype(args)),
        group.digest(weights_digest(runner.model, weights_of(runner).ready_to_read)),
        *([f"{group.size} ranks"] if group.size > 1 else []),
        *([f"images by {backend}"] if (backend := arguments.image_backend(args)) else []),
        *(_of_sparse_attention(args) if is_deepseek_dsa(runner.model_config.hf_config) else []),
        *_left_out(),
    ]


def _left_out() -> list[str]:
    """Parts of a softmax that SGLang leaves out by its environment: later layers see it."""
    found = (
        (phase, getattr(envs, f"SGLANG_SKIP_SOFTMAX_{phase}_THRESHOLD_SCALE_FACTOR").get())
        for phase in ("PREFILL", "DECODE")
    )
    return [f"{phase} leaves out below {scale}" for phase, scale in found if scale is not None]


def _of_sparse_attention(args: Any) -> list[str]:
    """What decides to which tokens a token attends, beside the model and ties. Whether keys of the
    index are turned before they are rounded shows in the names of the weights."""
    dense = envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD.get()
    return [*arguments.sparse_backends(args), f"dense up to {dense} tokens"]


def _without_paths(config: Any) -> Any:
    """A model's configuration, or a part of it, without the places it was read from."""
    if not isinstance(config, dict):
        return config
    return {key: _without_paths(part) for key, part in config.items() if key != "_name_or_path"}


def weights_digest(
    model: torch.nn.Module, before: Callable[[torch.Tensor], None] = lambda tensor: None
) -> str:
    """Digest over every parameter and every buffer that a checkpoint may hold: name, shape, dtype,
    the sum of its words, and SAMPLES of them.

    The sum sees a change of any single element, the samples see elements that changed places. Reads
    each weight once, where it lies; no defence against somebody who forges weights. before: called
    before a tensor is read.
    """
    state = hashlib.blake2b(digest_size=16, person=b"hc weights")
    sums: list[torch.Tensor] = []
    samples: list[torch.Tensor] = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        before(tensor)
        state.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
        words = _words(tensor.detach())
        sums.append(words.sum(dtype=torch.int64).reshape(1))
        samples.append(words[:: max(1, len(words) // SAMPLES)].to(torch.int64))
    for found in (sums, samples):
        for part in found:
            state.update(part.cpu().numpy().tobytes())
    return state.hexdigest()


def cache_scales(model: torch.nn.Module) -> str:
    """Digest of the scales of an 8-bit KV cache as they were loaded. They are no tensors of a
    model, and the path of their file does not say what is in it."""
    scales = [
        (name, module.k_scale_float, module.v_scale_float)
        for name, module in model.named_modules()
        if hasattr(module, "k_scale_float")
    ]
    return hashlib.blake2b(json.dumps(scales).encode(), digest_size=16).hexdigest()


def adapter_digest(adapter: Any) -> str:
    """Digest of a loaded LoRA adapter: how it is scaled, and every byte of its weights. Neither its
    name nor where it came from is part of it. adapter: SGLang's LoRAAdapter."""
    state = hashlib.blake2b(digest_size=16, person=b"hc adapter")
    state.update(f"{adapter.scaling!r}\n".encode())
    groups = [layer.weights for layer in adapter.layers]
    groups += [adapter.embedding_layers, adapter.added_tokens_embeddings]
    for index, weights in enumerate(groups):
        for name, tensor in sorted(weights.items()):
            state.update(f"{index}:{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
            state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return state.hexdigest()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers, shape (n,), of the widest size that fits."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    for dtype in (torch.int32, torch.int16):
        if raw.numel() % dtype.itemsize == 0 and raw.storage_offset() % dtype.itemsize == 0:
            return raw.view(dtype)
    return raw
