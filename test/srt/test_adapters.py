"""K and V rebuilt from hidden states, per family, against the model's own attention module."""

from __future__ import annotations

from dataclasses import replace

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

    from sglang_hc.srt import adapters
    from sglang_hc.srt.selfcheck import disagreement

    core = Core("--max-total-tokens", "256", "--dtype", "float32", "--hc-disable", model=model)
    loaded = core.scheduler.tp_worker.model_runner.model
    family = adapters.family_of(loaded)
    assert family is not None

    def check(changed: adapters.Family, bias: float = 0.0) -> str | None:
        layers = adapters.layer_modules(loaded, changed)
        size = layers[0].qkv.weight.shape[1]
        if bias:  # the adapter alone sees another weight, the model keeps its own
            project = layers[0].project

            def off(hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
                k, v = project(hidden, positions)
                return k, v + bias * v.abs().max()

            layers[0].project = off
        return disagreement(layers, range(len(layers)), size, torch.float32)

    found = {"name": type(loaded).__name__, "right": check(family), "v": check(family, 1e-3)}
    if family.rotary:
        found["no rotary"] = check(replace(family, rotary=None))
    if family.k_norm:
        found["no norm"] = check(replace(family, k_norm=None))
    return found


@pytest.mark.parametrize("model", MODELS)
def test_an_adapter_agrees_with_its_model_and_a_wrong_one_is_noticed(
    models: None, model: str
) -> None:
    found = run_in_child(verdicts, model)
    assert found.pop("name") == MODELS[model]
    assert found.pop("right") is None
    assert "layer 0: V differs" in found["v"]
    for wrong in ("no rotary", "no norm"):
        if wrong in found:
            assert "K differs" in found[wrong]


def test_every_listed_family_is_checked_here() -> None:
    from sglang_hc.srt.adapters import FAMILIES

    assert set(MODELS.values()) == set(FAMILIES)
