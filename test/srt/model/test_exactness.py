"""The proof of bit identity at start, over layers whose products depend on their rows.

No engine: an attention module of a few lines with SGLang's fused projection, whose product is made
to depend on the number of rows, on the columns, or on nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from sglang_hc.config import ConfigError
from sglang_hc.device.exactness import tiled
from sglang_hc.srt.arguments.server_args import check_radix_cache
from sglang_hc.srt.model import exactness
from sglang_hc.srt.model.exactness import FixedTiles, choose_product, measure, use_plain_products
from sglang_hc.srt.model.families import Family, LayerAdapter
from support.products import backwards_where, by_count, in_order

SIZE, HEADS, DIM = 32, 1, 8
Q_ROWS = HEADS * DIM


by_columns = backwards_where(lambda _, columns: columns != 3 * Q_ROWS)
by_both = backwards_where(lambda rows, columns: rows <= 3 or columns != 3 * Q_ROWS)


def by_place(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Every other row of any product in another order: no tile helps."""
    result = in_order(rows, weight, bias)
    result[1::2] = in_order(rows[1::2], weight, bias, backwards=True)
    return result


class Projection(torch.nn.Module):
    """As much of SGLang's fused QKV projection as an adapter looks at."""

    num_heads = num_kv_heads = HEADS
    head_size, input_size = DIM, SIZE

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn((3 * Q_ROWS, SIZE), generator=generator).bfloat16()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = torch.randn(3 * Q_ROWS, generator=generator).bfloat16()
        self.params_dtype = torch.bfloat16
        self.quant_method: Any = UnquantizedLinearMethod()

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.quant_method.apply(self, hidden, self.bias), None


class Radix:
    """`model_kv` puts a `forward` on the instance and deletes it again."""

    def forward(self, *_: Any) -> None:
        raise AssertionError("nothing runs attention here")


class Attention(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.qkv_proj = Projection(seed)
        self.attn: Any = Radix()

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden_states)[0].split(Q_ROWS, dim=1)
        return self.attn.forward(q, k, v)


Make = Callable[[Any], list[LayerAdapter]]


@pytest.fixture
def layers_with(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes three layers whose linear is a product, for the model and for restorations alike."""

    def make(product: Any) -> list[LayerAdapter]:
        monkeypatch.setattr(torch.nn.functional, "linear", product)
        monkeypatch.setattr(exactness, "TILED", tiled(product))
        return [LayerAdapter(Attention(seed), Family(rotary=None)) for seed in range(3)]

    return make


@pytest.mark.parametrize(
    ("product", "cured", "sliceable", "tiles"),
    [
        (in_order, True, True, False),
        (by_columns, True, False, False),
        (by_both, True, False, True),
        (by_place, False, True, False),
    ],
)
def test_a_product_is_cured_by_the_whole_projection_by_tiles_or_left_as_it_was(
    layers_with: Make, product: Any, cured: bool, sliceable: bool, tiles: bool
) -> None:
    layers = layers_with(product)
    proof = choose_product(layers, demanded=True)
    assert (proof.wrong is None) == cured and (proof.difference == 0.0 or not cured)
    method = FixedTiles if tiles else UnquantizedLinearMethod
    for layer in layers:
        assert layer.sliceable == sliceable and type(layer.qkv.quant_method) is method


def test_row_dependence_is_told_and_cured_by_tiles_only_on_demand(
    layers_with: Make,
) -> None:
    layers = layers_with(by_count)
    told = choose_product(layers, demanded=False)
    assert told.wrong is not None and "1 rows of the forward pass" in told.wrong
    assert not any(type(layer.qkv.quant_method) is FixedTiles for layer in layers)
    assert told.difference <= 2**-7
    proof = choose_product(layers, demanded=True)
    assert (proof.wrong, proof.difference) == (None, 0.0)
    assert all(type(layer.qkv.quant_method) is FixedTiles for layer in layers)
    assert proof.digest != told.digest
    use_plain_products(layers)
    assert not any(type(layer.qkv.quant_method) is FixedTiles for layer in layers)
    assert measure(layers) == told


def test_one_layer_with_another_product_is_enough(layers_with: Make) -> None:
    """The middle layer's restoration runs a kernel of its own; its operands are the model's."""
    layers = layers_with(in_order)
    layers[1].linear = lambda rows, weight, bias: in_order(rows, weight, None)
    proof = measure(layers)
    assert proof.wrong is not None and "of layer 1 differs" in proof.wrong
    assert proof.difference > 0.01


@pytest.mark.parametrize("demanded", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_other_kernels_do_not_project_where_bits_matter(
    layers_with: Make, monkeypatch: pytest.MonkeyPatch, demanded: bool, deterministic: bool
) -> None:
    """What they do with it is in test_core_projection.py."""
    layers = layers_with(in_order)
    switched: list[str] = []
    monkeypatch.setattr(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", lambda: switched.append("on")
    )
    exactness.prepare(arguments(deterministic, False), layers, demanded)
    assert {layer.models_product for layer in layers} == {demanded or deterministic}
    assert switched == (["on"] if deterministic else [])


def test_deterministic_inference_without_a_radix_cache_is_refused() -> None:
    for deterministic, off in ((True, False), (False, True), (False, False)):
        check_radix_cache(arguments(deterministic, off))
    with pytest.raises(
        ConfigError, match=r"--attention-backend flashinfer switches.*fa3 or triton"
    ):
        check_radix_cache(arguments(True, True))


def arguments(deterministic: bool, off: bool) -> SimpleNamespace:
    return SimpleNamespace(
        enable_deterministic_inference=deterministic,
        disable_radix_cache=off,
        attention_backend="flashinfer",
    )
