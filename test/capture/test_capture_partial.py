"""What does not fit is left out from the end: both sides of each limit, and any room at all."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.capture.capture import Segment
from sglang_hc.capture.saving import STRAIGHT_ROWS
from sglang_hc.forms import BLOCK_TOKENS, EndLayout, LayerPlan, StateLayers
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.copy_streams import LateCopyStream
from support.examples import examples
from support.tiers import HIDDEN_BYTES, PARTS, ToyPool, build

HIDDEN = LayerPlan(0, 2, 0)
PLANS = [HIDDEN, LayerPlan(0, 0, 2), LayerPlan(0, 2, 1)]


def states(layers: int, seed: int, first: int, rows: int) -> torch.Tensor:
    """Hidden states of rows [first, first + rows) of a sequence, all different."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (first + rows, layers, HIDDEN_BYTES), generator=generator)
    return drawn[first:].transpose(0, 1).to(torch.uint8).contiguous()


def tokens_of(seed: int, count: int) -> bytes:
    return pack_tokens([1000 * seed + i for i in range(count)])


def kept(tiers: Tiers, seed: int, count: int) -> int:
    """Tokens that can be served of a sequence; what is served is right."""
    tiers.drain()
    tiers.check_integrity()
    nodes, usable = tiers.host.tree.match(Prefix(None, tokens_of(seed, count))).ready
    plan, pool = tiers.layout.plan, tiers.restorer.path.pool
    hidden = states(plan.hidden, seed, 0, count)
    for block, node in enumerate(nodes):
        low = block * BLOCK_TOKENS
        rows = min(BLOCK_TOKENS, usable - low)
        saved = torch.from_numpy(pool.hidden[node.slot][:, :rows])
        assert torch.equal(saved, hidden[:, low : low + rows])
        for part in range(len(PARTS)):
            saved = torch.from_numpy(pool.kv[part][node.slot][:, :rows])
            for index, layer in enumerate(plan.kv_layers):
                slots = device_slots(seed, count)[low : low + rows]
                assert torch.equal(saved[index], tiers.restorer.path.sink.rows(layer)[part][slots])
    return usable


def device_slots(seed: int, count: int) -> torch.Tensor:
    return torch.arange(count) + 1000 * seed


def passes(tiers: Tiers, rows: list[tuple[int, int, int]], tapped: int | None = None) -> None:
    """One pass: (seed, first position, rows) for each of its requests, in order."""
    segments, parts = [], []
    at = 0
    for seed, first, count in rows:
        if not tiers.capture.is_open(str(seed)):
            tiers.capture.open(str(seed), Prefix(None, tokens_of(seed, first)))
        segments.append(Segment(str(seed), first, at, count))
        parts.append(states(tiers.layout.plan.hidden, seed, first, count))
        at += count
    taps = torch.cat(parts, dim=1)[:, :tapped]
    tiers.capture.take(segments, taps)


def commit(tiers: Tiers, seed: int, count: int, final: bool = True) -> None:
    slots = device_slots(seed, count)
    tiers.capture.commit(str(seed), Prefix(None, tokens_of(seed, count)), slots, final=final)


def fill_pool(pool: ToyPool) -> None:
    generator = torch.Generator().manual_seed(1)
    for layer in pool.kv:
        for part in layer:
            part.copy_(torch.randint(0, 256, part.shape, generator=generator))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("prompts", [[191], [192], [193], [1000], [500, 500]])
def test_prompts_longer_than_all_snapshots_are_kept_whole(
    plan: LayerPlan, prompts: list[int]
) -> None:
    """In one pass. There is room for 3 x 64 rows, and no executor takes any away meanwhile."""
    tiers, pool, _ = build(plan, slots=40, device_slots=3000)
    fill_pool(pool)
    passes(tiers, [(seed, 0, rows) for seed, rows in enumerate(prompts, 1)])
    for seed, rows in enumerate(prompts, 1):
        commit(tiers, seed, rows)
    assert [kept(tiers, seed, rows) for seed, rows in enumerate(prompts, 1)] == prompts
    assert not tiers.capture.counters["not_staged_tokens"]


