"""What differs between model families when K and V are rebuilt from hidden states.

A family is listed here once its restored K/V were checked against the model's own; every other
model is served with KV form. All listed families share one shape of the attention input: a fused
QKV projection whose output rows are [q | k | v], an optional norm of K per head, an optional rotary
embedding. What they do not share is where the modules are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from sglang_hc.device.exactness import Product


@dataclass(frozen=True)
class Family:
    """Attribute names, from the model down to the modules of one layer."""

    layers: str = "model.layers"
    attention: str = "self_attn"
    qkv: str = "qkv_proj"
    k_norm: str | None = None
    rotary: str | None = "rotary_emb"


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(k_norm="k_norm"),
    "GemmaForCausalLM": Family(),
    "PhiForCausalLM": Family(),
    "OPTForCausalLM": Family(layers="model.decoder.layers", rotary=None),
    "GPT2LMHeadModel": Family(layers="transformer.h", attention="attn", qkv="c_attn", rotary=None),
    "GraniteForCausalLM": Family(),
    "Starcoder2ForCausalLM": Family(),
}


class LayerAdapter:
    """K and V of one layer from its hidden states."""

    def __init__(self, attention: Any, family: Family) -> None:
        self.attention = attention
        self.qkv = getattr(attention, family.qkv)
        self.radix = attention.attn
        self.k_norm = getattr(attention, family.k_norm) if family.k_norm else None
        self.rotary = getattr(attention, family.rotary) if family.rotary else None
        self.kv_heads = self.qkv.num_kv_heads
        self.head_dim = self.qkv.head_size
        self.v_head_dim = getattr(self.qkv, "v_head_size", self.head_dim)
        self.q_rows = self.qkv.num_heads * self.head_dim
        self._k_rows = self.kv_heads * self.head_dim
        self.sliceable = type(self.qkv.quant_method) is UnquantizedLinearMethod
        """Whether the K and V part of the projection is run; else the whole of it is."""
        self.linear: Product = torch.nn.functional.linear
        """Product of a sliced projection; `exactness.choose_product` may choose another one."""
        self.models_product = False
        """Whether restorations may run no other product than the model's: kernels of our own add up
        in another order."""
        self.ready: Callable[[], None] = lambda: None
        """Called before the layer's weights are used: they may lie in host memory."""

    @property
    def has_other_norm(self) -> bool:
        """Whether K has a norm that is not SGLang's RMSNorm."""
        return self.k_norm is not None and type(self.k_norm) is not RMSNorm

    def kv_weight(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of the fused projection that give K and V, and their bias. For sliceable weights.

        Looked up at each call, so that updated weights count at once.
        """
        self.ready()
        bias = self.qkv.bias
        return self.qkv.weight[self.q_rows :], None if bias is None else bias[self.q_rows :]

    def project(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden (n, size), positions (n,) int64 -> K (n, heads, dim), V (n, heads, v dim)."""
        if self.sliceable:
            kv = self.linear(hidden, *self.kv_weight())
        else:
            self.ready()
            # Not the module itself: a tap hangs on it and would take these rows for new ones.
            kv = self.qkv.quant_method.apply(self.qkv, hidden, self.qkv.bias)[:, self.q_rows :]
        k, v = kv.split([self._k_rows, kv.shape[1] - self._k_rows], dim=-1)
        rows = hidden.shape[0]
        if self.k_norm is not None:
            k = self.k_norm(k.reshape(-1, self.head_dim)).view(rows, self._k_rows)
        if self.rotary is not None:
            # The rotary embedding wants queries and keys, and on CUDA rotates both in place. Some
            # of its kernels want the heads of the former to be a multiple of those of the latter:
            # K goes in as queries, beside a key of one head.
            key = torch.zeros((rows, self.head_dim), dtype=k.dtype, device=k.device)
            k, _ = self.rotary(positions, k.contiguous(), key)
        return (
            k.reshape(rows, self.kv_heads, self.head_dim),
            v.reshape(rows, self.kv_heads, self.v_head_dim),
        )


def family_of(model: torch.nn.Module) -> Family | None:
    """The model's entry in the allow-list."""
    return FAMILIES.get(type(model).__name__)


def restorable_layers(model: torch.nn.Module) -> list[LayerAdapter] | None:
    """Adapters of a listed family's layers that this rank has; None for another family, and for
    quantised projections: what they keep is not a matrix of the model's type, and none was ever
    checked."""
    family = family_of(model)
    if family is None:
        return None
    layers = layer_modules(model, family)
    return layers if all(layer.sliceable for layer in layers) else None


def layer_modules(model: torch.nn.Module, family: Family) -> list[LayerAdapter]:
    """Adapters of the layers that this rank has, in order."""
    every = list(model.get_submodule(family.layers))
    held = held_layers(model, len(every))
    return [LayerAdapter(getattr(every[index], family.attention), family) for index in held]


def held_layers(model: torch.nn.Module, count: int) -> range:
    """Which of a model's `count` layers this rank has: those of its pipeline stage."""
    return range(getattr(model, "start_layer", 0), getattr(model, "end_layer", count))
