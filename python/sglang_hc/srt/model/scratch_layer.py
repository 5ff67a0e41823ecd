"""One layer of the loaded model with a scratch KV pool: what the cost model is measured on. The
pool has several layers alike, which restorations write in turn.

It is measured right after the weights are loaded, because the layer plan has to be known before
CUDA graphs are captured; there is no KV pool, no attention backend and no batch yet. So the model's
own middle layer is run (norms, projections, feed-forward or experts), and only its attention proper
is ours: torch's scaled dot product over the scratch pool's rows. A layer that cannot be run that
way, and any family that is not on the allow-list, is stood in for by one matrix product and one
attention of the same size, which flatters experts.

Hidden states are projected by the way that would be chosen to serve (`projection.py`). Attention is
not that of the serving back end, which needs the KV pool: where the latter is faster than torch's,
prefill looks dearer than it is, and restorations are preferred a little too often.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear, scaled_dot_product_attention

from sglang_hc.device.copy_stream import copy_stream_for
from sglang_hc.device.gather_scatter import scatter
from sglang_hc.errors import ConfigError
from sglang_hc.forms import StateShape
from sglang_hc.restore.measure import LAYERS, MAX_ROWS, Subject
from sglang_hc.restore.staging import StagingRing
from sglang_hc.srt.model import cpu_attention
from sglang_hc.srt.model.columns import columns_of
from sglang_hc.srt.model.families import LayerAdapter
from sglang_hc.srt.model.kv_pool import KvPoolRows
from sglang_hc.srt.model.projection import Projection, by_sglang, projection_for
from sglang_hc.srt.ranks.start_group import StartGroup

logger = logging.getLogger(__name__)

Prefill = Callable[[int, int], None]


def subject_of(
    runner: Any, layers: list[LayerAdapter] | None, hidden: bool, group: StartGroup
) -> Subject:
    """What to measure. hidden: whether the model's layers can be kept as hidden states. group: the
    ranks that run a layer together."""
    rows = min(MAX_ROWS, runner.model_config.context_len)
    if layers is not None:
        return _of_layer(runner, layers, rows, hidden, group)
    device = torch.device(runner.device)
    shape = model_shape(runner)
    sink = _ByteRows(shape.kv_parts, rows, device)
    prefill = stand_in(runner, rows)
    staging = StagingRing.sized_for(shape, device, copy_stream_for(device))
    return Subject(shape, staging, sink, prefill, rows, False, group.most)


def model_shape(runner: Any) -> StateShape:
    """What the layers of this rank store, as SGLang's modules keep it."""
    config, width = runner.model_config, kv_dtype(runner).itemsize
    radix = _attention_in(runner.model)
    if config.attention_arch == AttentionArch.MLA:
        row = (config.kv_lora_rank + config.qk_rope_head_dim) * width
        parts: tuple[int, ...] = (columns_of(runner, row).count,)
    else:
        row = radix.tp_k_head_num * width
        parts = row * radix.qk_head_dim, row * radix.v_head_dim
    hidden = columns_of(runner, config.hidden_size).count * runner.dtype.itemsize
    return StateShape(_layers_of(runner.model), hidden, parts, str(runner.dtype))