@pytest.mark.parametrize(("steps", "lost"), [(8, 0), (9, 1)])
def test_decode_steps_that_find_scattering_behind_are_cut_off(steps: int, lost: int) -> None:
    """One row a step, room for 8 while nothing is scattered. What follows them is not kept."""
    tiers, _, executor = build(HIDDEN, slots=40, device_slots=3000, rows=4, buffers=2)
    passes(tiers, [(1, 0, 120)])
    for step in range(steps):
        passes(tiers, [(1, 120 + step, 1)])
    assert tiers.capture.counters["backpressure"] == lost
    while executor.waiting:
        executor.step()
    passes(tiers, [(1, 120 + steps, 1)])  # there is room again, but not for this request
    commit(tiers, 1, 121 + steps)
    wanted = 121 + steps if not lost else 128
    assert kept(tiers, 1, 121 + steps) == wanted
    assert tiers.capture.counters["not_staged_tokens"] == (2 if lost else 0)
    assert tiers.host.staged_slots == 0


@pytest.mark.parametrize(
    ("tapped", "first", "second"), [(300, 150, 150), (299, 150, 128), (149, 128, 0)]
)
def test_a_pass_beyond_the_taps_is_kept_from_its_front(
    tapped: int, first: int, second: int
) -> None:
    tiers, _, _ = build(HIDDEN, slots=40, device_slots=3000)
    passes(tiers, [(1, 0, 150), (2, 0, 150)], tapped)
    for seed in (1, 2):
        commit(tiers, seed, 150)
    assert [kept(tiers, seed, 150) for seed in (1, 2)] == [first, second]
    assert tiers.capture.counters["not_staged_tokens"] == 300 - first - second
    assert tiers.capture.counters["tap_overflow"] == (first < 150) + (second < 150)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(("slots", "wanted"), [(5, 300), (4, 256), (1, 64)])
def test_a_full_host_tier_keeps_the_first_blocks(plan: LayerPlan, slots: int, wanted: int) -> None:
    tiers, pool, _ = build(plan, slots=slots, device_slots=3000)
    fill_pool(pool)
    passes(tiers, [(1, 0, 300)])
    commit(tiers, 1, 300)
    assert kept(tiers, 1, 300) == wanted


def test_what_is_not_kept_is_counted_once_and_the_reply_is_not_joined_to_it() -> None:
    tiers, _, _ = build(HIDDEN, slots=40, device_slots=3000)
    passes(tiers, [(1, 0, 200)], tapped=100)
    commit(tiers, 1, 200, final=False)
    assert tiers.capture.counters["not_staged_tokens"] == 200 - 64
    for step in range(60):
        passes(tiers, [(1, 200 + step, 1)])
    commit(tiers, 1, 260)
    assert tiers.capture.counters["not_staged_tokens"] == 260 - 64
    assert kept(tiers, 1, 260) == 64


def test_a_step_that_is_computed_again_closes_the_gap() -> None:
    """The rows beyond the taps are given once more, from where they were cut."""
    tiers, _, _ = build(HIDDEN, slots=40, device_slots=3000)
    passes(tiers, [(1, 0, 200)], tapped=100)
    tiers.drain()
    passes(tiers, [(1, 80, 120)])
    commit(tiers, 1, 200)
    assert kept(tiers, 1, 200) == 200


@pytest.mark.parametrize("ring", [0, 4096])
def test_a_step_that_is_computed_again_overwrites_what_a_scatter_has_yet_to_write(
    ring: int,
) -> None:
    """Ten rows wait in a snapshot. The same positions come again with many more behind them, which
    on their own would go straight; the last writer wins."""
    tiers, _, _ = build(
        HIDDEN, slots=40, device_slots=3000, copy_stream=LateCopyStream(), ring=ring
    )
    tiers.capture.open("1", Prefix(None, b""))
    wrong = torch.zeros((2, 10, HIDDEN_BYTES), dtype=torch.uint8)
    tiers.capture.take([Segment("1", 0, 0, 10)], wrong)
    passes(tiers, [(1, 0, 100)])
    commit(tiers, 1, 100)
    assert kept(tiers, 1, 100) == 100


