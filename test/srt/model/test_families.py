"""K and V rebuilt from hidden states, per family, against the model's own attention module."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from support.core import Core, run_in_child

MODELS = {
    "llama-mha": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "phi": "PhiForCausalLM",
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "granite": "GraniteForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}


def verdicts(model: str) -> dict[str, str | None]:
    """What the self-check says of the right adapter and of wrong ones."""
    import torch

    from sglang_hc.srt.model import families
    from sglang_hc.srt.model.exactness import layer_differs
    from sglang_hc.srt.model.startup_checks import TOLERANCE

    core = Core("--max-total-tokens", "256", "--dtype", "float32", "--hc-disable", model=model)
    loaded = core.scheduler.tp_worker.model_runner.model
    family = families.family_of(loaded)
    assert family is not None

    def check(changed: families.Family, bias: float = 0.0) -> str | None:
        layers = families.layer_modules(loaded, changed)
        if bias:  # the adapter alone sees another weight, the model keeps its own
            project = layers[0].project

            def off(hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
                k, v = project(hidden, positions)
                return k, v + bias * v.abs().max()

            layers[0].project = off
        with torch.no_grad():
            found = [layer_differs(layer, i, hashlib.blake2b()) for i, layer in enumerate(layers)]
        far = (wrong for error, wrong in found if not error <= TOLERANCE[torch.float32])
        return next(far, None)

    found = {"name": type(loaded).__name__, "right": check(family), "v": check(family, 1e-3)}
    found["sizes"] = sizes(core)
    if family.rotary:
        found["no rotary"] = check(replace(family, rotary=None))
    if family.k_norm:
        found["no norm"] = check(replace(family, k_norm=None))
    found["restorable"] = str(len(families.restorable_layers(loaded) or ()))
    families.layer_modules(loaded, family)[-1].qkv.quant_method = object()
    found["one quantised"] = str(families.restorable_layers(loaded))
    return found


def sizes(core: Core) -> dict[str, Any]:
    """State of the layers and weights of one: by the loaded modules, and by the config."""
    from sglang_hc.srt.model.scratch_layer import layer_weights, model_shape
    from sglang_hc.tools.model_shape import ModelShape

    runner = core.scheduler.tp_worker.model_runner
    config = ModelShape.from_config(runner.model_config.hf_config.to_dict(), "float32")
    state, loaded = config.state_shape(), model_shape(runner)
    return {
        "config": [state.num_layers, state.hidden_bytes, *state.kv_parts, config.layer_params],
        "loaded": [
            loaded.num_layers, loaded.hidden_bytes, *loaded.kv_parts, layer_weights(runner.model)
        ],
    }  # fmt: skip


def latent_sizes(model: str) -> dict[str, Any]:
    return sizes(
        Core("--max-total-tokens", "256", "--dtype", "float32", "--hc-disable", model=model)
    )


@pytest.mark.parametrize("model", MODELS)
def test_an_adapter_agrees_with_its_model_and_a_wrong_one_is_noticed(
    models: None, model: str
) -> None:
    found = run_in_child(verdicts, model)
    assert found.pop("name") == MODELS[model]
    assert found.pop("right") is None
    assert found["sizes"]["loaded"] == pytest.approx(found["sizes"]["config"])
    assert re.match("V of .* layer 0 differs", found["v"])
    assert int(found["restorable"]) >= 2 and found["one quantised"] == "None"
    for wrong in ("no rotary", "no norm"):
        if wrong in found:
            assert re.match("K of .* differs", found[wrong])


def test_the_sizes_of_latent_attention_are_those_of_its_config(models: None) -> None:
    found = run_in_child(latent_sizes, "deepseek-v2")
    assert found["loaded"] == pytest.approx(found["config"])


def test_of_experts_those_count_that_a_token_is_routed_to() -> None:
    from sglang_hc.srt.model.scratch_layer import token_weights

    experts = SimpleNamespace(
        w13_weight=None, top_k=2, hidden_size=8, intermediate_size_per_partition=16
    )
    assert token_weights(experts) == 2 * 3 * 8 * 16
    assert token_weights(SimpleNamespace(top_k=2)) == 0


def test_a_model_without_attention_is_refused_in_one_sentence() -> None:
    import torch

    from sglang_hc.errors import ConfigError
    from sglang_hc.srt.model.scratch_layer import layer_weights

    with pytest.raises(ConfigError, match=r"does not support Linear: .* --hc-disable"):
        layer_weights(torch.nn.Linear(2, 2))


def llama(quant_method: Any) -> Any:
    """A model of one layer whose projection is kept in this way."""
    import torch

    modules: list[Any] = [torch.nn.Module() for _ in range(4)]
    inner, layer, attention, qkv = modules
    qkv.num_heads, qkv.num_kv_heads, qkv.head_size = 4, 2, 8
    qkv.quant_method = quant_method
    attention.qkv_proj, attention.attn, attention.rotary_emb = qkv, None, None
    layer.self_attn = attention
    inner.layers = torch.nn.ModuleList([layer])
    model: Any = type(LLAMA, (torch.nn.Module,), {})()
    model.model = inner
    return model


LLAMA = "LlamaForCausalLM"


def test_quantised_weights_take_kv_form_and_recomputed_layers() -> None:
    """By rule: none of SGLang's kinds of them runs on a CPU without AMX."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.server_args import ServerArgs

    from sglang_hc.srt.model.families import restorable_layers
    from sglang_hc.srt.model.model_state import hidden_excluded
    from sglang_hc.srt.model.recompute import recompute_excluded

    plain = restorable_layers(llama(object.__new__(UnquantizedLinearMethod)))
    assert plain is not None and len(plain) == 1
    model, args = llama(object()), ServerArgs(model_path="m", quantization="fp8")
    layers = restorable_layers(model)
    assert layers is None
    said = hidden_excluded(SimpleNamespace(model=model, server_args=args), layers)
    assert said == "the weights are quantised (fp8)"
    assert recompute_excluded(args, LLAMA) is None


