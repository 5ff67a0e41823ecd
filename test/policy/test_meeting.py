"""The meeting point: never slower than reading all or computing all, and better in between."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.fit import Fit
from sglang_hc.policy.meeting import History, Span, best_split, restore_alone
from sglang_hc.policy.restore_plan import plan_restore
from support.profiles import cost_model

LAYERS = 8
KV = LayerPlan(0, 0, LAYERS)
PREFILL = 1e-4


def on_disk(context: int, coming: int, held: int, new: int) -> History:
    return History(context, [Span(SourceTier.DISK, coming)], held, new)


def coming(history: History) -> int:
    return sum(span.tokens for span in history.coming)


def serial(cost, history: History) -> float:
    """All is read, by disk and store at the same time, then all is restored."""
    by_tier = {
        tier: sum(span.tokens for span in history.coming if span.tier is tier)
        for tier in (SourceTier.DISK, SourceTier.REMOTE)
    }
    read = max(cost.copy_stored(tier, KV, tokens) for tier, tokens in by_tier.items() if tokens)
    total = coming(history) + history.held
    return read + plan_restore(cost, KV, total, context=history.context, new=history.new).seconds


def recompute(cost, history: History) -> float:
    tokens = coming(history) + history.held + history.new
    return LAYERS * cost.prefill_layer(tokens, history.context)


@pytest.mark.parametrize("times_slower", [0.25, 1.0, 4.0])
def test_the_source_and_the_device_end_together(times_slower: float) -> None:
    """With costs that are linear, of N tokens those are computed that take as long as the rest."""
    cost = cost_model(host=1e-9, disk=times_slower * PREFILL, prefill=PREFILL)
    split = best_split(cost, KV, on_disk(0, 4096, 0, 64))
    wanted = 4096 * times_slower / (1 + times_slower)
    assert split.head == pytest.approx(wanted, abs=BLOCK_TOKENS)
    assert split.stall == pytest.approx(LAYERS * PREFILL * split.head)
    bound = LAYERS * PREFILL * (wanted + 64)
    assert bound * 0.98 < split.seconds < bound * 1.05


runs = st.lists(
    st.tuples(st.sampled_from([SourceTier.DISK, SourceTier.REMOTE]), st.integers(1, 60)),
    min_size=1, max_size=4,
)  # fmt: skip


@given(
    st.floats(0, 1e-3), st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-3),
    st.integers(0, 4000), runs, st.integers(0, 64), st.integers(1, 3000),
)  # fmt: skip
def test_it_is_never_slower_than_one_way_alone(
    host, disk, remote, prefill, context, runs, held, new
) -> None:
    """Wherever the parts of a history lie."""
    cost = cost_model(host=host, disk=disk, remote=remote, prefill=prefill)
    spans = [Span(tier, blocks * BLOCK_TOKENS) for tier, blocks in runs]
    history = History(context, spans, held * BLOCK_TOKENS, new)
    split = best_split(cost, KV, history)
    rivals = [serial(cost, history), recompute(cost, history)]
    assert split.seconds <= min(rivals) * (1 + 1e-9)
    assert 0 <= split.head <= coming(history) and split.head % BLOCK_TOKENS == 0


def test_a_block_is_priced_by_where_it_lies() -> None:
    """Of a history whose second half lies in a slow store that half is computed too; one whose
    first half lies there ends where the disk begins."""
    cost = cost_model(host=1e-9, disk=1e-9, remote=1.0, prefill=PREFILL)
    far, near = Span(SourceTier.REMOTE, 2048), Span(SourceTier.DISK, 2048)
    heads = [
        best_split(cost, KV, History(0, spans, 0, 64)).head
        for spans in ([near, near], [far, near], [near, far], [far, far])
    ]
    assert heads == [0, 2048, 4096, 4096]


def test_disk_and_store_read_at_the_same_time() -> None:
    cost = cost_model(disk=2.0, remote=3.0)
    spans = [Span(SourceTier.REMOTE, 64), Span(SourceTier.DISK, 128), Span(SourceTier.REMOTE, 64)]
    history = History(0, spans, 0, 1)
    seconds = [history.read_seconds(cost, KV, head) / LAYERS for head in (0, 64, 128, 192, 256)]
    assert seconds == [128 * 3.0, 128 * 2.0, 64 * 3.0, 64 * 3.0, 0.0]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([SourceTier.DISK, SourceTier.REMOTE]),
            st.integers(1, 20),
            st.one_of(st.just(0.0), st.floats(0, 2)),
        ),
        min_size=1, max_size=4,
    ),
    st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-3), st.floats(0, 1e-2),
)  # fmt: skip
def test_what_a_source_has_taken_already_shortens_what_is_left_of_it(
    runs: list[tuple[SourceTier, int, float]], disk: float, remote: float, floor: float
) -> None:
    """Never below nothing, by no more than it has taken, and a longer head never waits longer."""
    cost = cost_model(disk=disk, remote=remote)
    line = replace(cost.copies[SourceTier.REMOTE].kv, floor=floor)
    far = replace(cost.copies[SourceTier.REMOTE], kv=line)
    cost = replace(cost, copies={**cost.copies, SourceTier.REMOTE: far})
    last = {tier: number for number, (tier, _, _) in enumerate(runs)}
    now = [
        Span(tier, blocks * BLOCK_TOKENS, taken if last[tier] == number else 0.0)
        for number, (tier, blocks, taken) in enumerate(runs)
    ]
    taken = sum(span.taken for span in now)
    fresh = History(0, [span._replace(taken=0.0) for span in now], 0, 1)
    heads = range(0, coming(fresh) + 1, BLOCK_TOKENS)
    left = [History(0, now, 0, 1).read_seconds(cost, KV, head) for head in heads]
    whole = [fresh.read_seconds(cost, KV, head) for head in heads]
    assert all(0 <= a <= b <= a + taken + 1e-9 for a, b in zip(left, whole, strict=True))
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(left)) and left[-1] == 0.0


@pytest.mark.parametrize(
    ("taken", "left"), [(0.0, 12.0), (1.0, 11.0), (7.99, 4.01), (8.0, 4.0), (99.0, 4.0)]
)
def test_what_is_overdue_is_expected_at_once_and_what_was_not_asked_for_takes_its_time(
    taken: float, left: float
) -> None:
    """Of twelve blocks the last eight were asked for; a block takes a second."""
    cost = cost_model(remote=1 / LAYERS / BLOCK_TOKENS)
    far = SourceTier.REMOTE
    spans = [Span(far, 4 * BLOCK_TOKENS), Span(far, 8 * BLOCK_TOKENS, taken)]
    history = History(0, spans, 0, 1)
    assert history.read_seconds(cost, KV, 0) == pytest.approx(left)
    behind = history.read_seconds(cost, KV, 4 * BLOCK_TOKENS)
    assert behind == pytest.approx(max(0.0, 8.0 - taken))


def test_nothing_is_computed_of_what_is_nearly_here() -> None:
    cost = cost_model(host=1e-9, remote=PREFILL, prefill=PREFILL)
    reads = LAYERS * PREFILL * 512
    heads = [
        best_split(cost, KV, History(512, [Span(SourceTier.REMOTE, 512, part * reads)], 0, 64)).head
        for part in (0.0, 0.5, 0.85, 1.0, 2.0)
    ]
    assert heads == [256, 128, 64, 0, 0]


def test_others_who_decode_make_the_head_shorter() -> None:
    cost = cost_model(host=1e-9, disk=1e-4, prefill=PREFILL)
    heads = [
        best_split(cost, KV, on_disk(0, 8192, 0, 64), decoding=count).head for count in (0, 1, 8)
    ]
    assert heads[0] > 0 and heads == sorted(heads, reverse=True) and heads[-1] == 0


def played(cost: CostModel, plan: LayerPlan, history: int, head: int, new: int) -> float:
    """Seconds when the device computes `head` tokens, restores what has come of the rest again and
    again, and what comes last together with the new tokens."""
    layers, blocks = plan.num_layers, (history - head) // BLOCK_TOKENS
    each = cost.copy_stored(SourceTier.DISK, plan, history - head) / blocks
    now, done = layers * cost.prefill_layer(head, 0), 0
    while (came := min(blocks, int(now / each + 1e-9))) < blocks:
        if came > done:
            now += restore_alone(cost, plan, (came - done) * BLOCK_TOKENS)
            done = came
        else:
            now = (came + 1) * each
    rest = max(0, blocks - done) * BLOCK_TOKENS
    context = head + done * BLOCK_TOKENS
    return now + plan_restore(cost, plan, rest, context=context, new=new).seconds


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("plan", [KV, LayerPlan(0, LAYERS, 0)])
@given(
    speed=st.floats(0.1, 8), share=st.floats(0.05, 0.6), floor=st.floats(0, 0.04),
    blocks=st.integers(8, 128),
)  # fmt: skip
@example(speed=7.0, share=0.25, floor=0.0, blocks=14)
@example(speed=6.129233428091289, share=0.05, floor=0.03753398836160651, blocks=19)
def test_blocks_restored_as_they_come_take_what_is_expected(
    overlap: bool, plan: LayerPlan, speed: float, share: float, floor: float, blocks: int
) -> None:
    """speed: of the source over the balance. share: what restoring a token takes over computing it.
    floor: seconds that a restored layer takes at least, over those of a computed block.

    What is expected is exceeded by less than a hundredth, where each restored layer takes its
    floor. It is up to a quarter too much where a short history comes fast: more than one run of
    blocks is left then to be restored beside the new tokens."""
    linear = cost_model(
        host=share * PREFILL / 2, disk=PREFILL / speed, project=share * PREFILL / 2,
        prefill=PREFILL, hidden_share=1.0, overlap=overlap,
    )  # fmt: skip
    least = Fit(0.0, share * PREFILL / 2, floor=floor * BLOCK_TOKENS * PREFILL)
    cost = replace(linear, project=least)
    history = blocks * BLOCK_TOKENS
    split = best_split(cost, plan, on_disk(0, history, 0, BLOCK_TOKENS))
    late = best_split(cost, plan, on_disk(0, history, 0, BLOCK_TOKENS), can_restore_early=False)
    assert split.seconds <= late.seconds and not late.as_they_come
    if split.as_they_come:
        took = played(cost, plan, history, split.head, BLOCK_TOKENS)
        assert 0.75 * split.seconds <= took <= 1.01 * split.seconds


def test_blocks_are_restored_as_they_come_where_restoring_takes_time() -> None:
    cost = cost_model(host=PREFILL / 4, disk=PREFILL / 4, prefill=PREFILL)
    history = on_disk(0, 4096, 0, 64)
    split = best_split(cost, KV, history)
    late = best_split(cost, KV, history, can_restore_early=False)
    assert split.as_they_come and split.seconds < 0.8 * late.seconds
    free = best_split(cost_model(disk=PREFILL / 4, prefill=PREFILL), KV, history)
    assert not free.as_they_come


@pytest.mark.parametrize(("recompute", "early"), [(0, True), (1, False)])
def test_recomputed_layers_need_what_comes_first(recompute: int, early: bool) -> None:
    cost = cost_model(host=PREFILL / 4, disk=PREFILL / 4, prefill=PREFILL)
    plan = LayerPlan(recompute, 0, LAYERS - recompute)
    assert best_split(cost, plan, on_disk(0, 4096, 0, 64)).as_they_come == early


def test_what_is_restored_already_is_only_context() -> None:
    cost = cost_model(host=PREFILL / 4, disk=PREFILL / 4, prefill=PREFILL)
    left = best_split(cost, KV, on_disk(1024, 512, 0, 64)._replace(restored=2048))
    alone = best_split(cost, KV, on_disk(1024, 512, 0, 64))
    assert left == alone, "without attention the context costs nothing"
    here = best_split(cost, KV, History(1024, [], 0, 64, restored=2048))
    assert here.seconds == pytest.approx(LAYERS * PREFILL * 64)