@pytest.mark.parametrize("plan", PLANS, ids=str)
@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_whatever_the_room_a_right_prefix_is_published(
    plan: LayerPlan, data: st.DataObject
) -> None:
    """Slots, snapshots, taps, ring, executor, copies: of any size and as slow as they like."""
    draw = data.draw
    tiers, pool, executor = build(
        plan, slots=draw(st.integers(1, 12)), device_slots=4000,
        rows=draw(st.integers(1, 70)), buffers=draw(st.integers(1, 3)),
        copy_stream=LateCopyStream() if draw(st.booleans()) else None,
        ring=draw(st.sampled_from([0, 64, 3000])),
    )  # fmt: skip
    fill_pool(pool)
    computed = {seed: 0 for seed in (1, 2, 3)}
    for _ in range(draw(st.integers(1, 12))):
        rows = []
        for seed in draw(st.lists(st.sampled_from([1, 2, 3]), unique=True, min_size=1)):
            again = draw(st.sampled_from([0, 0, 0, 5])) if computed[seed] else 0
            first = max(0, computed[seed] - again)
            count = draw(st.one_of(st.just(1), st.integers(1, 150)))
            rows.append((seed, first, count))
            computed[seed] = first + count
        passes(tiers, rows, draw(st.sampled_from([None, None, 20, 100])))
        for _ in range(draw(st.integers(0, 3))):
            executor.step()
        if draw(st.booleans()):
            seed = draw(st.sampled_from([1, 2, 3]))
            commit(tiers, seed, computed[seed], final=False)
    for seed, count in computed.items():
        commit(tiers, seed, count)
        kept(tiers, seed, count)
    assert tiers.host.staged_slots == 0


@pytest.mark.parametrize("between", [1, STRAIGHT_ROWS])
def test_rows_that_nobody_keeps_take_no_room_of_those_around_them(between: int) -> None:
    """The prefill of a request whose state is not kept stood between two rows that are, and took
    the snapshots from them."""
    tiers, _, _ = build(HIDDEN, slots=4, device_slots=100, rows=16, buffers=2)
    segments, row = [], 0
    for rid, rows in (("1", 1), ("nobody", between), ("2", 1)):
        segments.append(Segment(rid, 0, row, rows))
        row += rows
    parts = [states(2, seed, 0, rows) for seed, rows in ((1, 1), (9, between), (2, 1))]
    for rid in "12":
        tiers.capture.open(rid, Prefix(None, b""))
    tiers.capture.take(segments, torch.cat(parts, dim=1))
    assert tiers.capture.hidden is not None
    assert tiers.capture.hidden.snapshots.room == 32 - 2
    for seed in (1, 2):
        commit(tiers, seed, 1)
        assert kept(tiers, seed, 1) == 1


def test_nothing_is_kept_of_a_block_inside_which_nobody_can_go_on() -> None:
    """Layers without full attention are kept at ends of blocks alone."""
    layout = EndLayout(state=StateLayers((1,), (8,), ("uint8",)))
    for ends, tokens in ((None, 100), (layout, BLOCK_TOKENS)):
        tiers, pool, _ = build(LayerPlan(0, 0, 2), slots=4, device_slots=3000, ends=ends)
        fill_pool(pool)
        commit(tiers, 1, 100, final=False)
        assert kept(tiers, 1, 100) == tokens
        commit(tiers, 1, 130)
        assert kept(tiers, 1, 130) == (130 if ends is None else 128)
        assert tiers.host.staged_slots == 0


@pytest.mark.parametrize("plan", [LayerPlan(0, 0, 2), LayerPlan(0, 2, 1)], ids=str)
@settings(max_examples=examples(20), deadline=None)
@given(fails=st.integers(0, 2), final=st.booleans(), before=st.sampled_from([0, 64, 100]))
def test_an_error_while_rows_are_gathered_leaves_nothing_behind(
    plan: LayerPlan, fails: int, final: bool, before: int
) -> None:
    """Slots that the request does not have yet stayed staged for ever, and its path pinned."""
    tiers, pool, _ = build(plan, slots=40, device_slots=3000)
    fill_pool(pool)
    passes(tiers, [(1, 0, 250)])
    if before:
        commit(tiers, 1, before, final=False)
    gather, calls = pool.gather, itertools.count()

    def failing(*args: Any) -> None:
        if next(calls) == fails:
            raise RuntimeError("planted")
        gather(*args)

    pool.gather = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="planted"):
        commit(tiers, 1, 250, final)
    pool.gather = gather  # type: ignore[method-assign]
    tiers.capture.drop("1")
    assert kept(tiers, 1, 250) == before
    assert not tiers.host.staged_slots
    assert not any(node.pins for node in tiers.host.tree.nodes())
    passes(tiers, [(1, 0, 250)])
    commit(tiers, 1, 250)
    assert kept(tiers, 1, 250) == 250
