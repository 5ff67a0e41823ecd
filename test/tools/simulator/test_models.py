"""Models and machines of a simulation against what AttentionStore states about them."""

import json

import pytest

from sglang_hc.errors import ConfigError
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.tools.simulator.costs import GpuCosts, Machine, with_auto_plan
from sglang_hc.tools.simulator.models import MODEL_NAMES, load_model

MIB = 2**20


@pytest.mark.parametrize(
    ("name", "mib"),
    [("llama-13b", 0.78), ("llama-65b", 2.5), ("llama-70b", 0.31), ("falcon-40b", 0.12)],
)
def test_state_per_token_is_the_papers(name, mib):
    assert load_model(name).token_bytes / MIB == pytest.approx(mib, abs=0.005)
    assert name in MODEL_NAMES


def test_prefill_and_restore_of_65b_take_what_the_paper_measured():
    costs = GpuCosts(load_model("llama-65b"))
    assert costs.prefill_seconds(2048, 0) == pytest.approx(0.360, rel=0.05)
    copied = costs.cost.copy_stored(SourceTier.HOST, costs.plan, 2000)
    assert copied == pytest.approx(0.192, rel=0.06)


def test_costs_grow_with_work_and_context():
    costs = GpuCosts(load_model("llama-13b"))
    assert costs.prefill_seconds(0, 500) == 0.0
    assert costs.prefill_seconds(4000, 0) < costs.prefill_seconds(4000, 8000)
    assert costs.step_seconds(1, 100) < costs.step_seconds(24, 50_000)
    restored = costs.restored(2000, 100, 50)
    assert costs.saved_seconds(0, 2000, 100, 50) == pytest.approx(
        costs.prefill_seconds(2050, 100) - restored.seconds
    )
    dear = GpuCosts(load_model("llama-13b"), Machine(link=1e6))
    assert dear.saved_seconds(0, 2000, 0, 50) < 0, "recomputing is faster than this link"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("nonsense", "not valid JSON"),
        ("[]", "Expected `object`, got `array`"),
        (json.dumps({"model_type": "llama"}), "no max_position_embeddings; give --context"),
        (json.dumps({"model_type": "llama", "max_position_embeddings": 99}), "num_hidden_layers"),
    ],
)
def test_a_bad_config_is_named(tmp_path, config, says):
    path = tmp_path / "config.json"
    path.write_text(config)
    with pytest.raises(ConfigError, match=says):
        load_model(str(path))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("LlamaForCausalLM", "hidden:3,kv:1"),
        ("Qwen3MoeForCausalLM", "kv:4"),
        ("ZayaForCausalLM", None),
    ],
)
def test_auto_takes_what_a_server_has_and_what_it_refuses_is_not_simulated(tmp_path, name, plan):
    config = {
        "architectures": [name], "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 4096,
        "num_attention_heads": 32, "intermediate_size": 11008, "max_position_embeddings": 4096,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    if plan is None:
        with pytest.raises(ConfigError, match=f"{name} is refused by a server"):
            load_model(str(path))
    else:
        model = with_auto_plan(load_model(str(path)), Machine(), (SourceTier.HOST, SourceTier.DISK))
        assert str(model.layout.plan) == plan
