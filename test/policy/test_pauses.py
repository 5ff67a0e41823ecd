"""Learned pauses: what is known of kinds of pauses, and what sessions are worth by it."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.policy import owners, pauses
from sglang_hc.policy.owners import Owners
from sglang_hc.policy.pauses import (
    BUCKETS,
    EVIDENCE,
    STARTS,
    UNKNOWN_VALUES,
    Kind,
    Pauses,
    PauseTable,
    Survival,
    bucket_of,
    values_of,
)
from support.examples import examples

FRESH = itertools.count(1 << 64)


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def teach(
    known: Pauses, kind: Kind, seconds: float, times: int, now: float, lost: bool = False
) -> float:
    """A session of this kind stays away for so long, or forever, so many times, each in turn."""
    for _ in range(times):
        end = name(next(FRESH))
        known.left(kind, [end], now)
        if not lost:
            now += seconds
            known.advance(now)
            assert known.came([end], now).turns == kind.turn
    return now


def test_a_bucket_holds_what_lies_between_its_start_and_the_next():
    assert [bucket_of(start) for start in STARTS] == list(range(BUCKETS))
    assert bucket_of(0.0099) == 0 and bucket_of(1e9) == BUCKETS - 1


def test_of_unknown_sessions_the_older_one_is_worth_less():
    assert list(UNKNOWN_VALUES) == sorted(UNKNOWN_VALUES, reverse=True)
    assert len(set(UNKNOWN_VALUES)) == BUCKETS


def test_the_chance_to_come_back_is_the_share_of_those_still_away():
    """Of 1,000 pauses 300 end in the first bucket, 350 in the second, and 350 never do."""
    counts = Survival()
    for number in range(1000):
        since = counts.began()
        if number < 300:
            counts.ended_in(since, 0)
            continue
        counts.lasted(since, 1)
        if number < 650:
            counts.ended_in(since, 1)
        else:
            for bucket in range(2, 6):
                counts.lasted(since, bucket)
    found = counts.chances([0.0] * BUCKETS)
    assert found[0] == pytest.approx(0.3, abs=0.02)
    assert found[1] == pytest.approx(0.5, abs=0.03)
    assert found[2:] == [0.0] * (BUCKETS - 2)


def test_the_value_is_the_best_rate_at_which_keeping_pays():
    """Nobody comes back before the bucket from 10 s on; there everybody does."""
    ends = bucket_of(10.0)
    values = values_of([1.0 if bucket == ends else 0.0 for bucket in range(BUCKETS)])
    assert values[ends + 1 :] == (0.0,) * (BUCKETS - ends - 1)
    assert list(values[: ends + 1]) == sorted(values[: ends + 1]), "the nearer the more"
    middle = (STARTS[ends] + STARTS[ends + 1]) / 2
    assert values[0] == pytest.approx(1 / middle)


def test_who_is_back_by_now_as_a_rule_and_who_is_about_to_be():
    known = Pauses()
    quick, slow = Kind(None, "read", 1), Kind(None, "build", 1)
    now = teach(known, quick, 0.1, 100, 0.0)
    teach(known, quick, 0.0, 20, now, lost=True)
    now = teach(known, slow, 100.0, 100, now)
    read, build = known.left(quick, [name(1)], now), known.left(slow, [name(2)], now)
    assert read.value > 10 * build.value
    known.advance(now + 50)
    assert build.value > 4 * read.value


def test_who_never_comes_back_is_known_before_hours_have_passed():
    known, kind, other = Pauses(), Kind(None, "finish", 1), Kind(None, "query", 1)
    now = teach(known, other, 5.0, 100, 0.0)
    teach(known, kind, 0.0, 100, now, lost=True)
    known.advance(now + 60)
    last, again = known.left(kind, [name(1)], now + 60), known.left(other, [name(2)], now + 60)
    known.advance(now + 62)
    assert last.value < again.value / 4


def test_a_kind_without_pauses_is_judged_by_the_wider_one_and_a_namespace_by_itself():
    known = Pauses()
    now = teach(known, Kind("a", "run", 1), 30.0, 200, 0.0)
    table = known.table
    at = bucket_of(30)
    same, close, far = (
        table.values(Kind("a", *kind))[at] for kind in (("run", 1), ("run", 99), ("new", 1))
    )
    assert same > close > far > UNKNOWN_VALUES[at]
    assert table.values(Kind("b", "run", 1)) == UNKNOWN_VALUES
    teach(known, Kind("b", "run", 1), 1000.0, 200, now)
    assert table.values(Kind("a", "run", 1))[at] > 10 * table.values(Kind("b", "run", 1))[at]


def test_what_was_learned_long_ago_weighs_less():
    known, kind = Pauses(), Kind(None, "run", 1)
    now = teach(known, kind, 1.0, 2000, 0.0)
    at = bucket_of(0.8)
    before = known.table.values(kind)[at]
    teach(known, kind, 100.0, 4000, now)
    assert known.table.values(kind)[at] < before / 20


def test_however_many_names_somebody_makes_up_the_tables_stay_small_and_others_keep_theirs():
    known, kind = Pauses(), Kind("mine", "run", 1)
    now = teach(known, kind, 1.0, 200, 0.0)
    before = known.table.values(kind)
    for number in range(5000):
        known.left(Kind("theirs", f"tool {number}", number), [name(number)], now)
        known.left(Kind(f"salt {number}", "x" * 10_000, 1), [name(number + 10_000)], now)
    assert known.table.values(kind) == before
    assert len(known.table) < 1000
    known.check_integrity()


def test_one_tool_more_takes_the_place_of_the_one_that_was_called_longest_ago():
    table = PauseTable()
    tools = [f"tool {number}" for number in range(pauses.MAX_TOOLS)]
    counts = {tool: table.levels(Kind("a", tool, 1))[1] for tool in tools}
    assert all(table.levels(Kind("a", tool, 1))[1] is counts[tool] for tool in tools)
    size = len(table)
    table.levels(Kind("a", "another", 1))
    assert len(table) == size
    assert table.levels(Kind("a", tools[1], 1))[1] is counts[tools[1]]
    assert table.levels(Kind("a", tools[0], 1))[1] is not counts[tools[0]]


def test_one_namespace_more_takes_the_place_of_the_one_with_the_fewest_pauses():
    table = PauseTable()
    for number in range(pauses.MAX_NAMESPACES):
        for _ in range(1 if number == 3 else 2):
            table.levels(Kind(f"space {number}", "t", 1))[0].began()
    size = len(table)
    table.levels(Kind("another", "t", 1))
    assert len(table) == size
    assert table.levels(Kind("space 4", "t", 1))[0].total == 2
    assert table.levels(Kind("space 3", "t", 1))[0].total == 0


def test_of_a_long_name_the_first_characters_count():
    table, longest = PauseTable(), "x" * pauses.MAX_NAME
    counts = table.levels(Kind("a", longest, 1))[1]
    assert table.levels(Kind("a", longest + "y", 1))[1] is counts
    assert table.levels(Kind("a", longest[1:] + "y", 1))[1] is not counts


def test_of_one_session_more_than_are_followed_the_first_is_gone(monkeypatch):
    monkeypatch.setattr(pauses, "MAX_SESSIONS", 3)
    known = Pauses()
    away = [known.left(Kind("a", "t", 1), [name(number)], 0.0) for number in range(3)]
    assert list(known.sessions) == away
    more = known.left(Kind("a", "t", 1), [name(3)], 0.0)
    assert list(known.sessions) == [*away[1:], more] and away[0].is_over
    assert known.came([name(0)], 1.0).turns == 0
    known.check_integrity()


def test_of_one_expected_block_more_than_are_known_the_first_is_nobodys(monkeypatch):
    monkeypatch.setattr(owners, "EXPECTED", 2)
    blocks, known = Owners(), Pauses()
    served = [known.came([name(number)], 0.0) for number in range(3)]
    for number, session in enumerate(served[:2]):
        blocks.expect(name(number), session)
    blocks.came(name(0), None)
    assert blocks.block_of(served[0]) == name(0)
    for number, session in enumerate(served):
        blocks.expect(name(10 + number), session)
    for number in range(3):
        blocks.came(name(10 + number), None)
    assert [blocks.block_of(one) for one in served] == [name(0), name(11), name(12)]


def test_nothing_counts_before_enough_sessions_came_back():
    known, kind = Pauses(), Kind(None, "", 1)
    now = teach(known, kind, 1.0, EVIDENCE - 1, 0.0)
    teach(known, kind, 1.0, 1000, now, lost=True)
    assert not known.is_evident
    teach(known, kind, 1.0, 1, now + 10)
    assert known.is_evident


def test_the_longest_session_that_a_prompt_goes_on_with_came_back():
    known = Pauses()
    short = known.left(Kind(None, "", 1), [name(1)], 0.0)
    long = known.left(Kind(None, "", 2), [name(2), name(3)], 0.0)
    assert known.came([name(1), name(2), name(4)], 1.0) is long
    assert known.came([name(1), name(2), name(3)], 1.0) is short
    assert known.came([name(1)], 1.0).turns == 0
    known.check_integrity()


def test_a_forgotten_namespace_is_new_again():
    known = Pauses()
    now = teach(known, Kind("mine", "run", 1), 1.0, 100, 0.0)
    now = teach(known, Kind("theirs", "run", 1), 1.0, 100, now)
    gone = known.left(Kind("mine", "run", 1), [name(1)], now)
    before = known.table.values(Kind("theirs", "run", 1))
    known.forget(lambda namespace: namespace == "mine")
    assert gone.is_over and known.came([name(1)], now).turns == 0
    assert known.table.values(Kind("mine", "run", 1)) == pytest.approx(UNKNOWN_VALUES)
    assert known.table.values(Kind("theirs", "run", 1)) == before
    known.check_integrity()


EVENTS = st.lists(
    st.tuples(st.sampled_from(["left", "came", "wait"]), st.integers(0, 9), st.floats(0.001, 3000)),
    max_size=80,
)


@settings(max_examples=examples(100), deadline=None)
@given(EVENTS)
def test_counts_add_up_whatever_happens(events):
    known, now, number = Pauses(), 0.0, 0
    last: dict[int, pauses.Away] = {}
    for event, session, seconds in events:
        if event == "left":
            number += 1
            kind = Kind(None, "ab"[session % 2], session)
            known.left(kind, [name(session), name(100 + number)], now, last.pop(session, None))
        elif event == "came":
            last[session] = known.came([name(session)], now)
        else:
            now += seconds
            known.advance(now)
        known.check_integrity()
    for kind in (Kind(None, "a", 2), Kind(None, "b", 1)):
        for level in known.table.levels(kind):
            assert sum(level.ended) + sum(level.open) == pytest.approx(level.total)
            assert min(*level.ended, *level.open) >= 0
        assert all(value > 0 for value in known.table.values(kind))


def test_two_that_see_the_same_are_of_one_mind():
    """The ranks of a model: what they think depends on nothing but what they were told."""

    def run() -> list[float]:
        rng, known, now = random.Random(1), Pauses(), 0.0
        away: dict[int, pauses.Away] = {}
        for number in range(600):
            now += rng.expovariate(1.0)
            known.advance(now)
            session = rng.randrange(40)
            before = known.came([name(session)], now)
            kind = Kind(rng.choice("ab"), rng.choice("xyz"), number % 7)
            away[session] = known.left(kind, [name(session)], now, before)
        return [session.value for session in away.values()]

    assert run() == run()


def test_a_table_made_anew_knows_nothing():
    assert PauseTable().values(Kind(None, "x", 3)) == pytest.approx(UNKNOWN_VALUES)
