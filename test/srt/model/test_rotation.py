"""Moving K agrees with every rotary embedding SGLang has on a CPU; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.core import Core, run_in_child
from support.examples import examples

PLAIN = {"head_size": 64, "rotary_dim": 64, "max_position": 2048, "base": 10000}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
MODULES: dict[str, dict[str, Any]] = {
    "default": {},
    "gptj": {"is_neox_style": False},
    "partial": {"rotary_dim": 32},
    "partial gptj": {"rotary_dim": 16, "is_neox_style": False},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "alpha": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 8.0}},
    "yarn": {"rope_scaling": YARN},
    "yarn gptj": {"rope_scaling": YARN, "is_neox_style": False},
    "deepseek": {},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        }
    },
    "proportional": {"rope_scaling": {"rope_type": "proportional"}, "rotary_dim": 32},
}
WITHOUT = (
    "rope_variant.Phi3LongRoPEScaledRotaryEmbedding",
    "rope_variant.FourierRotaryEmbedding",
    "rope_variant.DualChunkRotaryEmbedding",
    "rope_variant.Llama4VisionRotaryEmbedding",
    "mrope.MRotaryEmbedding",
    "mrope.YaRNScalingMRotaryEmbedding",
    "mrope.Ernie4_5_VLRotaryEmbedding",
)


@pytest.fixture(scope="module", autouse=True)
def published() -> None:
    """Rotary embeddings ask the server's arguments how they should run."""
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    from sglang_hc.srt.engine import cpu

    cpu.enable()
    publish(ServerArgs(model_path="dummy", device="cpu", load_format="dummy"), role="scheduler")


def module(name: str, dtype: Any = None) -> Any:
    import torch
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding

    if name == "deepseek":  # get_rope asks which GPU there is
        return DeepseekScalingRotaryEmbedding(
            64, 64, 512, 10000, False, 4.0, dtype or torch.float32,
            mscale=1.0, mscale_all_dim=0.7, device="cpu",
        )  # fmt: skip
    chosen = PLAIN | MODULES[name]
    return get_rope(**chosen, dtype=dtype or torch.float32)


def moved_and_wanted(name: str, old: list[int], new: list[int], dtype: Any) -> tuple[Any, Any, Any]:
    """K of two heads behind 16 columns that are never rotated: moved, at its place, as it was."""
    import torch

    from sglang_hc.srt.model.rotation import TableRotation

    rotary = module(name, dtype)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn((len(old), 2, 64), generator=generator).to(dtype)
    still = torch.randn((len(old), 2, 16), generator=generator).to(dtype)

    def at(positions: list[int]) -> Any:
        # SGLang gives the rotary embeddings of MLA one more dimension than the others.
        three = name == "deepseek"
        rows = keys.clone() if three else keys.flatten(1)
        _, turned = rotary(torch.tensor(positions), rows.clone(), rows)
        return torch.cat((still, turned.view(keys.shape)), dim=-1)

    stored = at(old)
    parts = [stored.reshape(len(old), -1).view(torch.uint8), torch.ones((len(old), 8)).byte()]
    before = [part.clone() for part in parts]
    places = torch.tensor(old), torch.tensor(new)
    got = TableRotation([rotary], dtype, 2, 16).move(0, parts, *places)
    assert all(torch.equal(a, b) for a, b in zip(parts, before, strict=True)), "the input changed"
    assert torch.equal(got[1], parts[1]), "V has no position"
    return got[0].view(dtype).view(stored.shape), at(new), stored


@pytest.mark.parametrize("name", MODULES)
@settings(max_examples=examples(15), deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, 2047), st.integers(0, 2047)), min_size=1, max_size=6)
)
def test_moved_keys_are_those_of_the_place(name: str, places: list[tuple[int, int]]) -> None:
    import torch

    old, new = map(list, zip(*places, strict=True))
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2**-6)):
        got, wanted, stored = moved_and_wanted(name, old, new, dtype)
        scale = float(wanted.abs().max())
        assert float((got.float() - wanted.float()).abs().max()) <= bound * scale
        assert torch.equal(got[..., :16], stored[..., :16]), "columns that are not rotated moved"
        for row, (a, b) in enumerate(places):
            if a == b:
                assert torch.equal(got[row], stored[row]), "a row that stays changed its bits"


def test_a_rotation_that_does_nothing_is_seen() -> None:
    import torch

    got, wanted, stored = moved_and_wanted("default", [700, 64], [3, 0], torch.float32)
    assert float((stored - wanted).abs().max()) > 0.1 > float((got - wanted).abs().max())


@pytest.mark.parametrize("name", WITHOUT)
def test_other_embeddings_are_refused(name: str) -> None:
    from pkgutil import resolve_name

    from sglang_hc.srt.model.rotation import CannotMove, known_rotary

    kind = resolve_name(f"sglang.srt.layers.rotary_embedding.{name}")
    with pytest.raises(CannotMove, match=kind.__name__):
        known_rotary(kind.__new__(kind))  # some cannot be built without a GPU


