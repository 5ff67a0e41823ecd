"""Prefetch: order by turn, one fetch per block, nothing that comes too late for its price."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.prefetch import (
    Candidate,
    ConstantRates,
    PrefetchPlanner,
    TurnEstimate,
    missing_blocks,
    reserve_slots,
)

BLOCK = 1000
SLOW_PREFILL = ConstantRates(disk_bytes_per_s=BLOCK, prefill_tokens_per_s=BLOCK_TOKENS / 100)
"""One second to fetch a block, a hundred to recompute it."""
FAST_PREFILL = ConstantRates(disk_bytes_per_s=BLOCK, prefill_tokens_per_s=BLOCK_TOKENS * 100)


def ids(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def plan(costs, *candidates):
    planner: PrefetchPlanner[str] = PrefetchPlanner(costs, BLOCK)
    return [(f.request, b"".join(f.blocks).decode()) for f in planner.plan(candidates)]


def test_the_sooner_turn_first_and_the_smaller_of_one_turn():
    late = Candidate("late", 50.0, ids("abc"), 0)
    large = Candidate("large", 20.0, ids("defg"), 0)
    small = Candidate("small", 20.0, ids("h"), 0)
    assert plan(SLOW_PREFILL, late, large, small) == [
        ("small", "h"),
        ("large", "defg"),
        ("late", "abc"),
    ]


def test_what_would_be_late_is_left_when_recomputing_is_cheaper():
    # The disk is busy for 4 s with the first; the second has its turn after 6 s: two blocks fit.
    first = Candidate("first", 5.0, ids("abcd"), 0)
    second = Candidate("second", 6.0, ids("efgh"), 0)
    assert plan(FAST_PREFILL, first, second) == [("first", "abcd"), ("second", "ef")]
    assert plan(SLOW_PREFILL, first, second) == [("first", "abcd"), ("second", "efgh")]


def test_nothing_is_fetched_for_a_turn_that_has_come_when_recomputing_is_cheaper():
    head = Candidate("head", 0.0, ids("ab"), 0)
    assert plan(FAST_PREFILL, head) == []
    assert plan(SLOW_PREFILL, head) == [("head", "ab")]


def test_a_shared_block_is_fetched_once_and_stays_wanted_until_its_last_user_goes():
    planner: PrefetchPlanner[str] = PrefetchPlanner(SLOW_PREFILL, BLOCK)
    one, two = Candidate("one", 9.0, ids("sa"), 0), Candidate("two", 9.5, ids("sb"), 0)
    fetches = planner.plan([one, two])
    assert [b"".join(f.blocks) for f in fetches] == [b"sa", b"b"]
    for fetch in fetches:
        planner.started(fetch.request, fetch.blocks)
    assert planner.plan([one, two]) == [], "under way already"
    assert planner.cancel("one") == ids("a"), "two still waits for s"
    planner.completed(ids("s"))
    assert planner.is_fetching("two")
    planner.completed(ids("b"))
    planner.completed(ids("a"))  # cancelled before: ignored
    assert not planner.is_fetching("two") and planner.in_flight == 0


def test_turns_are_told_from_the_rate_of_admissions():
    turns = TurnEstimate()
    assert turns.turn_in(5) == 0.0
    for step in range(10):
        turns.admitted(2, now=step * 4.0)
    assert turns.turn_in(3) == 6.0
    turns.idle()
    turns.admitted(1, now=1e6)  # the pause is not a rate
    assert turns.turn_in(3) == 6.0


def test_a_gap_on_disk_ends_the_path():
    host, disk = set(ids("ab")), set(ids("abdf"))
    assert missing_blocks(ids("abdef"), host.__contains__, disk.__contains__) == (2, ids("d"))
    assert missing_blocks(ids("ab"), host.__contains__, disk.__contains__) == (2, [])


def test_the_reserve_holds_two_requests_but_never_a_large_part_of_the_tier():
    assert reserve_slots(10_000, 30.5) == 61
    assert reserve_slots(160, 30.5) == 10
    assert reserve_slots(10, 30.5) == 0


candidates = st.lists(
    st.tuples(st.floats(0, 30), st.lists(st.integers(0, 15), unique=True, max_size=6)),
    max_size=6,
)
steps = st.lists(
    st.tuples(st.sampled_from(["plan", "complete", "cancel"]), st.integers(0, 100), candidates),
    max_size=15,
)


@settings(max_examples=200)
@given(steps, st.floats(0.1, 1000))
def test_who_waits_for_what_stays_consistent_and_late_blocks_pay(history, prefill_rate):
    costs = ConstantRates(BLOCK, prefill_rate)
    planner: PrefetchPlanner[int] = PrefetchPlanner(costs, BLOCK)
    flying: set[bytes] = set()
    for action, number, drawn in history:
        if action == "plan":
            offered = [
                Candidate(i, t, [bytes([b]) for b in bs], 0) for i, (t, bs) in enumerate(drawn)
            ]
            busy = float(len(flying))
            for fetch in planner.plan(offered):
                (candidate,) = [c for c in offered if c.request == fetch.request]
                assert not flying & set(fetch.blocks)
                late = busy + len(fetch.blocks) - candidate.turn_in
                assert (
                    late <= 1e-6
                    or late <= costs.recompute_seconds(len(fetch.blocks) * BLOCK_TOKENS, 0) + 1e-6
                )
                busy += len(fetch.blocks)
                planner.started(fetch.request, fetch.blocks)
                flying.update(fetch.blocks)
        elif action == "complete":
            done = sorted(flying)[: number % 5]
            planner.completed(done)
            flying.difference_update(done)
        else:
            flying.difference_update(planner.cancel(number % 6))
        planner.check_integrity()
        assert planner.in_flight == len(flying)