def _attentions(model: torch.nn.Module) -> dict[str, RadixAttention]:
    """The parts of all layers' attention that read the pool, by name. Raises ConfigError."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, RadixAttention)}
    if not found:
        raise ConfigError(
            f"sglang-hc does not support {type(model).__name__}: it keeps no rows of K and V in a "
            "pool. Add --hc-disable to serve without the tiers"
        )
    return found


def _attention_in(model: torch.nn.Module) -> RadixAttention:
    """One of them. MLA has two in each layer: this is the one with the shorter heads, which runs
    prefills."""
    found = _attentions(model).values()
    return min(found, key=lambda radix: radix.qk_head_dim + radix.v_head_dim)


def _layers_of(model: torch.nn.Module) -> int:
    return len({radix.layer_id for radix in _attentions(model).values()})


def layer_weights(model: torch.nn.Module) -> float:
    """Weights of one layer that a token passes through on this rank, averaged over its layers: of
    experts those that it is routed to."""
    name = next(iter(_attentions(model)))
    layers = model.get_submodule(re.split(r"\.\d+\.", name)[0])  # e.g. model.layers
    return sum(map(token_weights, layers.modules())) / _layers_of(model)


def token_weights(module: Any) -> int:
    """Weights of a module itself that one token passes through on this rank."""
    if isinstance(module, LinearBase):
        rows = getattr(module, "output_size_per_partition", module.output_size)
        return int(rows * getattr(module, "input_size_per_partition", module.input_size))
    if hasattr(module, "w13_weight"):  # a gate, an up and a down matrix of each expert
        return int(3 * module.top_k * module.hidden_size * module.intermediate_size_per_partition)
    return 0


def kv_dtype(runner: Any) -> torch.dtype:
    """Element type that the KV pool will have."""
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=runner.server_args.kv_cache_dtype,
        model=runner.model,
        model_dtype=runner.dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend=None,
    )
    return dtype


def _of_layer(
    runner: Any, layers: list[LayerAdapter], rows: int, hidden: bool, group: StartGroup
) -> Subject:
    adapter = layers[len(layers) // 2]
    device = adapter.qkv.weight.device
    pool = scratch_pool(adapter, rows, kv_dtype(runner))
    alike = [adapter] * LAYERS
    project: Projection = by_sglang
    if hidden and device.type == "cuda":
        # What is measured is what serves: the way is chosen again on the whole pool, by the same
        # rules and on a layer of the same size.
        slots = scratch_slots(rows, device)
        project = projection_for(pool, alike, slots, runner.model_config.context_len)
    width = adapter.qkv.weight.shape[1]
    sink = KvPoolRows(pool, alike, project, columns=partial(columns_of, runner))
    layer = decoder_layer(runner.model, adapter.attention)
    try:
        prefill = real_layer(layer, adapter, pool, rows, width, runner.dtype)
        with torch.no_grad():
            prefill(min(8, rows), 0)
            prefill(min(8, rows // 2), rows // 2)
    except Exception as error:
        logger.warning(
            "sglang-hc: %s cannot be run on its own (%s: %s); prefill is measured on a stand-in of "
            "the same size",
            type(layer).__name__,
            type(error).__name__,
            error,
        )
        prefill = stand_in(runner, rows)
    shape = model_shape(runner)
    staging = StagingRing.sized_for(shape, device, copy_stream_for(device))
    return Subject(shape, staging, sink, prefill, rows, hidden, group.most)


def scratch_slots(rows: int, device: torch.device) -> torch.Tensor:
    """(rows,) int64 slots of a scratch pool, from 1 on, as an allocator gives them.

    SGLang keeps slot 0 for padding, and its kernels write nothing there. A pool has a page more
    than its rows.
    """
    return torch.arange(1, rows + 1, dtype=torch.int64, device=device)


def scratch_pool(adapter: LayerAdapter, rows: int, dtype: torch.dtype) -> MHATokenToKVPool:
    """A KV pool of LAYERS layers like this one, on the device of its weights; the first has its
    number."""
    return MHATokenToKVPool(
        size=rows,
        page_size=1,
        dtype=dtype,
        head_num=adapter.kv_heads,
        head_dim=adapter.head_dim,
        v_head_dim=adapter.v_head_dim,
        layer_num=LAYERS,
        device=str(adapter.qkv.weight.device),
        enable_memory_saver=False,
        start_layer=adapter.radix.layer_id,
    )


def real_layer(
    layer: Any, adapter: LayerAdapter, pool: Any, rows: int, width: int, dtype: torch.dtype
) -> Prefill:
    """Runs a decoder layer over (new, context) tokens whose K and V are the first pool rows."""
    device = adapter.qkv.weight.device
    states = torch.randn((rows, width), device=device, dtype=torch.float32).to(dtype)
    slots = torch.arange(rows, dtype=torch.int64, device=device)
    names = inspect.signature(layer.forward).parameters
    context_of = ForwardContext(attn_backend=SimpleNamespace(token_to_kv_pool=pool))

    def prefill(new: int, context: int) -> None:
        positions = slots[context : context + new]

        def attend(q: Any, k: Any, v: Any, *_: Any, save_kv_cache: bool = True, **__: Any) -> Any:
            if save_kv_cache and k is not None:
                k = k.view(new, adapter.kv_heads, adapter.head_dim)
                v = v.view(new, adapter.kv_heads, adapter.v_head_dim)
                pool.set_kv_buffer(adapter.radix, positions, k, v)
            return _attention(q, adapter.radix, pool, new, context)

        hidden = states[context : context + new]
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=positions,
            req_pool_indices=slots[:1],
            seq_lens=slots[context + new - 1 : context + new] + 1,
            out_cache_loc=positions,
            seq_lens_sum=context + new,
        )
        known = {
            "positions": positions,
            "position_ids": positions,
            "hidden_states": hidden.clone(),
            "residual": hidden.clone(),
            "forward_batch": batch,
        }
        radix = adapter.radix
        radix.forward = attend
        try:
            with forward_context(context_of):
                layer.forward(**{name: known[name] for name in names if name in known})
        finally:
            del radix.forward

    return prefill


def _attention(q: torch.Tensor, radix: Any, pool: Any, new: int, context: int) -> torch.Tensor:
    """What the attention backend would compute for one request."""
    length = context + new
    query = q.reshape(new, radix.tp_q_head_num, radix.qk_head_dim)
    k_cache, v_cache = pool.get_kv_buffer(radix.layer_id)
    grouped = radix.tp_q_head_num != radix.tp_k_head_num
    if not query.is_cuda:
        output = query.new_empty((new, radix.tp_q_head_num, radix.v_head_dim))
        one = torch.zeros(1, dtype=torch.int64)
        every = torch.arange(length).unsqueeze(0)
        counts = [torch.tensor([n]) for n in (length, context, new)]
        cpu_attention.extend(
            _never, None, query, output, k_cache, v_cache, every, one, *counts,
            causal=True, scaling=radix.scaling, enable_gqa=grouped,
        )  # fmt: skip
        return output.view(new, -1)
    result = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        k_cache[:length].to(query.dtype).transpose(0, 1).unsqueeze(0),
        v_cache[:length].to(query.dtype).transpose(0, 1).unsqueeze(0),
        attn_mask=causal_lower_right(new, length),
        scale=radix.scaling,
        enable_gqa=grouped,
    )
    return result.squeeze(0).transpose(0, 1).reshape(new, -1)


def _never(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("plain causal attention does not need SGLang's own")


def stand_in(runner: Any, rows: int) -> Prefill:
    """One matrix product and one causal attention with the FLOPs of a layer of this rank."""
    device, dtype, size = torch.device(runner.device), runner.dtype, runner.model_config.hidden_size
    wide = max(1, round(layer_weights(runner.model) / size))
    weight = torch.randn((wide, size), device=device, dtype=torch.float32).to(dtype)
    states = torch.randn((rows, size), device=device, dtype=torch.float32).to(dtype)
    radix = _attention_in(runner.model)
    dim = max(1, (radix.qk_head_dim + radix.v_head_dim) // 2)
    heads = torch.randn((1, radix.tp_q_head_num, rows, dim), device=device, dtype=dtype)

    def prefill(new: int, context: int) -> None:
        linear(states[:new], weight)
        length = context + new
        mask = causal_lower_right(new, length)
        seen = heads[:, :, :length]
        scaled_dot_product_attention(heads[:, :, :new], seen, seen, attn_mask=mask)

    return prefill


def decoder_layer(model: torch.nn.Module, attention: torch.nn.Module) -> torch.nn.Module:
    """The module that holds the attention module: the layer it belongs to."""
    for module in model.modules():
        if any(child is attention for child in module.children()):
            return module
    raise AssertionError("an attention module outside the model")


class _ByteRows:
    """A device pool's rows as bytes, for models without a projection of ours."""

    def __init__(self, parts: tuple[int, ...], rows: int, device: torch.device) -> None:
        self._rows = [
            [torch.zeros((rows, part), dtype=torch.uint8, device=device) for part in parts]
            for _ in range(LAYERS)
        ]

    def write_hidden(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        raise AssertionError("hidden states of this model cannot be projected")

    def write_kv(self, layer: int, parts: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        for target, rows in zip(self._rows[layer], parts, strict=True):
            scatter(target, slots, rows)
