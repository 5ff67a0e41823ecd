"""One layer of the loaded model with scratch rows of a KV pool: what the cost model is probed on.
There are rows of several layers, which restorations write in turn.

It is measured right after the weights are loaded, because the layer plan has to be known before
CUDA graphs are captured; there is no KV pool, no attention backend and no batch yet. So a prefill
is stood in for by one matrix product and one attention of the same size, which flatters experts,
and hidden states are projected by the model's own modules, where a GPU may serve with a faster
kernel. What both really take is learned from the first requests (`policy.correction`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_cache_configurator import calculate_mla_kv_cache_dim
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear, scaled_dot_product_attention

from sglang_hc.device.copy_stream import copy_stream_for
from sglang_hc.device.gather_scatter import scatter
from sglang_hc.errors import ConfigError
from sglang_hc.forms import StateShape
from sglang_hc.restore.probe import LAYERS, ROWS, Subject
from sglang_hc.restore.staging import StagingRing
from sglang_hc.srt.binding import arguments, parallel
from sglang_hc.srt.model.columns import columns_of
from sglang_hc.srt.model.families import LayerAdapter
from sglang_hc.srt.model.sparse_index import parts_of_model
from sglang_hc.srt.ranks.start_group import StartGroup

Prefill = Callable[[int, int], None]


def subject_of(
    runner: Any, layers: list[LayerAdapter] | None, hidden: bool, group: StartGroup
) -> Subject:
    """What to measure. hidden: whether the model's layers can be kept as hidden states. group: the
    ranks that run a layer together."""
    rows = min(ROWS, runner.model_config.context_len)
    device, shape = torch.device(runner.device), model_shape(runner)
    middle = layers[len(layers) // 2] if layers is not None and hidden else None
    sink = _ScratchRows(shape.kv_parts, rows, device, middle)
    staging = StagingRing.sized_for(shape, device, copy_stream_for(device))
    return Subject(shape, staging, sink, stand_in(runner, rows), rows, hidden, group.most)


def model_shape(runner: Any) -> StateShape:
    """What the layers of this rank store, as SGLang's modules keep it."""
    config, dtype = runner.model_config, kv_dtype(runner)
    radix = _attention_in(runner.model)
    if config.attention_arch == AttentionArch.MLA:
        row = calculate_mla_kv_cache_dim(model_config=config, kv_cache_dtype=dtype)
        whole = row * dtype.itemsize, *parts_of_model(config)
        parts = tuple(columns_of(part).count for part in whole)
    else:
        row = radix.tp_k_head_num * dtype.itemsize
        parts = row * radix.qk_head_dim, row * radix.v_head_dim
    hidden = columns_of(config.hidden_size).count * runner.dtype.itemsize
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


def reads_elsewhere(model: torch.nn.Module) -> bool:
    """Whether a layer attends to K and V that it has not computed itself: those of another layer
    (Gemma 3n), or of an encoder."""
    found = _attentions(model).values()
    return len(found) > _layers_of(model) or any(radix.is_cross_attention for radix in found)


def _layers_of(model: torch.nn.Module) -> int:
    return len({radix.layer_id for radix in _attentions(model).values()})


def layer_weights(model: torch.nn.Module) -> float:
    """Weights of one layer that a token passes through on this rank, averaged over its layers: of
    experts those that it is routed to."""
    return sum(map(token_weights, _layers_in(model).modules())) / _layers_of(model)


def stored_weights(model: torch.nn.Module) -> float:
    """Weights of one layer with all its experts on this rank, averaged over its layers."""
    found = (token_weights(m) * _experts(m) for m in _layers_in(model).modules())
    return sum(found) / _layers_of(model)


def layer_bytes(model: torch.nn.Module) -> float:
    """Bytes of what one layer has stored of them, however it is quantised, averaged likewise."""
    parameters = _layers_in(model).parameters()
    return sum(one.numel() * one.itemsize for one in parameters) / _layers_of(model)


def _layers_in(model: torch.nn.Module) -> torch.nn.Module:
    """What has the layers, for example `model.layers`."""
    return model.get_submodule(re.split(r"\.\d+\.", next(iter(_attentions(model))))[0])


def _experts(module: Any) -> float:
    """How many times the weights that a token passes through a module has."""
    return module.num_local_experts / module.top_k if hasattr(module, "w13_weight") else 1.0


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
        server_args_kv_cache_dtype=arguments.kv_cache_dtype(arguments.of(runner)),
        model=runner.model,
        model_dtype=runner.dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend=None,
    )
    return dtype


def stand_in(runner: Any, rows: int) -> Prefill:
    """One matrix product and one causal attention with the FLOPs of a layer of this rank, and the
    two sums over all ranks of a stage."""
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
        if parallel.tp_size() > 1:
            for _ in range(2):
                parallel.sum_over_ranks(states[:new].clone())

    return prefill


class _ScratchRows:
    """Rows of LAYERS layers of a device pool, as bytes."""

    def __init__(
        self,
        parts: tuple[int, ...],
        rows: int,
        device: torch.device,
        adapter: LayerAdapter | None,
    ) -> None:
        """adapter: of the layer that hidden states are projected by; None for a model without a
        projection of ours."""
        self._adapter = adapter
        self._rows = [
            [torch.zeros((rows, part), dtype=torch.uint8, device=device) for part in parts]
            for _ in range(LAYERS)
        ]

    def write_hidden(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        assert self._adapter is not None, "hidden states of this model cannot be projected"
        weight = self._adapter.qkv.weight
        states = columns_of(weight.shape[1]).whole(hidden.view(weight.dtype))
        parts = [part.flatten(1).contiguous() for part in self._adapter.project(states, positions)]
        self.write_kv(layer, [part.view(torch.uint8) for part in parts], slots)

    def write_kv(self, layer: int, parts: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        for target, rows in zip(self._rows[layer], parts, strict=True):
            scatter(target, slots, rows)
