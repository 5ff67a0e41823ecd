import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.policy.fit import Fit, fit_line, fit_prefill, fit_step

SIZES = (64, 256, 1024, 4096, 16384)
seconds = st.floats(1e-7, 1e-1)


@given(seconds, seconds.map(lambda s: s / 1000))
def test_line_without_noise_is_found_exactly(fixed, per_token):
    line = fit_line([(n, fixed + per_token * n) for n in SIZES])
    assert line.fixed == pytest.approx(fixed, rel=1e-4, abs=1e-7 * per_token * SIZES[-1])
    assert line.per_token == pytest.approx(per_token, rel=1e-6)


@given(*(seconds.map(lambda s, share=share: s / share) for share in (1e3, 1e7, 1e4)))
def test_the_terms_of_a_prefill_are_told_apart(per_token, per_pair, per_context):
    truth = Fit(1e-5, per_token, per_pair, per_context=per_context)
    fit = fit_prefill([(n, c, truth.seconds(n, c)) for n in SIZES for c in (0, 2048, 8192)])
    for new, context in ((128, 0), (512, 12000), (16384, 16384)):
        assert fit.seconds(new, context) == pytest.approx(truth.seconds(new, context), rel=1e-2)


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 300))
def test_a_sliding_window_counts_the_pairs_inside_it(new, context, window):
    """Each token attends to the `window` tokens before it at most, and to half of itself."""
    near = sum(min(place, window) for place in range(context, context + new))
    fit = Fit(0.0, 0.0, 1.0, window=window, windowed=1.0)
    assert near <= fit.attention(new, context) <= near + new / 2


@given(st.lists(st.tuples(st.sampled_from(SIZES), seconds), min_size=2, max_size=12))
def test_more_tokens_never_cost_less_whatever_the_samples(samples):
    if len({n for n, _ in samples}) < 2:
        samples = [*samples, (64, 1e-3), (128, 1e-3)]
    line = fit_line(samples)
    times = [line.seconds(n) for n in range(0, 20000, 500)]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert times[1] >= min(s for _, s in samples)


def test_falling_times_give_a_constant():
    line = fit_line([(64, 3.0), (1024, 2.0), (4096, 1.0)])
    assert line.per_token == 0.0
    # The constant of the least relative error: sum(1 / y) / sum(1 / y^2).
    assert line.fixed == pytest.approx((1 / 3 + 1 / 2 + 1) / (1 / 9 + 1 / 4 + 1))


def test_a_slow_large_sample_does_not_spoil_the_small_ones():
    """64 new tokens are behind every history: their price is as good as a long prefill's."""
    truth = Fit(3e-3, 1.6e-4, 3e-8)
    sizes = [(64, 0), (64, 1024), (256, 0), (256, 2048), (1024, 0), (1024, 1024), (2048, 0)]
    slow = [(n, c, truth.seconds(n, c) * (1.05 if n == 2048 else 1)) for n, c in sizes]
    fit = fit_prefill(slow)
    for new, context in sizes:
        assert fit.seconds(new, context) == pytest.approx(truth.seconds(new, context), rel=0.06)


def test_few_new_tokens_behind_a_long_history_pay_for_reading_it():
    """Seconds of one layer on a CPU: 64 new tokens behind 4,032 take three times as long as behind
    none, which no cost of pairs explains that long prefills have as well."""
    behind = [(64, 0, 9.7e-3), (64, 1024, 14.0e-3), (256, 0, 30.1e-3), (64, 4032, 31.1e-3)]
    both = [*behind, (256, 2048, 53.9e-3), (1024, 0, 136e-3), (1024, 1024, 175e-3),
            (2048, 0, 287e-3), (2048, 2048, 490e-3)]  # fmt: skip
    fit = fit_prefill(both)
    for new, context, taken in both:
        assert fit.seconds(new, context) == pytest.approx(taken, rel=0.06)
    assert fit.seconds(8128, 0) == pytest.approx(1.95, rel=0.15)
    # With one number of new tokens behind contexts, pairs and contexts are the same column.
    assert fit_prefill(behind).per_context == 0.0 < fit.per_context
    assert fit_prefill(behind).seconds(2048, 2048) > 0.49