def asked(model: str, change: Callable[[Any], None] | None = None) -> str | None:
    """What the check at start says of a model."""
    from sglang_hc.errors import ConfigError
    from sglang_hc.forms import LayerPlan
    from sglang_hc.srt.model.rotation import checked_rotation

    core = Core("--max-total-tokens", "256", "--dtype", "float32", "--hc-disable", model=model)
    runner = core.scheduler.tp_worker.model_runner
    if change is not None:
        change(runner)
    try:
        checked_rotation(runner, LayerPlan(0, 0, runner.token_to_kv_pool.layer_num))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("model", ["opt", "gpt2"])
def test_learned_positions_are_refused(models: None, model: str) -> None:
    said = run_in_child(asked, model)
    assert "adds learned positions to its embeddings" in said
    assert said.startswith("--hc-overflow reembed: ") and "use --hc-overflow recompute" in said


def _coarse(runner: Any) -> None:
    import torch

    runner.token_to_kv_pool.dtype = torch.float8_e5m2


def _flipped(runner: Any) -> None:
    """As if the model rotated layer 2 in another style than its rotary embedding says."""
    import copy

    attention = runner.model.model.layers[2].self_attn
    rotary = copy.copy(attention.rotary_emb)
    original = attention.rotary_emb.forward
    rotary.is_neox_style = not rotary.is_neox_style
    rotary.forward = original
    attention.rotary_emb = rotary


@settings(max_examples=examples(50))
@given(st.integers(128, 1 << 20))
def test_the_check_reaches_to_the_end_of_the_context(context: int) -> None:
    from sglang_hc.srt.model.rotation import probes

    old, new = probes(context)
    assert int(old.max()) == context - 1 and int(new.max()) < 64 <= int(old.min())
    assert len(set(new.tolist())) == len(new) <= 25, "the check runs every layer on them"
    steps = sorted(old.tolist())
    assert all(b <= 2 * a for a, b in pairwise(steps))


CONTEXT = 4096
"""Of the tiny models."""

SCALED = {
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "llama3": MODULES["llama3"]["rope_scaling"],
    "dynamic": MODULES["dynamic"]["rope_scaling"],
}


def _scaled(name: str, runner: Any) -> None:
    """As if the model's configuration had this scaling, beyond its first 512 positions."""
    from sglang.srt.layers.rotary_embedding import get_rope

    for layer in runner.model.model.layers:
        now = layer.self_attn.rotary_emb
        layer.self_attn.rotary_emb = get_rope(
            now.head_size, now.rotary_dim, CONTEXT, 10000, True, SCALED[name], dtype=now.dtype
        )


def _other_from(first: int, runner: Any) -> None:
    """Positions from `first` on are rotated otherwise than the table says."""
    import torch

    def shifted(positions: Any) -> Any:
        return torch.where(positions >= first, positions - 1, positions)

    _read_positions(runner, shifted)


def _by_batch(longest: int, runner: Any) -> None:
    """A table that depends on the longest request, as longrope has one: every position of a batch
    with a long request is rotated by another."""
    _read_positions(runner, lambda p: p // 2 if int(p.max()) >= longest else p)


def _read_positions(runner: Any, change: Callable[[Any], Any]) -> None:
    """Layer 2 rotates by other positions than it is given."""
    import copy

    assert runner.model_config.context_len == CONTEXT
    attention = runner.model.model.layers[2].self_attn
    rotary = copy.copy(attention.rotary_emb)
    original = attention.rotary_emb.forward
    rotary.forward = lambda positions, *rest, **kw: original(change(positions), *rest, **kw)
    attention.rotary_emb = rotary


@pytest.mark.parametrize(
    "change", [None, *(partial(_scaled, name) for name in SCALED), partial(_other_from, CONTEXT)]
)
def test_tables_that_hold_up_to_the_end_of_the_context_may_move(models: None, change: Any) -> None:
    assert run_in_child(asked, "llama-gqa", change) is None


@pytest.mark.parametrize(
    "model", ("mistral", "qwen2", "qwen3", "gemma", "phi", "granite", "starcoder2", "deepseek-v2")
)
def test_models_whose_state_may_move(models: None, model: str) -> None:
    assert run_in_child(asked, model) is None


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (_coarse, "K is kept as torch.float8_e5m2"),
        (_flipped, "K of layer 2"),
        *((partial(_other_from, first), "K of layer 2") for first in (300, CONTEXT - 1)),
        *((partial(_by_batch, longest), "K of layer 2") for longest in (100, 3000)),
    ],
)
def test_state_that_cannot_move_is_refused(models: None, change: Any, wrong: str) -> None:
    assert wrong in run_in_child(asked, "llama-gqa", change)
