"""What a restoration brings back bit by bit here: proven at start, and demanded by `--hc-exact`.

KV form is a copy. Hidden form runs the K and V part of a layer's projection again, over another
number of rows; `measure` says whether this device gives the same bits then. Where it does not and
bit identity is demanded, `choose_product` looks for a product that does: the whole fused
projection, which has the shape of the forward pass, and on a CPU fixed tiles, which replace the
product of the forward pass as well. On a GPU it is SGLang's --enable-deterministic-inference that
makes products independent of the rows; a restoration then runs the very same operator.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from sglang_hc.device.exactness import cancelling, row_dependence, tiled, windows
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.model.families import LayerAdapter
from sglang_hc.srt.model.startup_checks import TOLERANCE, model_kv
from sglang_hc.srt.ranks.start_group import StartGroup

logger = logging.getLogger(__name__)

LAYER_ROWS = 300
"""Rows of the comparison with the model's own weights."""

SINGLE_ROWS = 16
"""Of them, rows that are compared one by one: a decode step's product is the likeliest to differ,
in one element of some thousands."""

POSITIONS = 200
"""Positions that they are at, repeated: every model has as many."""


class HiddenProof(NamedTuple):
    """What `measure` found of K and V from hidden states.

    wrong: why they are not bit-exact; None: no sample differed. difference: largest of the samples
    with the model's weights, relative to the largest magnitude of a layer's K or V. digest: of the
    bits of one product, which differ between machines that add up in different orders.
    """

    wrong: str | None
    difference: float
    digest: str


def of_all_ranks(proof: HiddenProof, group: StartGroup) -> HiddenProof:
    """What ranks found together: each compared the products of its own part of the weights."""
    return HiddenProof(
        group.reason(proof.wrong), group.most(proof.difference), group.digest(proof.digest)
    )


