"""What is kept of published models whose layers do not all have full attention."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmark import ROOT
from benchmark.ends.models import (
    GEMMA_4_31B,
    GPT_OSS_20B,
    GPT_OSS_120B,
    KIMI_LINEAR_48B,
    MODELS,
    NEMOTRON_3_NANO,
    QWEN3_5_27B,
    QWEN3_NEXT_80B,
    WINDOWS,
)
from sglang_hc.errors import ConfigError
from sglang_hc.forms import StateShape
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.layer_plan import auto_plan
from sglang_hc.tools.cli.main import main
from sglang_hc.tools.datasheet import datasheet_costs, known_gpus, load_hardware
from sglang_hc.tools.model_ends import KeptShape, computed_shape, kept_shape
from sglang_hc.tools.model_shape import ModelShape
from support.papers import DEEPSEEK_V32, LLAMA31_8B
from support.window_configs import CONFIGS

CONTEXT = 8192


def test_gpt_oss_keeps_windows_at_ends() -> None:
    shape = kept_shape(GPT_OSS_20B)
    assert shape is not None and shape.full_layers == 12 and shape.token_bytes == 12 * 2048
    assert shape.plain_bytes == 24 * 2048 and shape.ends.blocks == 2
    assert shape.ends.window.layers == tuple(range(0, 24, 2))
    assert shape.end_bytes == 128 * 12 * 2048


def test_qwen3_next_keeps_states_at_ends() -> None:
    shape = kept_shape(QWEN3_NEXT_80B)
    assert shape is not None and shape.full_layers == 12 and shape.token_bytes == 12 * 2048
    assert shape.ends.state.layers == tuple(n for n in range(48) if n % 4 != 3)
    assert shape.ends.state.parts == (8192 * 3 * 2, 32 * 128 * 128 * 4)
    assert shape.end_bytes == 36 * ((32 * 128 * 128 * 4) + 8192 * 3 * 2)


def test_mamba_layers_have_one_convolution_over_values_and_both_maps() -> None:
    """Its other layers, with experts, keep nothing."""
    shape = kept_shape(NEMOTRON_3_NANO)
    assert shape is not None and shape.full_layers == 6 and shape.token_bytes == 6 * 1024
    assert len(shape.ends.state.layers) == 23 and shape.plain_bytes == 29 * 1024
    width = 64 * 64 + 2 * 8 * 128
    assert shape.ends.state.parts == (width * 3 * 2, 64 * 64 * 128 * 4)
    types = ["mamba", "moe", "attention", "mlp"]
    listed = {name: value for name, value in NEMOTRON_3_NANO.items() if "pattern" not in name}
    listed |= dict(num_hidden_layers=4, layers_block_type=types)
    short = kept_shape(listed)
    assert short is not None and short.ends.state.layers == (0,) and short.full_layers == 1


def test_granite_names_the_same_otherwise() -> None:
    config = dict(
        model_type="granitemoehybrid", num_hidden_layers=4, hidden_size=256, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["mamba", "attention"] * 2, mamba_n_heads=8,
        mamba_d_head=64, mamba_d_state=32, mamba_n_groups=1, mamba_d_conv=4, dtype="float32",
    )  # fmt: skip
    shape = kept_shape(config)
    assert shape is not None and shape.full_layers == 2 and shape.row_bytes == 2 * 2 * 64 * 4
    assert shape.ends.state.parts == ((512 + 64) * 3 * 2, 8 * 64 * 32 * 4)


def test_granite_without_recurrent_layers_needs_no_ends() -> None:
    """Its configuration has the sizes of Mamba2 all the same."""
    config = dict(
        model_type="granitemoehybrid", num_hidden_layers=4, hidden_size=256, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["attention"] * 4, mamba_n_heads=8, mamba_d_head=64,
        intermediate_size=512, dtype="bfloat16",
    )  # fmt: skip
    assert kept_shape(config) is None
    assert ModelShape.from_config(config).state_shape().num_layers == 4


def test_kimi_has_latents_beside_its_states() -> None:
    """Its configuration counts layers from 1."""
    shape = kept_shape(KIMI_LINEAR_48B)
    assert shape is not None and shape.row_bytes == 2 * (512 + 64) and shape.full_layers == 7
    assert 26 not in shape.ends.state.layers and 3 not in shape.ends.state.layers
    assert shape.ends.state.parts == (3 * 4096 * 3 * 2, 32 * 128 * 128 * 4)


def test_the_type_of_a_recurrence_is_that_of_the_config() -> None:
    text: dict[str, Any] = QWEN3_5_27B["text_config"] | dict(mamba_ssm_dtype="bfloat16")
    shape = kept_shape(text)
    assert shape is not None and shape.ends.state.parts[1] == 48 * 128 * 128 * 2


def test_gemma_4_has_other_rows_in_its_layers_with_full_attention() -> None:
    """Of the last layers, which read the K and V of others, nothing is kept."""
    types = [*(["sliding_attention"] * 5), "full_attention"] * 2
    config = dict(
        model_type="gemma4", dtype="bfloat16",
        text_config=dict(
            model_type="gemma4_text", num_hidden_layers=12, layer_types=types, sliding_window=512,
            num_key_value_heads=4, head_dim=256, global_head_dim=512, hidden_size=2304,
            num_global_key_value_heads=1, num_kv_shared_layers=3,
        ),
    )  # fmt: skip
    shape = kept_shape(config)
    assert shape is not None and shape.full_layers == 1 and len(shape.ends.window.layers) == 8
    assert shape.row_bytes == 2 * 512 * 2 and shape.ends.window.parts == (2048, 2048)
    assert shape.plain_bytes == shape.row_bytes + 8 * 4096 and shape.ends.blocks == 8


def test_chunks_of_llama_4_are_windows_as_long_as_a_chunk() -> None:
    """Scout: three layers of four attend to 8,192 tokens."""
    config = dict(
        model_type="llama4",
        text_config=dict(
            model_type="llama4_text", dtype="bfloat16", num_hidden_layers=48, head_dim=128,
            num_attention_heads=40, num_key_value_heads=8, hidden_size=5120,
            attention_chunk_size=8192,
        ),
    )  # fmt: skip
    shape = kept_shape(config)
    assert shape is not None and shape.full_layers == 12 and shape.row_bytes == 4096
    assert shape.ends.window.layers == tuple(n for n in range(48) if n % 4 != 3)
    assert shape.ends.window.parts == (2048, 2048) and shape.ends.blocks == 128


def test_mimo_v2_has_other_heads_in_its_windows_and_narrow_values() -> None:
    config = dict(
        model_type="mimo_v2_flash", torch_dtype="bfloat16", num_hidden_layers=6,
        hybrid_layer_pattern=[0, 1, 1, 1, 1, 0], sliding_window=128, num_key_value_heads=4,
        head_dim=192, v_head_dim=128, swa_num_key_value_heads=8, swa_head_dim=192,
        swa_v_head_dim=128,
    )  # fmt: skip
    shape = kept_shape(config)
    assert shape is not None and shape.full_layers == 2 and shape.row_bytes == 4 * 320 * 2
    assert shape.ends.window.layers == (1, 2, 3, 4)
    assert shape.ends.window.parts == (8 * 192 * 2, 8 * 128 * 2) and shape.ends.blocks == 2


@pytest.mark.parametrize("name", CONFIGS)
def test_models_that_are_served_in_tests_are_known(name: str) -> None:
    shape = kept_shape(CONFIGS[name])
    assert shape is not None and shape.full_layers < 4
    assert shape.ends.window.tokens == 96 and shape.ends.blocks == 2


def test_step_3_5_calls_its_heads_groups() -> None:
    config = dict(
        model_type="step3p5", torch_dtype="bfloat16", num_hidden_layers=2, sliding_window=512,
        layer_types=["full_attention", "sliding_attention"], num_attention_groups=8, head_dim=128,
        attention_other_setting=dict(num_attention_groups=4, head_dim=128),
    )  # fmt: skip
    shape = kept_shape(config)
    assert shape is not None and shape.row_bytes == 8 * 256 * 2
    assert shape.ends.window.parts == (4 * 128 * 2,) * 2


@pytest.mark.parametrize(
    ("config", "most"), [(GPT_OSS_20B, 0.55), (GPT_OSS_120B, 0.55), (QWEN3_NEXT_80B, 0.35)]
)
def test_a_part_of_a_full_kv_copy_is_kept(config: dict[str, Any], most: float) -> None:
    """Of 8K tokens: with the ends for which host memory has room, and at least one."""
    shape = kept_shape(config)
    assert shape is not None and shape.share(CONTEXT, 1) <= most
    if not shape.ends.has_state:
        assert shape.share(CONTEXT, CONTEXT // 2048) <= most


def test_the_page_of_the_planner_has_these_numbers() -> None:
    page = (ROOT / "docs/planner.md").read_text()
    table = page.partition("| plain bytes/token |")[2].partition("\n\n")[0]
    rows = [tuple(one.strip() for one in line.split("|")[1:-1]) for line in table.splitlines()[2:]]
    for name, context in re.findall(r"(Nemotron 3 Nano|Gemma 4) (?:keeps )?(0\.\d+)", page):
        (config,) = (found for one, found in MODELS.items() if one.startswith(name))
        assert f"{kept(config).share(32_768, 1):.3f}" == context
    expected = []
    for name, config in MODELS.items():
        shape = kept(config)
        size = shape.path_bytes(CONTEXT, 1) / CONTEXT
        others = (*shape.ends.state.layers, *shape.ends.window.layers)
        layers = shape.full_layers + len(others)
        expected.append((
            name, f"{shape.full_layers} of {layers}", f"{shape.token_bytes:,}",
            f"{shape.plain_bytes:,}", f"{shape.end_bytes / 2**20:.1f}", f"{size:,.0f}",
            f"{shape.share(CONTEXT, 1):.3f}",
        ))  # fmt: skip
    assert rows == expected


def kept(config: dict[str, Any]) -> KeptShape:
    shape = kept_shape(config)
    assert shape is not None
    return shape


# -- on data-sheet GPUs ---------------------------------------------------------------------------


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_auto_would_choose_kv_even_if_hidden_states_came_back(config: dict[str, Any]) -> None:
    """They are larger in each of these models, and cost a product."""
    shape, computed = kept(config), computed_shape(config)
    assert shape.hidden_bytes > shape.row_bytes
    for name in known_gpus() if computed is not None else ():
        hardware = load_hardware(name)
        cost = datasheet_costs(hardware, computed, hardware.link_gbps.value * 1e9, 7e9)
        state = StateShape(
            shape.full_layers, shape.hidden_bytes, (shape.row_bytes,), shape.dtype
        )  # fmt: skip
        found = auto_plan(
            cost, state, (SourceTier.HOST, SourceTier.DISK), allow_hidden=True,
            allow_recompute=False,
        )  # fmt: skip
        assert found.plan.kv == shape.full_layers, (name, found.explanation)


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (GPT_OSS_20B, 19.7), (GPT_OSS_120B, 115.6), (QWEN3_NEXT_80B, 78.4),
        (KIMI_LINEAR_48B, 48.1),
    ],
)  # fmt: skip
def test_what_computing_takes_is_that_of_the_published_model(
    config: dict[str, Any], billions: float
) -> None:
    """All weights of the layers, which the page of each model says with its embedding."""
    shape = computed_shape(config)
    assert shape is not None
    assert shape.num_layers * shape.stored_params / 1e9 == pytest.approx(billions, rel=0.01)


def test_layers_that_keep_little_attend_to_little() -> None:
    shape = computed_shape(QWEN3_NEXT_80B)
    assert shape is not None and (shape.window, shape.windowed) == (64, 0.75)
    windows = computed_shape(GEMMA_4_31B)
    assert windows is not None and windows.window == 1024
    assert windows.windowed == pytest.approx(5 / 6)
    assert computed_shape(NEMOTRON_3_NANO) is None and computed_shape(LLAMA31_8B) is None


def test_others_need_no_ends_and_a_field_that_is_missing_is_named() -> None:
    assert kept_shape(LLAMA31_8B) is None
    config = {name: value for name, value in GPT_OSS_20B.items() if name != "sliding_window"}
    with pytest.raises(ConfigError, match="sliding_window"):
        kept_shape(config)
    with pytest.raises(ConfigError, match="layer_types"):
        kept_shape(GPT_OSS_20B | dict(layer_types=WINDOWS))


PLANNED = {**MODELS, "DeepSeek-V3.2": DEEPSEEK_V32}


@pytest.mark.parametrize("config", PLANNED.values(), ids=PLANNED.keys())
@pytest.mark.parametrize("gpu", known_gpus())
def test_each_kind_is_planned_on_each_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], gpu: str
) -> None:
    """Restoring is what is chosen, and why it is KV."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", "--model", str(tmp_path), "--gpu", gpu, "--disk-gbps", "5"]
    assert main([*words, "--context", "8192"]) == 0
    said = capsys.readouterr().out
    if config is DEEPSEEK_V32:
        assert said.count("kv:61\n") == 2
        return
    layers = kept(config).full_layers
    assert re.search(
        rf"^forms    kv:{layers}, others at ends: a hidden state has [\d,]+ bytes", said, re.M
    )
    assert said.count("again: loaded") == (2 if computed_shape(config) else 0)


def test_the_plan_computes_again_what_comes_slowly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    words = ["plan", "--model", str(tmp_path), "--gpu", "H200", "--link-gbps", "0.1"]
    assert main([*words, "--context", "1024"]) == 0
    assert "again: computed again" in capsys.readouterr().out


def test_the_plan_says_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT_80B))
    words = ["plan", "--model", str(tmp_path), "--gpu", "A100-40G", "--link-gbps", "25"]
    words += ["--disk-gbps", "5", "--context", "8192"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["share_of_full_kv"] == pytest.approx(0.346, abs=1e-3)
    size = 8192 * 12 * 2048 + found["end_bytes"]
    assert found["copy_seconds"] == {
        "host": pytest.approx(size / 25e9), "disk": pytest.approx(size / 5e9),
    }  # fmt: skip
    assert main(words) == 0
    assert "36 recurrent" in capsys.readouterr().out