def test_floor_keeps_small_calls_from_looking_free():
    # Launch-bound below 1024 tokens, which a line through all samples cannot show.
    samples = [(n, max(1e-4, 1e-7 * n)) for n in SIZES]
    assert fit_line(samples).seconds(64) == pytest.approx(1e-4, rel=0.2)
    assert fit_line(samples).seconds(64) >= 1e-4


@pytest.mark.parametrize(
    ("samples", "word"),
    [
        ([], "2 different sizes"),
        ([(64, 1.0), (64, 1.1)], "2 different sizes"),
        ([(64, 1.0), (128, math.nan)], "nan"),
        ([(64, 1.0), (128, 0.0)], "positive"),
        ([(64, 1.0), (0, 1.0)], "impossible size"),
    ],
)
def test_samples_that_mean_nothing_are_refused(samples, word):
    with pytest.raises(ValueError, match=word):
        fit_line(samples)


def test_prefill_needs_three_sizes():
    with pytest.raises(ValueError, match="3 different sizes"):
        fit_prefill([(64, 0, 1.0), (128, 0, 2.0)])


def test_pairs_add_up_over_a_split_prefill():
    cost = Fit(0.0, 0.0, 1.0)
    split = cost.seconds(100, 50) + cost.seconds(300, 150)
    assert cost.seconds(400, 50) == pytest.approx(split)


def test_no_tokens_take_no_time():
    assert Fit(1.0, 1.0, floor=5.0).seconds(0) == 0.0
    assert Fit(1.0, 1.0, 1.0, floor=5.0).seconds(0, 100) == 0.0


@given(st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 9000)), min_size=1, max_size=4))
def test_a_batch_takes_what_its_parts_say(lengths):
    fit = Fit(1e-3, 1e-5, 1e-9, per_context=1e-6, floor=2e-3)
    attention, rest = fit.batch(lengths)
    assert attention == pytest.approx(sum(fit.attention(*one) for one in lengths))
    assert rest >= 0 and attention + rest >= fit.floor * (1 - 1e-9)
    whole = sum(fit.batch(lengths[:1]))
    assert whole == pytest.approx(fit.seconds(*lengths[0]))


def test_another_form_takes_as_long_for_each_byte():
    half = Fit(1e-3, 1e-5, floor=2e-3).of_bytes(0.5)
    assert half == Fit(1e-3, 5e-6)


@given(
    st.integers(1, 9000), st.integers(1, 9000), st.integers(0, 9000), st.integers(1, 9000),
    st.floats(0, 1),
)  # fmt: skip
def test_what_a_window_saves(first, second, context, window, windowed):
    """Attention in two chunks costs what it does in one, never more than to everything, and as much
    where everything is inside."""
    whole = Fit(0.0, 0.0, 1.0)
    near = Fit(0.0, 0.0, 1.0, window=window, windowed=windowed)
    both = near.attention(first + second, context)
    parts = near.attention(first, context) + near.attention(second, context + first)
    assert parts == pytest.approx(both)
    assert both <= whole.attention(first + second, context) * (1 + 1e-9)
    if context + first + second <= window:
        assert both == pytest.approx(whole.attention(first + second, context))
    assert near.seconds(first, context) == near.attention(first, context)
    assert near.attended(context) == pytest.approx(
        windowed * min(context, window) + (1 - windowed) * context
    )


@given(seconds, seconds.map(lambda s: s / 10), seconds.map(lambda s: s / 1e5))
def test_the_terms_of_a_decode_step_are_told_apart(fixed, per_request, per_context):
    sizes = [(b, b * c) for b in (1, 8) for c in (64, 1024)]
    fit = fit_step([(b, c, fixed + per_request * b + per_context * c) for b, c in sizes])
    wanted = fixed + per_request * 24 + per_context * 40_000
    assert fit.seconds(24, 40_000) == pytest.approx(wanted, rel=1e-3)
