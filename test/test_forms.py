"""Layer plans and the byte layout of a block."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_hc.forms import (
    BLOCK_TOKENS,
    CHUNK_ALIGN,
    BlockLayout,
    DraftLayers,
    Form,
    LayerPlan,
    PlanError,
)
from sglang_hc.forms import StateShape as Shape

COUNTS = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)).filter(any)
SHAPES = st.builds(
    lambda hidden, parts: (hidden, tuple(parts)),
    st.integers(1, 9000),
    st.lists(st.integers(1, 5000), min_size=1, max_size=2),
)


def test_forms_of_layers_are_recompute_then_hidden_then_kv() -> None:
    plan = LayerPlan(1, 2, 3)
    assert [plan.form(layer) for layer in range(6)] == (
        [Form.RECOMPUTE] + [Form.HIDDEN] * 2 + [Form.KV] * 3
    )
    assert list(plan.hidden_layers) == [1, 2]
    assert list(plan.kv_layers) == [3, 4, 5]


@given(COUNTS, st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_every_stage_of_a_pipeline_has_each_form_or_the_plan_is_refused(counts, stages) -> None:
    plan = LayerPlan(counts[0], counts[1], counts[2])
    stages = [*stages, plan.num_layers - sum(stages)]
    assume(stages[-1] > 0)
    try:
        plans = plan.over(stages)
    except PlanError:
        stored = [stages[0] - plan.recompute, *stages[1:]]
        even = stored[0] == min(stored) == max(stored)
        assert not (even and all(n == 0 or n >= len(stages) for n in counts[1:]))
        return
    assert [part.num_layers for part in plans] == stages
    assert sum(part.hidden for part in plans) == plan.hidden
    assert [part.recompute for part in plans] == [plan.recompute, *[0] * len(stages[1:])]
    assert {(part.hidden > 0, part.kv > 0) for part in plans} == {(plan.hidden > 0, plan.kv > 0)}


@pytest.mark.parametrize(
    ("counts", "stages", "parts"),
    [
        ((0, 2, 2), [2, 2], ["hidden:1,kv:1"] * 2),
        ((1, 3, 4), [4, 4], ["recompute:1,hidden:1,kv:2", "hidden:2,kv:2"]),
        ((3, 0, 5), [4, 4], ["recompute:3,kv:1", "kv:4"]),
        ((2, 1, 1), [4], ["recompute:2,hidden:1,kv:1"]),
    ],
)
def test_forms_are_shared_by_stages(counts, stages, parts) -> None:
    assert list(map(str, LayerPlan(*counts).over(stages))) == parts


@pytest.mark.parametrize("layer", [-1, 6])
def test_a_layer_outside_the_model_is_an_error(layer: int) -> None:
    with pytest.raises(IndexError, match="6-layer"):
        LayerPlan(1, 2, 3).form(layer)


@given(COUNTS)
def test_a_plan_reads_back_from_its_text(counts: tuple[int, int, int]) -> None:
    plan = LayerPlan(*counts)
    assert LayerPlan.parse(str(plan), plan.num_layers) == plan


def test_whole_model_plans_need_no_counts() -> None:
    assert LayerPlan.parse("kv", 7) == LayerPlan(0, 0, 7)
    assert LayerPlan.parse("hidden", 7) == LayerPlan(0, 7, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hidden:3,kv:3", "covers 6 layers but the model has 8"),
        ("kv:4,hidden:4", "in the order recompute, hidden, kv"),
        ("hidden:4,hidden:4", "name each form once"),
        ("hiden:8", "'hiden:8' is not FORM:COUNT"),
        ("hidden:-8", "is not FORM:COUNT"),
        ("", "is not FORM:COUNT"),
    ],
)
def test_a_wrong_plan_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        LayerPlan.parse(text, 8)


def test_counts_below_zero_are_refused() -> None:
    with pytest.raises(PlanError, match="negative"):
        LayerPlan(-1, 2, 3)


@given(COUNTS, SHAPES, st.integers(0, 3))
def test_chunks_are_aligned_large_enough_and_fill_the_slot(
    counts: tuple[int, int, int], sizes: tuple[int, tuple[int, ...]], drafts: int
) -> None:
    plan = LayerPlan(*counts)
    shape = Shape(plan.num_layers, *sizes, "bfloat16")
    layout = BlockLayout(plan, shape, DraftLayers(drafts, lag=1))
    end = 0
    for layer, offset, length in layout.chunks():
        assert offset == end and offset % CHUNK_ALIGN == 0  # no gap, no overlap
        hidden = layout.form(layer) is Form.HIDDEN
        assert layout.lag(layer) == (layer >= plan.num_layers)
        row = layout.shape.hidden_bytes if hidden else layout.shape.kv_bytes
        assert 0 <= length - row * BLOCK_TOKENS < CHUNK_ALIGN
        end = offset + length
    assert end == layout.slot_bytes
    assert len(layout.chunks()) == plan.hidden + plan.kv + drafts


def test_recomputed_layers_have_no_chunk() -> None:
    layout = BlockLayout(LayerPlan(1, 1, 0), Shape(2, 8, (8, 8), "float32"))
    with pytest.raises(PlanError, match="layer 0"):
        layout.chunk(0)


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="covers 3 layers but the model has 4"):
        BlockLayout(LayerPlan(0, 3, 0), Shape(4, 8, (8, 8), "float32"))


def test_the_fingerprint_depends_on_every_field() -> None:
    layouts = [
        BlockLayout(plan, shape)
        for plan, shape in [
            (LayerPlan(0, 2, 2), Shape(4, 8, (8, 8), "float16")),
            (LayerPlan(0, 3, 1), Shape(4, 8, (8, 8), "float16")),
            (LayerPlan(1, 1, 2), Shape(4, 8, (8, 8), "float16")),
            (LayerPlan(0, 2, 2), Shape(4, 16, (8, 8), "float16")),
            (LayerPlan(0, 2, 2), Shape(4, 8, (16,), "float16")),
            (LayerPlan(0, 2, 2), Shape(4, 8, (8, 8), "bfloat16")),
        ]
    ]
    plan, shape = layouts[0].plan, layouts[0].shape
    drafts = [DraftLayers(1), DraftLayers(2), DraftLayers(1, lag=1)]
    layouts += [BlockLayout(plan, shape, draft) for draft in drafts]
    prints = [layout.fingerprint("model", "revision") for layout in layouts]
    first = layouts[0]
    prints += [first.fingerprint(*extra) for extra in [("model",), ("modelrevision",), ()]]
    # A boundary between two fields must not be movable.
    prints += [first.fingerprint("mode", "lrevision"), first.fingerprint("model\x008:revision")]
    assert len(set(prints)) == len(prints)
    assert first.fingerprint("model", "revision") == prints[0]
    assert len(prints[0]) == 16
