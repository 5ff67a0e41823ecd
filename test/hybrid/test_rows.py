"""Rows of rounds in a place: each token has one, and what crosses are long runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.hybrid.rows import FIRST_ROW, Numbers, RoundRows, Runs, rounds_of
from sglang_hc.policy.streaming import Streaming
from support.examples import examples


class Pass:
    """slots, new: as `rounds_of` has them."""

    def __init__(self, streaming: Streaming, slots: list[Numbers], new: list[int]) -> None:
        self.streaming, self.slots, self.new = streaming, slots, new


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    """Requests with old and new tokens, some of which share a prefix."""
    tokens = draw(st.integers(8, 60))
    act = draw(st.integers(0, tokens))
    device = draw(st.integers(0, act))
    free = draw(st.permutations(range(1, tokens + 1)))
    shared = [free.pop() for _ in range(draw(st.integers(0, 5)))]
    slots, new = [], []
    for _ in range(draw(st.integers(1, 6))):
        own = [free.pop() for _ in range(min(len(free), draw(st.integers(1, 9))))]
        if not own:
            break
        prefix = shared[: draw(st.integers(0, len(shared)))]
        slots.append(np.array([*prefix, *own], dtype=np.int64))
        new.append(draw(st.integers(1, len(own))))
    longest = max(map(len, slots), default=1)
    rows = draw(st.integers(longest, max(longest, tokens)))
    return Pass(Streaming(tokens, act, device, rows), slots, new)


def expanded(runs: Runs) -> dict[int, int]:
    """Row in host memory of each row in the place."""
    return {
        place + step: home + step
        for home, place, count in zip(*(column.tolist() for column in runs), strict=True)
        for step in range(count)
    }


@settings(max_examples=examples(200), deadline=None)
@given(passes())
def test_each_request_is_in_one_round_that_fits(of: Pass) -> None:
    rounds = rounds_of(of.slots, of.new, of.streaming)
    assert sorted(index for one in rounds for index in one.requests) == list(range(len(of.slots)))
    tokens = [token for one in rounds for token in one.new_tokens.tolist()]
    assert sorted(tokens) == list(range(sum(of.new)))
    for one in rounds:
        assert sum(one.old) + sum(one.new) <= of.streaming.rows
        assert one.old.act + one.new.act <= of.streaming.act_tokens
    distinct = len(set(np.concatenate(of.slots).tolist()))
    if distinct <= of.streaming.rows:
        assert len(rounds) == 1, "one round where all rows fit"


@settings(max_examples=examples(200), deadline=None)
@given(passes())
def test_a_row_is_that_of_its_slot(of: Pass) -> None:
    starts = np.cumsum([0, *of.new])
    for one in rounds_of(of.slots, of.new, of.streaming):
        found: dict[int, int] = {}
        for number, rows in zip(one.requests, one.rows, strict=True):
            for slot, row in zip(of.slots[number].tolist(), rows.tolist(), strict=True):
                assert found.setdefault(slot, row) == row, "one row for a shared slot"
        count = sum(one.old) + sum(one.new)
        assert sorted(found.values()) == list(range(FIRST_ROW, FIRST_ROW + count))
        news = np.concatenate(
            [of.slots[n][len(of.slots[n]) - of.new[n] :] for n in one.requests]
        ).tolist()
        assert [found[slot] for slot in news] == one.new_rows.tolist()
        whose = [int(starts[n]) + step for n in one.requests for step in range(of.new[n])]
        assert whose == one.new_tokens.tolist()
        _crossing(of, one, found, dict(zip(whose, news, strict=True)))


def _crossing(of: Pass, one: RoundRows, rows: dict[int, int], new: dict[int, int]) -> None:
    """rows: of K and V, by slot. new: slots by token."""
    streaming = of.streaming
    slots = {row: slot for slot, row in rows.items()}
    old_rows = range(FIRST_ROW, FIRST_ROW + sum(one.old))
    old = [slots[row] for row in old_rows]
    assert old == sorted(old)
    behind = [slots[FIRST_ROW + len(old) + step] for step in range(sum(one.new))]
    for kinds, known, hidden, kv, first in (
        (one.old, old, one.hidden_in, one.kv_in, 0),
        (one.new, behind, one.hidden_out, one.kv_out, one.old.act),
    ):
        device = [slot for slot in known if slot <= streaming.device_act]
        host = [slot for slot in known if streaming.device_act < slot <= streaming.act_tokens]
        rest = [slot for slot in known if slot > streaming.act_tokens]
        assert kinds == (len(device), len(host), len(rest))
        where = {first + len(device) + i: s - 1 - streaming.device_act for i, s in enumerate(host)}
        assert expanded(hidden) == where
        assert expanded(kv) == {rows[s]: s - 1 - streaming.act_tokens for s in rest}
    assert (one.kept + 1).tolist() == old[: one.old.device_act]
    assert (one.to_keep + 1).tolist() == behind[: one.new.device_act]
    assert [new[token] for token in one.act_tokens.tolist()] == behind[: one.new.act]
    for slot, position in zip(old, one.positions.tolist(), strict=False):
        assert any(slot in of.slots[number][position : position + 1] for number in one.requests)
    assert len(one.positions) == one.old.act


def test_consecutive_slots_cross_in_one_run() -> None:
    streaming = Streaming(100, 40, 10, 100)
    (one,) = rounds_of([np.arange(1, 91)], [1], streaming)
    assert [len(runs.counts) for runs in (one.hidden_in, one.kv_in, one.kv_out)] == [1, 1, 1]
    assert one.old == (10, 30, 49) and one.new == (0, 0, 1)


def test_a_request_that_is_larger_than_a_place_is_refused() -> None:
    slots = [np.arange(1, 9), np.arange(9, 12)]
    with pytest.raises(ValueError, match="do not fit into a place"):
        rounds_of(slots, [1, 1], Streaming(20, 5, 0, 7))
