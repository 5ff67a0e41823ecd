"""The proof of bit identity at start, over layers whose products depend on their rows.

No engine: an attention module of a few lines with SGLang's fused projection, whose product is made
to depend on the number of rows, on the columns, or on nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from sglang_hc.config import ConfigError
from sglang_hc.srt.arguments.server_args import check_radix_cache
from sglang_hc.srt.model import exactness
from sglang_hc.srt.model.exactness import FixedTiles, choose_product, measure, use_plain_products
from sglang_hc.srt.model.families import Family, LayerAdapter

SIZE, HEADS, DIM = 32, 1, 8
Q_ROWS = HEADS * DIM


def in_order(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, backwards: bool = False
) -> torch.Tensor:
    """Adds up element by element, so that nothing but the order decides about the bits."""
    total = torch.zeros((rows.shape[0], weight.shape[0]))
    places = range(rows.shape[1])
    for k in reversed(places) if backwards else places:
        total += rows[:, k : k + 1].float() * weight[:, k].float()
    if bias is not None:
        total += bias.float()
    return total.to(rows.dtype)


def by_count(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return in_order(rows, weight, bias, backwards=rows.shape[0] <= 3)


def by_columns(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return in_order(rows, weight, bias, backwards=weight.shape[0] != 3 * Q_ROWS)


def by_both(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    other = rows.shape[0] <= 3 or weight.shape[0] != 3 * Q_ROWS
    return in_order(rows, weight, bias, backwards=other)


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


class Attention(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.qkv_proj = Projection(seed)
        self.attn = SimpleNamespace(forward=None)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden_states)[0].split(Q_ROWS, dim=1)
        return self.attn.forward(q, k, v)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[LayerAdapter]:
    monkeypatch.setattr(LayerAdapter, "__init__", _without_radix(LayerAdapter.__init__))
    return [LayerAdapter(Attention(seed), Family(rotary=None)) for seed in range(3)]


def _without_radix(original: Any) -> Any:
    """`model_kv` puts a `forward` on the attention's instance and deletes it again."""

    class Radix:
        def forward(self, *_: Any) -> None:
            raise AssertionError("nothing runs attention here")

    def init(self: LayerAdapter, attention: Any, family: Family) -> None:
        attention.attn = Radix()
        original(self, attention, family)

    return init


def use(monkeypatch: pytest.MonkeyPatch, product: Any) -> None:
    """torch's linear is `product` from here on, for the model and for restorations alike."""
    from sglang_hc.device.exactness import tiled

    monkeypatch.setattr(torch.nn.functional, "linear", product)
    monkeypatch.setattr(exactness, "TILED", tiled(product))


def refresh(layers: list[LayerAdapter]) -> list[LayerAdapter]:
    for layer in layers:
        layer.linear = torch.nn.functional.linear
    return layers


def test_a_product_that_keeps_the_bits_is_left_alone(
    layers: list[LayerAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, in_order)
    proof = choose_product(refresh(layers), demanded=True)
    assert (proof.wrong, proof.difference) == (None, 0.0)
    assert all(layer.sliceable for layer in layers)
    assert not any(type(layer.qkv.quant_method) is FixedTiles for layer in layers)


def test_row_dependence_is_told_and_cured_by_tiles_only_on_demand(
    layers: list[LayerAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, by_count)
    refresh(layers)
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


def test_column_dependence_is_cured_by_the_whole_projection(
    layers: list[LayerAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, by_columns)
    proof = choose_product(refresh(layers), demanded=True)
    assert proof.wrong is None
    assert not any(layer.sliceable for layer in layers)
    assert not any(type(layer.qkv.quant_method) is FixedTiles for layer in layers)


def test_both_are_cured_by_whole_tiles(
    layers: list[LayerAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, by_both)
    proof = choose_product(refresh(layers), demanded=True)
    assert proof.wrong is None
    assert not any(layer.sliceable for layer in layers)
    assert all(type(layer.qkv.quant_method) is FixedTiles for layer in layers)


def test_what_nothing_cures_is_left_as_it_was(
    layers: list[LayerAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, by_place)
    proof = choose_product(refresh(layers), demanded=True)
    assert proof.wrong is not None
    assert all(layer.sliceable for layer in layers)
    assert all(type(layer.qkv.quant_method) is UnquantizedLinearMethod for layer in layers)


def test_one_layer_with_another_product_is_enough(
    layers: list[LayerAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The middle layer's restoration runs a kernel of its own; its operands are the model's."""
    use(monkeypatch, in_order)
    refresh(layers)
    layers[1].linear = lambda rows, weight, bias: in_order(rows, weight, None)
    proof = measure(layers)
    assert proof.wrong is not None and "of layer 1 differs" in proof.wrong
    assert proof.difference > 0.01


def test_a_quantised_projection_is_not_proven(
    layers: list[LayerAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, in_order)
    for layer in refresh(layers):
        layer.unquantized = layer.sliceable = False
    proof = choose_product(layers, demanded=True)
    assert proof.wrong is not None and "quantised" in proof.wrong


@pytest.mark.parametrize("demanded", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_other_kernels_do_not_project_where_bits_matter(
    layers: list[LayerAdapter],
    monkeypatch: pytest.MonkeyPatch,
    demanded: bool,
    deterministic: bool,
) -> None:
    """What they do with it is in test_core_projection.py."""
    switched: list[str] = []
    monkeypatch.setattr(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", lambda: switched.append("on")
    )
    exactness.prepare(arguments(deterministic, False), layers, demanded)
    assert {layer.models_product for layer in layers} == {demanded or deterministic}
    assert switched == (["on"] if deterministic else [])


@pytest.mark.parametrize(("deterministic", "off"), [(True, False), (False, True), (False, False)])
def test_deterministic_inference_with_a_radix_cache_is_served(
    deterministic: bool, off: bool
) -> None:
    check_radix_cache(arguments(deterministic, off))


def test_deterministic_inference_without_a_radix_cache_is_refused() -> None:
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
