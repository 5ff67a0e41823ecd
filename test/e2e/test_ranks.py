"""Two tensor-parallel ranks, two stages of a pipeline, or two stages of two ranks each: a
conversation that was evicted between its turns goes on token for token on all of them.

The reference is the same conversation on the same ranks that never leaves the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.conversations import Outcome, check_same_tokens, compare, options, overwrite
from support.exactness import BOUND
from support.offloading import spoiled_weights
from support.ranked_core import CORES, run_ranks
from support.ranked_turns import both_on_rank, worst_of_stage

BY_DAY = [
    ("tp", "llama-gqa", "recompute:1,hidden:2,kv:1"),
    ("pp", "llama-gqa", "hidden:2,kv:2"),
]
BY_NIGHT = [
    ("tp", "llama-mha", "hidden"),
    ("tp", "llama-mha", "kv"),
    ("tp", "llama-gqa", "hidden"),
    ("tp", "qwen3", "hidden:2,kv:2"),
    ("tp", "qwen3", "recompute:1,hidden:2,kv:1"),
    ("tp", "deepseek-v2", "kv"),
    ("tp", "deepseek-v2", "recompute:2,kv:2"),
    ("pp", "llama-mha", "hidden"),
    ("pp", "llama-mha", "kv"),
    ("pp", "llama-gqa", "recompute:1,hidden:3"),
    ("pp", "qwen3", "recompute:1,kv:3"),
    ("pp", "qwen3", "hidden:2,kv:2"),
    ("pp", "deepseek-v2", "recompute:1,kv:3"),
    ("grid", "llama-gqa", "hidden:2,kv:2"),
    ("grid", "llama-mha", "hidden"),
    ("grid", "qwen3", "recompute:1,kv:3"),
    ("grid", "deepseek-v2", "kv"),
]


def with_weights_in_host_memory(
    rank: int, port: int, kind: str, form: str
) -> tuple[Outcome, dict[str, Any]]:
    with spoiled_weights():
        return both_on_rank(rank, port, kind, "llama-gqa", form, "--hc-offload-gb", "1")


@pytest.mark.parametrize("kind", ["tp", pytest.param("pp", marks=pytest.mark.slow)])
def test_each_rank_may_have_its_part_of_the_weights_in_host_memory(models: None, kind: str) -> None:
    form = "recompute:1,hidden:1,kv:2" if kind == "tp" else "hidden:2,kv:2"
    wanted = run_ranks(both_on_rank, kind, "llama-gqa", form)
    for (plain, _), (rank, _) in zip(
        wanted, run_ranks(with_weights_in_host_memory, kind, form), strict=True
    ):
        check_same_tokens(rank)
        assert rank.kept["tokens"] == plain.kept["tokens"]
        assert worst_of_stage(rank) <= BOUND["float32"]


@pytest.mark.parametrize(
    ("kind", "model", "form"),
    [*BY_DAY, *(pytest.param(*case, marks=pytest.mark.slow) for case in BY_NIGHT)],
)
def test_each_form_float32(models: None, kind: str, model: str, form: str) -> None:
    """Ranks sample the same tokens, restore the same, and tensor-parallel ones count the same;
    only the first stage recomputes layers."""
    ranks = 4 if kind == "grid" else 2
    both = run_ranks(both_on_rank, kind, model, form, ranks=ranks)
    found, shown = [rank for rank, _ in both], [info["ranks"] for _, info in both]
    for rank, info in both:
        assert rank.kept["tokens"] == found[0].kept["tokens"]
        assert rank.stats["layer_plan"] == (form if ":" in form else f"{form}:4")
        check_same_tokens(rank)
        assert worst_of_stage(rank) <= BOUND["float32"]
        restored = [counted["restored_tokens"] for counted in info["ranks"]]
        assert restored == [info["restored_tokens"]] * ranks and restored[0] > 0
    if kind == "tp":
        assert common(found[0].stats) == common(found[1].stats) and shown[0] == shown[1]
        for rank in found:
            assert form == "hidden" or rank.worst("error", slice(rank.layers - 1, None)) == 0.0
    if kind == "pp":
        recomputed = [counted.get("recomputed_layer_tokens", 0) for counted in shown[0]]
        assert recomputed[0] == found[0].stats.get("recomputed_layer_tokens", 0)
        assert recomputed[1] == 0 and (recomputed[0] > 0) == ("recompute" in form)


def common(stats: dict[str, Any]) -> dict[str, Any]:
    """What ranks must have in common: the first one alone counts whose part of a block failed, and
    each has taken its own time."""
    return {
        key: value
        for key, value in stats.items()
        if not key.startswith("rank") and key != "slowest_restorations"
    }


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


def spoiled(rank: int, port: int, kind: str) -> Outcome:
    """What the second rank keeps is overwritten before it comes back."""
    core = CORES[kind](rank, port, *options("hidden:2,kv:2", "float32"), model="llama-gqa")
    if kind == "tp":
        layout, width = core.tree.tiers.layout, core.model_state.layers[0].qkv.weight.shape[1]
        assert layout.shape.hidden_bytes == width * 4 // 2, "each rank keeps half of the columns"
    return compare(core, overwrite if rank == 1 else lambda _: None)


@pytest.mark.parametrize("kind", ["tp", pytest.param("pp", marks=pytest.mark.slow)])
def test_garbage_of_one_rank_is_noticed(models: None, kind: str) -> None:
    """The control: were one rank's part not used, or not compared, the tests would be blind. Its
    columns of hidden states reach both tensor-parallel ranks, its heads of K and V stay its own. A
    stage's layers are its own, and the last layer's output is what both go on with."""
    found = run_ranks(spoiled, kind)
    assert all(rank.evicted["tokens"][1:] != rank.kept["tokens"][1:] for rank in found)
    if kind == "tp":
        assert min(rank.worst("error", slice(0, 2)) for rank in found) > 0.1
        first, second = (rank.worst("error", slice(3, 4)) for rank in found)
        assert first == 0.0
    else:
        first, second = map(worst_of_stage, found)
        assert first <= BOUND["float32"]
    assert second > 0.1


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
    again = run_ranks(started, kind, str(tmp_path))
    assert again[1][0] == first[0], "the next start takes it"
