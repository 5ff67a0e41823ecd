"""`--hc-exact`: what is restored has the bits that left, on every CPU, or is not restored."""

from __future__ import annotations

from typing import Any

import pytest

from support.conversations import Outcome, both, check_same_tokens
from support.core import Core, run_in_child
from support.exactness import ISAS, use_isa

FEW = ["llama-gqa", "qwen3", "opt"]
SMALL = ("--max-total-tokens", "640", "--hc-host-size-gb", "0.1", "--hc-exact")


def exact(model: str, dtype: str, isa: str | None) -> Outcome:
    return both(model, "hidden", dtype, isa, False, "--hc-exact")


def check_bits(found: Outcome) -> None:
    assert found.stats["layer_plan"].startswith("hidden")
    assert found.stats["exactness"] == "bit"
    assert found.stats["exactness_difference"] == 0.0
    check_same_tokens(found)
    assert found.worst("error") == 0.0


@pytest.mark.parametrize(
    "isa", [None, *(pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS)]
)
@pytest.mark.parametrize("model", FEW)
def test_hidden_form_bfloat16_is_bit_identical(models: None, model: str, isa: str | None) -> None:
    check_bits(run_in_child(exact, model, "bfloat16", isa))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_types_are_bit_identical_too(models: None, dtype: str) -> None:
    check_bits(run_in_child(exact, "llama-mha", dtype, None))


def products(dtype: str, isa: str | None) -> dict[str, Any]:
    """What the start does about the product, with and without the demand."""
    use_isa(isa)
    core = Core(*SMALL, "--hc-forms", "hidden", "--dtype", dtype)
    from sglang_hc.srt.model import exactness

    runner = core.scheduler.tp_worker.model_runner
    layers = core.model_state.layers
    found = {
        "tiles": exactness.has_fixed_tiles(runner.model),
        "recomputes": core.tree.tiers.restorer.path.recomputer is not None,
    }
    exactness.use_plain_products(layers)
    plain = exactness.choose_product(layers, demanded=False)
    found |= {"plain": plain.wrong, "untouched": not exactness.has_fixed_tiles(runner.model)}
    whole = exactness.products_of(layers)[0]
    whole[1]()
    found["whole"] = exactness.measure(layers).wrong
    return found


def test_float32_needs_fixed_tiles_and_recomputes_nothing(models: None) -> None:
    """Up to three rows of float32 are another kernel's on every CPU this was run on; a decode step
    is never the bits of a prefill then, so layers are not recomputed either."""
    found = run_in_child(products, "float32", None)
    assert found["tiles"] and not found["recomputes"]
    assert "1 rows of the forward pass" in found["plain"] and found["untouched"]
    assert found["whole"] is not None


def refused(*flags: str) -> str:
    from sglang_hc.config import ConfigError

    with pytest.raises(ConfigError) as caught:
        Core(*SMALL, "--dtype", "float32", *flags)
    return str(caught.value)


def without_products(*flags: str) -> str:
    """A device on which no product is proven."""
    from sglang_hc.srt.model import exactness

    exactness.products_of = lambda layers: []
    return refused(*flags)


def fallen_back() -> dict[str, Any]:
    from sglang_hc.srt.model import exactness

    exactness.products_of = lambda layers: []
    core = Core(*SMALL, "--dtype", "float32", profile=None)
    return core.tree.stats()


@pytest.mark.parametrize("forms", ["hidden", "hidden:2,kv:2"])
def test_forms_that_cannot_be_exact_are_refused_in_one_sentence(models: None, forms: str) -> None:
    message = run_in_child(without_products, "--hc-forms", forms)
    assert f"--hc-forms {forms} and --hc-exact" in message
    assert "1 rows of the forward pass" in message and "leave one of the two out" in message


def test_recomputed_layers_that_cannot_be_exact_are_refused(models: None) -> None:
    message = run_in_child(refused, "--hc-forms", "recompute:2,hidden:1,kv:1")
    assert "--hc-forms recompute:2,hidden:1,kv:1 and --hc-exact" in message
    assert "recomputed layers are not bit-exact" in message


def test_auto_takes_kv_where_nothing_else_is_proven(models: None) -> None:
    stats = run_in_child(fallen_back)
    assert stats["layer_plan"] == "kv:4"
    assert (stats["exactness"], stats["exactness_difference"]) == ("bit", 0.0)


def test_deterministic_inference_is_refused_without_a_gpu(models: None) -> None:
    message = run_in_child(refused, "--enable-deterministic-inference")
    assert "--enable-deterministic-inference needs a GPU" in message and "--hc-exact" in message