def test_every_listed_family_is_checked_here() -> None:
    from sglang_hc.srt.model.families import FAMILIES

    assert set(MODELS.values()) == set(FAMILIES)


class CheckedRotary:
    """Turns in place as SGLang's kernel for head sizes like 80 and 100, with its check."""

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim

    def __call__(self, positions: Any, query: Any, key: Any) -> tuple[Any, Any]:
        heads, kv_heads = (tensor.shape[-1] // self.head_dim for tensor in (query, key))
        assert heads % kv_heads == 0, "Runtime check failed: num_heads % num_kv_heads == 0"
        for tensor in (query, key):
            assert tensor.is_contiguous()
            tensor.add_(positions[:, None])
        return query, key


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (8, 2), (4, 1)])
def test_k_is_turned_by_kernels_that_check_the_numbers_of_heads(heads: int, kv_heads: int) -> None:
    """K went in beside a query of one head, and models with heads of 80 did not start."""
    import torch
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    from sglang_hc.srt.model.families import Family, LayerAdapter

    dim, rows = 80, 3
    method = object.__new__(UnquantizedLinearMethod)
    weight = torch.randn((heads + 2 * kv_heads) * dim, 16)
    qkv = SimpleNamespace(
        weight=weight, bias=None, num_heads=heads, num_kv_heads=kv_heads, head_size=dim,
        quant_method=method,
    )  # fmt: skip
    rotary = CheckedRotary(dim)
    attention = SimpleNamespace(qkv_proj=qkv, attn=None, rotary_emb=rotary)
    hidden, positions = torch.randn(rows, 16), torch.arange(5, 5 + rows)
    k, v = LayerAdapter(attention, Family()).project(hidden, positions)
    _, plain_k, plain_v = (hidden @ weight.T).split(
        [heads * dim, kv_heads * dim, kv_heads * dim], 1
    )
    turned = (plain_k + positions[:, None]).view(rows, kv_heads, dim)
    assert torch.allclose(k, turned, atol=1e-5)
    assert torch.allclose(v, plain_v.reshape(rows, kv_heads, dim), atol=1e-5)


def test_copies_keep_off_every_stream_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the passes and the named ones: Qwen3 norms its keys on one of them."""
    from sglang.srt.runtime_context import get_context

    from sglang_hc.srt.engine.streams import model_streams

    forward, alt = SimpleNamespace(cuda_stream=1), SimpleNamespace(cuda_stream=2)
    monkeypatch.setitem(get_context().resources.streams, "alt", alt)
    assert model_streams(SimpleNamespace(forward_stream=forward)) == [forward, alt]
