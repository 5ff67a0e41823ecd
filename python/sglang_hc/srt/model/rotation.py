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
from functools import partial
from typing import Any

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
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool

from sglang_hc.device.exactness import relative_error
from sglang_hc.errors import ConfigError
from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.srt.model.offload import weights_of
from sglang_hc.srt.model.startup_checks import TOLERANCE, model_kv

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

_NEAR = (64, 65, 128, 200, 255)
"""Positions that the check at start looks at, beside powers of two and the last one."""


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


def checked_rotation(runner: Any, plan: LayerPlan) -> TableRotation:
    """Moves K of the model of SGLang's runner. Raises ConfigError where it was not seen to be
    right."""
    try:
        return _checked(runner, plan)
    except CannotMove as error:
        raise ConfigError(
            f"--hc-overflow reembed: {error}, so what is stored cannot move to other positions; "
            "use --hc-overflow recompute"
        ) from None


def _checked(runner: Any, plan: LayerPlan) -> TableRotation:
    """Each layer's attention is run up to the pool on a few hidden states, at both sets of
    positions of `probes`: K of the new one must come out when K of the old one is moved. Raises
    CannotMove."""
    model, pool, dtype = runner.model, runner.token_to_kv_pool, runner.dtype
    name = type(model).__name__
    if isinstance(pool, DSATokenToKVPool):
        raise CannotMove(
            "keys of a sparse-attention index are kept in 8 bits, too coarse to rotate"
        )
    if plan.kv and pool.dtype != dtype:
        raise CannotMove(f"K is kept as {pool.dtype}, too coarse to be rotated again")
    learned = next((part for part, _ in model.named_modules() if _LEARNED.search(part)), None)
    if learned is not None:
        raise CannotMove(f"{name} adds learned positions to its embeddings ({learned})")
    found = {
        radix.layer_id: (module, radix)
        for module in model.modules()
        for radix in module.children()
        if isinstance(radix, RadixAttention)
    }
    layers = [found[layer] for layer in sorted(found)]
    rotaries = [known_rotary(getattr(module, "rotary_emb", None)) for module, _ in layers]
    if all(rotary is None for rotary in rotaries):
        raise CannotMove(f"{name} has no rotary embedding that is known")
    latent = isinstance(pool, MLATokenToKVPool)
    heads, first = (1, pool.kv_lora_rank) if latent else (pool.head_num, 0)
    width = pool.kv_cache_dim if latent else runner.model_config.hidden_size
    rotation = TableRotation(rotaries, dtype, heads, first)
    device = next(model.parameters()).device
    old, new = (places.to(device) for places in probes(runner.model_config.context_len))
    for index, (layer, rotary) in enumerate(zip(layers, rotaries, strict=True)):
        key = partial(_latent_key, first, rotary) if latent else partial(_key, *layer)
        generator = torch.Generator().manual_seed(index)
        states = torch.randn((len(old), width), generator=generator).to(device, dtype)
        weights_of(runner).ready(index)
        with torch.no_grad():
            stored, wanted = (key(states.clone(), at).reshape(len(old), -1) for at in (old, new))
        (moved,) = rotation.move(index, [stored.view(torch.uint8)], old, new)
        error = relative_error(wanted, moved.view(stored.dtype))
        if not error <= TOLERANCE[dtype]:
            raise CannotMove(
                f"K of layer {index} of {name} differs by {error:.1e} when it is moved"
            )
    return rotation


def probes(context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions, (n,) each, of the same tokens before and after moves that stand for all that a
    context of so many tokens, 128 at least, can make.

    From near the start, from each power of two and from the last position, to the first block. The
    new positions are a batch of short requests, so a table that depends on the longest one shows.
    """
    powers = (1 << bit for bit in range(6, (context - 1).bit_length()))
    old = sorted({place for place in (*_NEAR, *powers, context - 1) if place < context})
    return torch.tensor(old), torch.arange(len(old)) * 7 % BLOCK_TOKENS


def known_rotary(rotary: Any) -> Any:
    """The rotary embedding of a layer, None for one without. Raises CannotMove."""
    if rotary is not None and type(rotary) not in KNOWN:
        raise CannotMove(f"{type(rotary).__name__} does not give K a fixed place")
    return rotary


def _key(module: Any, radix: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """K of hidden states, which may be changed."""
    try:
        return model_kv(module, radix, hidden, positions)[0]
    except Exception as error:
        raise CannotMove(
            f"its attention could not be run on its own to see whether K moves ({error})"
        ) from None


def _latent_key(
    rank: int, rotary: Any, rows: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Latent rows, of which the rotary embedding alone is run. rank: columns it leaves alone."""
    key = rows[:, None, rank:]
    _, turned = rotary(positions, key.clone(), key.clone())
    return torch.cat((rows[:, None, :rank], turned), dim=-1)
