"""Two tensor-parallel ranks, or two stages of a pipeline: a conversation that was evicted between
its turns goes on token for token, on both ranks, from memory and from disk, and whatever happens to
one of them.

The reference is the same conversation on the same two ranks that never leaves the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.conversations import Outcome, check_same_tokens, compare, options, overwrite
from support.exactness import BOUND
from support.ranked_core import CORES, RankedCore, StagedCore, run_ranks
from support.ranked_turns import both_on_rank, worst_of_stage

MIXED = "recompute:1,hidden:2,kv:1"
CASES = [
    ("llama-gqa", MIXED),
    ("llama-mha", "hidden"),
    ("llama-mha", "kv"),
    ("llama-gqa", "hidden"),
    ("qwen3", "hidden:2,kv:2"),
    ("qwen3", MIXED),
    ("deepseek-v2", "kv"),
    ("deepseek-v2", "recompute:2,kv:2"),
]


def check_alike(found: list[Outcome]) -> None:
    """Ranks sampled the same tokens and took the same decisions."""
    first, second = found
    assert first.kept["tokens"] == second.kept["tokens"]
    assert first.evicted["tokens"] == second.evicted["tokens"]
    ours, others = (common(rank.stats) for rank in found)
    assert ours == others


def common(stats: dict[str, Any]) -> dict[str, Any]:
    """What ranks must have in common: the first one alone counts whose part of a block failed."""
    return {key: value for key, value in stats.items() if not key.startswith("rank")}


@pytest.mark.parametrize(
    ("model", "form"), [CASES[0], *(pytest.param(*c, marks=pytest.mark.slow) for c in CASES[1:])]
)
def test_each_form_float32(models: None, model: str, form: str) -> None:
    both = run_ranks(both_on_rank, "tp", model, form)
    found, numbers = [rank for rank, _ in both], [info for _, info in both]
    check_alike(found)
    assert numbers[0]["ranks"] == numbers[1]["ranks"] and len(numbers[0]["ranks"]) == 2
    for counted, info in zip(numbers[0]["ranks"], numbers, strict=True):
        assert counted["restored_tokens"] == info["restored_tokens"] > 0
    for rank in found:
        assert rank.stats["layer_plan"] == (form if ":" in form else f"{form}:4")
        check_same_tokens(rank)
        assert rank.worst("error") <= BOUND["float32"]
        assert rank.worst("error", slice(rank.layers - 1, rank.layers)) == 0.0 or form == "hidden"


STAGED = [
    ("llama-gqa", "hidden:2,kv:2"),
    ("llama-mha", "hidden"),
    ("llama-mha", "kv"),
    ("llama-gqa", "recompute:1,hidden:3"),
    ("qwen3", "recompute:1,kv:3"),
    ("qwen3", "hidden:2,kv:2"),
    ("deepseek-v2", "recompute:1,kv:3"),
]


@pytest.mark.parametrize(
    ("model", "form"),
    [STAGED[0], *(pytest.param(*c, marks=pytest.mark.slow) for c in STAGED[1:])],
)
def test_each_form_of_two_stages_float32(models: None, model: str, form: str) -> None:
    both = run_ranks(both_on_rank, "pp", model, form)
    first, second = (rank for rank, _ in both)
    assert first.kept["tokens"] == second.kept["tokens"]
    recomputed = [counted.pop("recomputed_layer_tokens", 0) for counted in both[0][1]["ranks"]]
    assert recomputed[0] == first.stats.get("recomputed_layer_tokens", 0)
    assert recomputed[1] == 0 and (recomputed[0] > 0) == ("recompute" in form)
    for rank, info in both:
        assert rank.stats["layer_plan"] == (form if ":" in form else f"{form}:4")
        check_same_tokens(rank)
        assert worst_of_stage(rank) <= BOUND["float32"]
        assert info["ranks"][0]["restored_tokens"] == info["ranks"][1]["restored_tokens"] > 0


def both_on_uneven_stage(rank: int, port: int, form: str) -> tuple[Outcome, tuple[int, ...]]:
    """The first stage has three layers of four, of which one may be recomputed."""
    found, _ = both_on_rank(rank, port, "pp", "llama-gqa", form, SGLANG_PP_LAYER_PARTITION="3,1")
    return found, (found.stats["host_slots"], found.stats["host_bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["recompute:2,hidden:2", "recompute:1,kv:3"])
def test_stages_of_different_size(models: None, form: str) -> None:
    (first, (slots, size)), (second, (others, less)) = run_ranks(both_on_uneven_stage, form)
    assert slots == others and (size > less) == (form == "recompute:1,kv:3")
    for rank in (first, second):
        check_same_tokens(rank)
        assert worst_of_stage(rank) <= BOUND["float32"]


def spoiled_on_stage(rank: int, port: int) -> Outcome:
    core = StagedCore(rank, port, *options("hidden:2,kv:2", "float32"), model="llama-gqa")
    return compare(core, overwrite if rank == 1 else lambda _: None)


@pytest.mark.slow
def test_garbage_of_one_stage_is_noticed(models: None) -> None:
    """The control: its layers are its own, and the last layer's output is what both go on with."""
    found = run_ranks(spoiled_on_stage)
    assert all(rank.evicted["tokens"][1:] != rank.kept["tokens"][1:] for rank in found)
    first, second = map(worst_of_stage, found)
    assert first <= BOUND["float32"] and second > 0.1


def spoiled_on_rank(rank: int, port: int) -> Outcome:
    """What the second rank keeps is overwritten before it comes back."""
    core = RankedCore(rank, port, *options("hidden:2,kv:2", "float32"), model="llama-gqa")
    layout, width = core.tree.tiers.layout, core.model_state.layers[0].qkv.weight.shape[1]
    assert layout.shape.hidden_bytes == width * 4 // 2, "each rank keeps half of the columns"
    return compare(core, overwrite if rank == 1 else lambda _: None)


def test_garbage_of_one_rank_is_noticed(models: None) -> None:
    """The control: were one rank's part not used, or not compared, the tests would be blind. Its
    columns of hidden states reach both ranks, its heads of K and V stay its own."""
    found = run_ranks(spoiled_on_rank)
    assert all(rank.evicted["tokens"][1:] != rank.kept["tokens"][1:] for rank in found)
    both_hidden = [rank.worst("error", slice(0, 2)) for rank in found]
    assert min(both_hidden) > 0.1
    first, second = (rank.worst("error", slice(3, 4)) for rank in found)
    assert first == 0.0 and second > 0.1


def started(rank: int, port: int, kind: str, cache: str) -> tuple:
    """What a start without a profile settles on this rank."""
    flags = ("--dtype", "float32", "--hc-host-size-gb", "0.2", "--max-total-tokens", "640")
    core = CORES[kind](rank, port, *flags, profile=None, XDG_CACHE_HOME=cache)
    state, host = core.model_state, core.tree.tiers.host
    files = sorted(path.name for path in Path(cache).rglob("profile-*"))
    return state.cost, str(state.plan), host.num_slots, host.tree.fingerprint, files


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "parallel"), [("tp", "tensor"), ("pp", "pipeline")])
def test_ranks_measure_together_and_decide_by_one_measurement(
    models: None, tmp_path: Path, kind: str, parallel: str
) -> None:
    first, second = run_ranks(started, kind, str(tmp_path))
    assert first[:4] == second[:4] and first[0] is not None
    assert f"{parallel} parallel 2" in first[0].fingerprint
    assert len(first[4]) == 1, "one rank writes the profile"
    if not first[0].is_noisy:
        again = run_ranks(started, kind, str(tmp_path))
        assert again[1][0] == first[0], "the next start takes it"