class FixedTiles(UnquantizedLinearMethod):
    """The product of an unquantised projection on tiles of one fixed number of rows."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return TILED(x, layer.weight, bias)


TILED = tiled(torch.nn.functional.linear)


def prepare(args: Any, layers: Sequence[LayerAdapter] | None, demanded: bool) -> None:
    """Before anything is measured or proven: put SGLang's batch-invariant operators in place where
    they are asked for, and leave no way to project but the model's own product.

    SGLang itself puts its operators in place after the weights are loaded, and only once.
    """
    if arguments.is_deterministic(args):
        from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode

        enable_batch_invariant_mode()
    for layer in layers or ():
        layer.models_product = demanded or arguments.is_deterministic(args)


def choose_product(layers: Sequence[LayerAdapter], demanded: bool) -> HiddenProof:
    """Measure, and where bit identity is demanded choose the first product that is proven.

    Changes the layers' products, before any CUDA graph is captured. Without a proof everything is
    left as it was, and the answer says what the plain product does.
    """
    plain = measure(layers)
    if plain.wrong is None or not demanded:
        return plain
    for name, choose in products_of(layers):
        choose()
        proof = measure(layers)
        if proof.wrong is None:
            logger.info("sglang-hc: bit-exact hidden form by %s, because %s", name, plain.wrong)
            return proof
    use_plain_products(layers)
    return plain


def use_plain_products(layers: Sequence[LayerAdapter]) -> None:
    """Undo what `choose_product` chose: no layer is kept as hidden states after all."""
    _choose(layers, on_tiles=False, whole=False)


def has_fixed_tiles(model: torch.nn.Module) -> bool:
    """Whether `choose_product` put fixed tiles into the model."""
    return any(type(getattr(m, "quant_method", None)) is FixedTiles for m in model.modules())


def measure(layers: Sequence[LayerAdapter]) -> HiddenProof:
    """Compare restorations with forward passes of other row counts.

    The product is compared on operands that show every other order of additions, once for each
    shape of a fused weight; K and V of the first, the middle and the last layer with the model's
    own weights, norms and rotary embeddings.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"hc exactness")
    with torch.no_grad():
        wrong = _products_differ(layers, digest)
        difference = 0.0
        for index in sorted({0, len(layers) // 2, len(layers) - 1}):
            error, found = layer_differs(layers[index], index, digest)
            difference = max(difference, error)
            wrong = wrong or found
    return HiddenProof(wrong, difference, digest.hexdigest())


def disagreement(proof: HiddenProof, dtype: torch.dtype) -> str | None:
    """Why K and V from hidden states are not the model's own, whatever is rounded; None: they are.
    dtype: of the model."""
    if proof.difference <= TOLERANCE[dtype]:
        return None
    reason = f"the self-check failed: K and V differ from the model's own by {proof.difference:.2e}"
    logger.error("sglang-hc: hidden states are not used: %s", reason)
    return reason


def _products_differ(layers: Sequence[LayerAdapter], digest: Any) -> str | None:
    shapes = {(tuple(a.qkv.weight.shape), a.q_rows, a.qkv.bias is not None): a for a in layers}
    for ((out, size), _, bias), adapter in shapes.items():
        weight = adapter.qkv.weight
        states, *surrogate = cancelling(size, out, bias, weight.dtype, weight.device)
        forward = _forward(adapter, *surrogate)
        wrong = row_dependence(forward, _restoring(adapter, *surrogate), states)
        if wrong is not None:
            return wrong
        _add(digest, forward(states))
    return None


def _forward(
    adapter: LayerAdapter, weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """K and V columns as the model's module computes them, with another weight of its shape."""
    method, layer = adapter.qkv.quant_method, SimpleNamespace(weight=weight)
    return lambda rows: method.apply(layer, rows, bias)[:, adapter.q_rows :]


def _restoring(
    adapter: LayerAdapter, weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same as `LayerAdapter.project` computes them."""
    if not adapter.sliceable:
        return _forward(adapter, weight, bias)
    first = adapter.q_rows
    part = None if bias is None else bias[first:]
    return lambda rows: adapter.linear(rows, weight[first:], part)


def layer_differs(adapter: LayerAdapter, index: int, digest: Any) -> tuple[float, str | None]:
    """(largest difference, what differs by it) of a layer with the model's own weights. What is no
    number, or of another size, differs by infinity. digest: gets the bits of its K and V."""
    weight = adapter.qkv.weight
    generator = torch.Generator().manual_seed(index)
    states = torch.randn((LAYER_ROWS, adapter.qkv.input_size), generator=generator)
    states = states.to(weight.device, adapter.qkv.params_dtype)
    positions = torch.arange(LAYER_ROWS, device=weight.device) % POSITIONS
    restored = [part.flatten(1) for part in adapter.project(states, positions)]
    for part in restored:
        _add(digest, part)
    scales = [float(part.float().abs().max()) or 1.0 for part in restored]
    difference, wrong = 0.0, None
    single = [(row, row + 1) for row in range(0, LAYER_ROWS, LAYER_ROWS // SINGLE_ROWS)]
    for first, last in [*windows(LAYER_ROWS), *single]:
        # The attention module may change its inputs in place.
        inputs = states[first:last].clone(), positions[first:last].clone()
        adapter.ready()
        own = model_kv(adapter.attention, adapter.radix, *inputs)
        for name, scale, a, b in zip("KV", scales, own, restored, strict=True):
            rows = b[first:last]
            if a.numel() != rows.numel():
                return math.inf, f"{name} of layer {index} has another size than the model's"
            wanted = a.reshape(rows.shape)
            if torch.equal(wanted, rows):
                continue
            error = float((wanted.float() - rows.float()).abs().max()) / scale
            error = math.inf if math.isnan(error) else error
            if wrong is None or error > difference:
                difference = error
                wrong = f"{name} of {last - first} rows of layer {index} differs by {error:.1e}"
    return difference, wrong


def products_of(layers: Sequence[LayerAdapter]) -> list[tuple[str, Callable[[], None]]]:
    """Other products than the plain one of the K and V part, the cheapest first."""
    ways = [("the whole fused projection", lambda: _choose(layers, on_tiles=False, whole=True))]
    if layers[0].qkv.weight.device.type == "cpu":
        tiles = "tiles of a fixed number of rows"
        ways += [
            (tiles, lambda: _choose(layers, on_tiles=True, whole=False)),
            (f"{tiles}, whole", lambda: _choose(layers, on_tiles=True, whole=True)),
        ]
    return ways


def _choose(layers: Sequence[LayerAdapter], *, on_tiles: bool, whole: bool) -> None:
    """on_tiles: forward passes and restorations run on fixed tiles. whole: restorations run the
    whole fused projection and drop the query's columns."""
    for layer in layers:
        layer.qkv.quant_method = FixedTiles() if on_tiles else UnquantizedLinearMethod()
        layer.linear = TILED if on_tiles else torch.nn.functional.linear
        layer.sliceable = not whole


def _add(digest: Any, rows: torch.Tensor) -> None:
    digest.update(rows.contiguous().view(torch.uint8).cpu().numpy().tobytes())
