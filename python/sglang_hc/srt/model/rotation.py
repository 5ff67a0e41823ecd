"""Stored K at another position: rotated there, by the tables of the model's own rotary embedding.

K of a token is kept as attention reads it, rotated by its position. With T the module's table as
complex numbers (cos + i sin, times the factor that YaRN has), K moves from one position to another
by T[new] * conj(T[old]) / |T[old]|^2. That is exact for every table, also for those whose entries
do not compose, as a product by T[new - old] would need. The stored bytes are never rewritten, so a
state that was moved several times is rounded once more than one that was not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import (
    DeepseekScalingRotaryEmbedding,
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    Gemma4RotaryEmbedding,
    Llama3RotaryEmbedding,
)
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from sglang_hc.errors import ConfigError
from sglang_hc.forms import LayerPlan
from sglang_hc.srt.model.startup_checks import TOLERANCE, keys_of

KNOWN = (
    RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    DynamicNTKAlphaRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
    DeepseekScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    Gemma4RotaryEmbedding,
)
"""Rotary embeddings whose K is a function of the position alone, by one table of cosines and sines.
Not so: longrope picks its table per batch, mrope and dual chunks have several positions."""

_LEARNED = re.compile(r"(^|\.)(wpe|\w*position\w*)$")
"""Names of modules that add positions to the embeddings."""

_OLD = (64, 65, 128, 200, 255)
_NEW = (0, 1, 64, 8, 63)


class CannotMove(ValueError):
    """State of this model cannot move. The message is half a sentence for users."""


class TableRotation:
    """`restore.path.Rotation` by the tables of the model's modules.

    rotaries: the module of each layer. dtype: of K in the pool. heads: K heads of a row. first:
    column of a head at which the rotated ones begin.
    """

    def __init__(self, rotaries: Sequence[Any], dtype: torch.dtype, heads: int, first: int) -> None:
        self._rotaries = rotaries
        self._dtype = dtype
        self._heads = heads
        self._first = first

    def move(
        self, layer: int, parts: Sequence[torch.Tensor], old: torch.Tensor, new: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        rotary = self._rotaries[layer]
        if rotary is None:  # this layer knows no positions
            return parts
        rows = parts[0].shape[0]
        moved = parts[0].view(self._dtype).view(rows, self._heads, -1).clone()
        columns = moved[..., self._first : self._first + rotary.rotary_dim]
        # Looked up at each call: a longer table may have taken its place.
        turned = _turned(columns, rotary.cos_sin_cache, rotary.is_neox_style, old, new)
        stays = (old == new).view(rows, 1, 1)
        columns.copy_(torch.where(stays, columns, turned.to(self._dtype)))
        return [moved.view(rows, -1).view(torch.uint8), *parts[1:]]


def _turned(
    keys: torch.Tensor, table: torch.Tensor, neox: bool, old: torch.Tensor, new: torch.Tensor
) -> torch.Tensor:
    """keys (n, heads, rotary dim) in float32 at positions `new` instead of `old`."""
    cos_old, sin_old = table[old].float().unsqueeze(1).chunk(2, dim=-1)
    cos_new, sin_new = table[new].float().unsqueeze(1).chunk(2, dim=-1)
    size = cos_old * cos_old + sin_old * sin_old
    cos = (cos_new * cos_old + sin_new * sin_old) / size
    sin = (sin_new * cos_old - cos_new * sin_old) / size
    if neox:
        a, b = keys.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    a, b = keys[..., ::2].float(), keys[..., 1::2].float()
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


class _Attention(NamedTuple):
    """One layer's attention: the module, the part of it that reads the pool, and its rotary
    embedding, None for a layer without."""

    module: Any
    radix: Any
    rotary: Any


def checked_rotation(runner: Any, plan: LayerPlan) -> TableRotation:
    """Moves K of the model of SGLang's runner. Raises ConfigError where it was not seen to be
    right."""
    pool = runner.token_to_kv_pool
    try:
        if plan.kv and pool.dtype != runner.dtype:
            raise CannotMove(f"K is kept as {pool.dtype}, too coarse to be rotated again")
        return rotation_for(runner.model, pool, runner.model_config.hidden_size, runner.dtype)
    except CannotMove as error:
        raise ConfigError(
            f"--hc-overflow reembed: {error}, so what is stored cannot move to other positions; "
            "use --hc-overflow recompute"
        ) from None


def rotation_for(model: Any, pool: Any, hidden_size: int, dtype: torch.dtype) -> TableRotation:
    """Moves K of this model. Raises CannotMove where it was not seen to be right.

    Each layer's attention is run up to the pool on a few hidden states, at two sets of positions:
    K of the one must come out when K of the other is moved.
    """
    learned = next((name for name, _ in model.named_modules() if _LEARNED.search(name)), None)
    name = type(model).__name__
    if learned is not None:
        raise CannotMove(f"{name} adds learned positions to its embeddings ({learned})")
    layers = _attentions(model)
    mla = isinstance(pool, MLATokenToKVPool)
    rotaries = [_known(layer.rotary) for layer in layers]
    if all(rotary is None for rotary in rotaries):
        raise CannotMove(f"{name} has no rotary embedding that is known")
    heads = 1 if mla else pool.head_num
    rotation = TableRotation(rotaries, dtype, heads, pool.kv_lora_rank if mla else 0)
    for index, layer in enumerate(layers):
        error = (
            _rotary_error(rotation, layer, pool, dtype, index)
            if mla
            else _layer_error(rotation, layer, hidden_size, dtype, index)
        )
        if not error <= TOLERANCE[dtype]:
            raise CannotMove(
                f"K of layer {index} of {name} differs by {error:.1e} when it is moved"
            )
    return rotation


def _attentions(model: Any) -> list[_Attention]:
    """Attention of each layer, in order."""
    found: dict[int, _Attention] = {}
    for module in model.modules():
        for radix in module.children():
            if isinstance(radix, RadixAttention):
                rotary = getattr(module, "rotary_emb", None)
                found[radix.layer_id] = _Attention(module, radix, rotary)
    return [found[layer] for layer in sorted(found)]


def _known(rotary: Any) -> Any:
    if rotary is not None and type(rotary) not in KNOWN:
        raise CannotMove(f"{type(rotary).__name__} does not give K a fixed place")
    return rotary


def _layer_error(
    rotation: TableRotation, layer: _Attention, hidden_size: int, dtype: torch.dtype, index: int
) -> float:
    """Largest difference of moved K, relative to the largest K."""
    weight = next(layer.module.parameters())
    generator = torch.Generator().manual_seed(index)
    hidden = torch.randn((len(_OLD), hidden_size), generator=generator).to(weight.device, dtype)
    old, new = (torch.tensor(p, device=weight.device) for p in (_OLD, _NEW))
    try:
        stored, wanted = (keys_of(layer.module, layer.radix, hidden, p) for p in (old, new))
    except Exception as error:
        raise CannotMove(
            f"its attention could not be run on its own to see whether K moves ({error})"
        ) from None
    return _difference(rotation, index, stored, wanted, old, new)


def _rotary_error(
    rotation: TableRotation, layer: _Attention, pool: Any, dtype: torch.dtype, index: int
) -> float:
    """The same for a latent row, of which the rotary embedding alone is run."""
    rotary = layer.rotary
    device = rotary.cos_sin_cache.device
    generator = torch.Generator().manual_seed(index)
    row = torch.randn((len(_OLD), 1, pool.kv_cache_dim), generator=generator).to(device, dtype)
    old, new = (torch.tensor(p, device=device) for p in (_OLD, _NEW))

    def at(positions: torch.Tensor) -> torch.Tensor:
        key = row[..., pool.kv_lora_rank :].clone()
        _, turned = rotary(positions, key.clone(), key)
        return torch.cat((row[..., : pool.kv_lora_rank], turned), dim=-1)

    return _difference(rotation, index, at(old), at(new), old, new)


def _difference(
    rotation: TableRotation, layer: int, stored: torch.Tensor, wanted: torch.Tensor,
    old: torch.Tensor, new: torch.Tensor,
) -> float:  # fmt: skip
    rows = stored.contiguous().view(len(_OLD), -1).view(torch.uint8)
    (moved,) = rotation.move(layer, [rows], old, new)
    got = moved.view(stored.dtype).view(wanted.reshape(len(_OLD), -1).shape).float()
    reference = wanted.reshape(len(_OLD), -1).float()
    return float((got - reference).abs().max()) / (float(reference.abs().max()) or 1.0)
