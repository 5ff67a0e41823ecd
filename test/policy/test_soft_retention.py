"""Soft retention: values fall to nothing, bounds hold, and eviction always finds a block."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.policy.eviction import make_policy
from sglang_hc.policy.soft_retention import (
    DEMOTED,
    FEW_STEPS,
    LEVELS,
    MAX_RETAIN_S,
    SoftRetention,
)
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.tree.identity import Prefix
from support.examples import examples
from support.host import host_tier, identities, keep, tokens_of, words_in


def ids(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def test_a_value_falls_in_steps_to_nothing_at_its_end():
    soft = SoftRetention(max_blocks=100)
    heard: list[bytes] = []
    soft.subscribe(heard.extend)
    assert soft.retain("t", ids("ab"), 40, now=0) == 2
    seen = []
    for now in (0, 9.9, 10.1, 20.1, 30.1, 39.9, 40.1):
        soft.advance(now)
        seen.append(round(soft.value(b"a") * (LEVELS + 1)))
        soft.check_integrity()
    assert seen == [4, 4, 3, 2, 1, 1, 0] and len(soft) == 0
    assert heard == ids("ab") * 5
    soft.retain("t", ids("a"), 40, now=50, weight=0.5)
    assert soft.value(b"a") == 2 / (LEVELS + 1)
    soft.advance(1e9)
    assert soft.value(b"a") == 0


def test_what_is_wanted_for_longer_stays_and_what_is_wanted_again_is_renewed():
    soft = SoftRetention(max_blocks=100)
    soft.retain("t", ids("ab"), 3600, now=0)
    soft.retain("t", ids("abc"), 300, now=0)
    soft.advance(301)
    assert soft.value(b"a") > 0 and soft.value(b"c") == 0
    soft.retain("t", ids("abc"), 3600, now=3000)
    soft.advance(3601)
    assert soft.value(b"a") > 0 and soft.value(b"c") > 0
    soft.check_integrity()


def test_demoted_blocks_leave_first_until_they_are_used_but_not_those_of_others():
    soft = SoftRetention(max_blocks=100)
    soft.retain("t", ids("s"), 300, now=0)
    soft.retain("t", ids("sa"), 300, now=0, session="mine")
    assert soft.retain("t", ids("sax"), 60, 1, DEMOTED) == 1, "nobody's wish undoes a session's"
    assert soft.value(b"x") < 0 < soft.value(b"a")
    assert soft.retain("t", ids("sax"), 60, 1, DEMOTED, "other") == 0
    assert soft.retain("t", ids("sax"), 60, 1, DEMOTED, "mine") == 2
    assert soft.value(b"a") < 0
    soft.used(ids("sax"))
    assert soft.value(b"x") == soft.value(b"a") == 0
    soft.check_integrity()
    soft.retain("t", ids("z"), 60, 2, DEMOTED)
    assert soft.retain("t", ids("z"), 60, 2) == 1 and soft.value(b"z") > 0
    soft.check_integrity()


@pytest.mark.parametrize(
    ("seconds", "weight"),
    [(0, 1), (MAX_RETAIN_S + 1, 1), (math.nan, 1), (5, 0), (5, 1.01), (5, -0.5), (5, math.nan)],
)
def test_both_sides_of_time_and_weight(seconds: float, weight: float):
    soft = SoftRetention(max_blocks=9)
    with pytest.raises(ValueError, match="cannot retain"):
        soft.retain("t", ids("a"), seconds, 0, weight)
    assert soft.retain("t", ids("a"), MAX_RETAIN_S, 0, 0.01) == 1


def test_both_sides_of_the_most_blocks_and_the_oldest_makes_room():
    soft = SoftRetention(max_blocks=16)
    assert soft.max_blocks("t") == 8
    assert soft.retain("t", ids("abcdefgh"), 10, 0) == 8
    assert soft.retain("t", ids("ABCDEFGHI"), 10, 1) == 8, "the first ones of a path"
    assert soft.value(b"a") == soft.value(b"I") == 0 and soft.value(b"H") > 0
    assert soft.retain("u", ids("12345"), 10, 2) == 4, "half of what others leave"
    soft.check_integrity()
    assert SoftRetention(max_blocks=1).retain("t", ids("a"), 5, 0) == 0
    soft = SoftRetention(max_blocks=4)
    assert soft.retain("t", ids("abc"), 5, 0, DEMOTED) == 2
    assert soft.value(b"a") == 0 > soft.value(b"b"), "leaves leave first"
    assert SoftRetention(max_blocks=1).retain("t", ids("a"), 5, 0, DEMOTED) == 0


def test_both_sides_of_the_most_retentions():
    soft = SoftRetention(max_blocks=1000, max_claims=8)
    for number in range(5):
        assert soft.retain("t", [b"%d" % number], 10, number) == 1
        soft.check_integrity()
    assert soft.value(b"0") == 0 and soft.value(b"1") > 0
    assert SoftRetention(max_blocks=1000, max_claims=1).retain("t", ids("a"), 5, 0) == 0


def test_a_path_retained_over_and_over_leaves_nothing_behind():
    soft = SoftRetention(max_blocks=64)
    for number in range(5000):
        soft.retain("t", [b"%d" % block for block in range(20)], 300 + number % 7, number / 100)
    soft.check_integrity()
    assert len(soft._steps) <= 2 + FEW_STEPS and len(soft) == 20


@given(st.floats(0, 2e9), st.floats(0, 1e-3, exclude_min=True), st.floats(0, 8), st.floats(0.01, 1))
def test_what_ends_at_once_ends(now: float, seconds: float, ulps: float, weight: float):
    """As a client may ask: below what a clock of floats tells apart, and with 2 calls at a time."""
    soft = SoftRetention(max_blocks=100)
    for asked in (seconds, max(5e-324, ulps * math.ulp(now)), math.ulp(now)):
        soft.retain("t", ids("a"), asked, now, weight)
        soft.advance(now)
        soft.check_integrity()
    soft.advance(now + 0.01)
    assert len(soft) == 0


def test_what_a_path_begins_with_is_noted_by_few_of_those_who_retain_it():
    """Of each claim one block stays its own: the end of its path."""
    soft = SoftRetention(max_blocks=4000)
    begin = [b"%d" % number for number in range(500)]
    for number in range(300):
        soft.retain("t", [*begin, b"end %d" % number], 3600, number)
    soft.check_integrity()
    assert len(soft) == 800
    assert sum(len(one.blocks) for one in soft._claims["t"]) <= 2 * len(soft)


OWNERS = st.sampled_from(["t", "u", None])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["retain", "retain", "demote", "used", "forget", "wait"]),
        OWNERS,
        st.lists(st.integers(0, 9), unique=True, max_size=6),
        st.floats(0.5, 50),
        st.sampled_from([0.1, 0.5, 1.0]),
        st.sampled_from(["s", None]),
    ),
    max_size=40,
)


@settings(max_examples=examples(200))
@given(STEPS)
def test_bounds_hold_and_values_only_fall_and_are_told(history: Any):
    soft = SoftRetention(max_blocks=12, max_claims=6)
    told: dict[bytes, float] = {}
    soft.subscribe(lambda blocks: told.update((one, soft.value(one)) for one in blocks))
    now, ends = 0.0, dict[bytes, float]()
    for action, owner, numbers, seconds, weight, session in history:
        blocks = [str(owner).encode() + bytes([number]) for number in numbers]
        if action in ("retain", "demote"):
            demote = action == "demote"
            others = len(soft) - soft._held[owner]
            held = soft.retain(owner, blocks, seconds, now, DEMOTED if demote else weight, session)
            assert held <= max(0, 12 - others) // 2
            ends |= {one: max(ends.get(one, 0), now + seconds) for one in blocks}
        elif action == "used":
            soft.used(blocks)
            assert all(soft.value(one) >= 0 for one in blocks)
        elif action == "forget":
            soft.forget(lambda name, owner=owner: name == owner)
            assert soft._held[owner] == 0
        else:
            before = {one: soft.value(one) for one in ends}
            now += seconds
            soft.advance(now)
            for one, value in before.items():
                assert soft.value(one) <= max(0.0, value)
        for one, end in ends.items():
            value = soft.value(one)
            assert -1 < value < 1 and (end > now or value == 0)
            assert told.get(one, 0.0) == value, "a change nobody was told of"
        soft.check_integrity()


WORDS = ("ab", "ac", "d", "ef", "g", "hij")


def evicted(retained: bool, uses: list[str], twice: list[str]) -> list[set[str]]:
    """What is left after each eviction, one block at a time, down to nothing."""
    window = LookAhead()
    soft = SoftRetention(max_blocks=100)
    host = host_tier(32, make_policy("queue", window, None, soft))
    for word in WORDS:
        keep(host, tokens_of(word))
    for word in uses:
        host.access(host.tree.match(Prefix(None, tokens_of(word))).nodes, 0.0)
    if retained:
        for word in dict.fromkeys([*twice, *WORDS]):
            soft.retain("t", identities(tokens_of(word)), 60, now=0)
    left = []
    while host.published_blocks:
        assert host.evict(1, 0.0) == 1, "nothing may leave"
        left.append(words_in(host.tree))
    return left


@given(st.lists(st.sampled_from(WORDS), max_size=8), st.lists(st.sampled_from(WORDS), max_size=3))
def test_where_all_is_retained_blocks_leave_in_the_plain_order(uses: Any, twice: Any):
    assert evicted(True, uses, twice) == evicted(False, uses, twice)


@given(st.data())
def test_what_is_retained_leaves_after_what_is_not_and_before_what_is_needed(data: Any):
    window = LookAhead()
    soft = SoftRetention(max_blocks=100)
    host = host_tier(32, make_policy("queue", window, None, soft))
    names = "abcdefgh"
    for name in names:
        keep(host, tokens_of(name))
    kinds = st.sampled_from(["plain", "short", "long", "first", "needed", "both"])
    kind = {name: data.draw(kinds) for name in names}
    wish = {"short": (10, 1.0), "long": (100, 1.0), "first": (100, DEMOTED), "both": (100, 1.0)}
    for name, is_kind in kind.items():
        if is_kind in wish:
            seconds, weight = wish[is_kind]
            soft.retain("t", identities(tokens_of(name)), seconds, 0, weight)
    waiting = [name for name in names if kind[name] in ("needed", "both")]
    window.update(waiting, len(waiting), lambda name: identities(tokens_of(name)))
    soft.advance(9.0)  # the short ones are nearly over
    order = []
    for _ in names:
        before = words_in(host.tree)
        host.evict(1, 0.0)
        order += before - words_in(host.tree)
    rank = ["first", "plain", "short", "long", "needed"]
    ranks = [rank.index("needed" if kind[one] == "both" else kind[one]) for one in order]
    assert ranks == sorted(ranks) and len(order) == len(names)
    needed = [one for one in order if one in waiting]
    assert needed == waiting[::-1], "what is needed last leaves first, retained or not"


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.floats(1, 3600)), max_size=20),
    st.integers(1, 16),
)
def test_half_of_the_tier_is_left_to_those_who_retain_nothing(clients: Any, blocks: int):
    soft = SoftRetention.sized_for(32)
    host = host_tier(32, make_policy("queue", LookAhead(), None, soft))
    for number, (tenant, own, seconds) in enumerate(clients):
        word = chr(1000 + number) * own
        keep(host, tokens_of(word))
        soft.retain(f"t{tenant}", identities(tokens_of(word)), seconds, now=0)
    newcomer = tokens_of("".join(chr(2000 + number) for number in range(blocks)))
    keep(host, newcomer)
    assert all(map(host.has, identities(newcomer))), "it pushed itself out"
    assert not any(map(soft.value, identities(newcomer))) and len(soft) <= 16
