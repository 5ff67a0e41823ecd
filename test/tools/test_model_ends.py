"""What is kept of published models whose layers do not all have full attention."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmark import ROOT
from benchmark.ends.models import GPT_OSS_20B, GPT_OSS_120B, MODELS, QWEN3_NEXT_80B, WINDOWS
from sglang_hc.errors import ConfigError
from sglang_hc.tools.cli.main import main
from sglang_hc.tools.model_ends import kept_shape
from support.papers import LLAMA31_8B
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


def test_gemma_4_has_other_rows_in_its_layers_with_full_attention() -> None:
    """Of the last layers, which read the K and V of others, nothing is kept."""
    types = [*(["sliding_attention"] * 5), "full_attention"] * 2
    config = dict(
        model_type="gemma4", dtype="bfloat16",
        text_config=dict(
            model_type="gemma4_text", num_hidden_layers=12, layer_types=types, sliding_window=512,
            num_key_value_heads=4, head_dim=256, global_head_dim=512,
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
    rows = re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d.]+) \| ([\d,]+) \| ([\d.]+) \|$", page, re.M)
    expected = []
    for name, config in MODELS.items():
        shape = kept_shape(config)
        assert shape is not None
        size, share = shape.path_bytes(CONTEXT, 1) / CONTEXT, shape.share(CONTEXT, 1)
        mib = shape.end_bytes / 2**20
        expected.append(
            (name, f"{shape.token_bytes:,}", f"{mib:.1f}", f"{size:,.0f}", f"{share:.3f}")
        )
    assert rows == expected


def test_others_need_no_ends_and_a_field_that_is_missing_is_named() -> None:
    assert kept_shape(LLAMA31_8B) is None
    config = {name: value for name, value in GPT_OSS_20B.items() if name != "sliding_window"}
    with pytest.raises(ConfigError, match="sliding_window"):
        kept_shape(config)
    with pytest.raises(ConfigError, match="layer_types"):
        kept_shape(GPT_OSS_20B | dict(layer_types=WINDOWS))


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
