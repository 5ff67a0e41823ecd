"""Votes on a shared board: what is voted_by_all when, and what one rank's no means."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.ranks import board as boards
from sglang_hc.ranks import pending_ops as pending_module
from sglang_hc.ranks.board import PLACES, REPORT_BYTES, CompletionBoard, Kind, Vote
from sglang_hc.ranks.pending_ops import Decided, Decision, PendingOps, decision_of
from sglang_hc.store.outcome import GOOD, Outcome
from support.several_ranks import together


def all_pending(count: int = 2, kind: Kind = Kind.SCATTER) -> list[PendingOps]:
    first = CompletionBoard.create(count)
    others = [CompletionBoard.attach(first.name, rank, count) for rank in range(1, count)]
    return [PendingOps(board, kind) for board in (first, *others)]


def decided(pending: PendingOps) -> list[tuple[int, Outcome]]:
    """Tickets and outcomes of what was decided."""
    return [(done.ticket, done.outcome) for done in pending.take_decided()]


def begin(pending: PendingOps, *tickets: int) -> list[int]:
    """Begins operations; returns those that were started so far, which grows."""
    started: list[int] = []
    for ticket in tickets:
        pending.begin(ticket, lambda ticket=ticket: started.append(ticket))
    return started


def test_nothing_is_settled_before_everybody_has_voted() -> None:
    one, two = all_pending()
    for pending in (one, two):
        assert begin(pending, 7, 8) == [7, 8]
    one.vote(7, Outcome.OK)
    one.vote(8, Outcome.OK)
    assert not one.voted_by_all() and not one.take_decided()
    two.vote(8, Outcome.IO_ERROR)
    assert one.voted_by_all() == [Decision(1, Outcome.IO_ERROR)]
    two.vote(7, Outcome.OK)
    assert one.voted_by_all() == [Decision(1, Outcome.IO_ERROR), Decision(0, Outcome.OK)]
    assert one.failures == {(1, Outcome.IO_ERROR): 1}
    assert len(one) == 2  # seen, and not decided before all are told
    decisions = list(one.voted_by_all())
    for pending in (one, two):
        pending.decide(decisions)
        assert decided(pending) == [(8, Outcome.IO_ERROR), (7, Outcome.OK)]
        assert len(pending) == 0 and not pending.voted_by_all()


@given(st.lists(st.sampled_from(list(Outcome)), min_size=1))
def test_one_no_is_a_no_for_all(votes: list[Outcome]) -> None:
    decision = decision_of(votes)
    assert decision in votes
    assert (decision in GOOD) == all(vote in GOOD for vote in votes)
    if Outcome.STUCK in votes:
        assert decision is Outcome.STUCK, "the slot is not safe, whatever else is said"
    elif Outcome.MISSING in votes:
        assert decision is Outcome.MISSING


def test_nobody_waits_for_ever_for_a_part_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank whose part it is gives it up for all; what it says later is heard by nobody."""
    monkeypatch.setattr(pending_module, "LONGEST_DRAIN_S", 0.1, raising=False)
    one, two = all_pending()
    for pending in (one, two):
        begin(pending, 1, 2)
        pending.vote(1, Outcome.OK)
    one.vote(2, Outcome.OK)
    together([lambda: one.drain(lambda: None), lambda: two.drain(lambda: None)])
    for pending in (one, two):
        assert decided(pending) == [(1, Outcome.OK), (2, Outcome.STUCK)]
    two.vote(2, Outcome.OK)
    assert not two.voted_by_all() and not decided(two) and len(two) == 0
    for pending in (one, two):
        begin(pending, 3)
    two.leave()
    two.drain(lambda: None)
    assert decided(two) == [(3, Outcome.STUCK)], "nor does a rank that stops"


def test_all_wait_for_the_slowest_without_being_told() -> None:
    one, two = all_pending()
    late = [Outcome.OK, Outcome.IO_ERROR]
    for pending in (one, two):
        begin(pending, 1, 2)
    one.vote(2, Outcome.OK)
    one.vote(1, Outcome.OK)

    def poll() -> None:
        if late:
            two.vote(3 - len(late), late.pop(0))

    one.drain(poll)
    two.drain(poll)
    for pending in (one, two):
        assert decided(pending) == [(1, Outcome.OK), (2, Outcome.IO_ERROR)]
    assert not one.voted_by_all()


def test_what_was_seen_settled_and_not_told_is_decided_once() -> None:
    one, two = all_pending()
    for pending in (one, two):
        begin(pending, 1)
        pending.vote(1, Outcome.IO_ERROR)
    assert one.voted_by_all()
    one.drain(lambda: None)
    two.drain(lambda: None)
    assert decided(one) == decided(two) == [(1, Outcome.IO_ERROR)]
    assert not one.voted_by_all()
    assert one.failures == {(0, Outcome.IO_ERROR): 1, (1, Outcome.IO_ERROR): 1}


@pytest.mark.parametrize(("of_all", "value"), [(min, 3), (max, 8)])
def test_the_value_of_a_decision(of_all: Callable[[Iterable[int]], int], value: int) -> None:
    """A path is there as far as every rank has found it; a read takes as long as the slowest."""
    one, two, three = all_three = all_pending(3)
    for pending, own in zip(all_three, (8, 3, 5), strict=True):
        pending.begin(6, lambda: None, of_all)
        pending.vote(6, Outcome.OK, own)
    assert one.voted_by_all() == [Decision(0, Outcome.OK, value)]
    two.decide(one.voted_by_all())
    assert two.take_decided() == [Decided(6, Outcome.OK, value)]
    three.leave()
    assert three.take_decided() == [Decided(6, Outcome.OK, 5)]


def test_a_rank_that_leaves_decides_alone() -> None:
    one, _two = all_pending()
    begin(one, 1, 2)
    one.vote(1, Outcome.OK)
    assert not one.voted_by_all()
    one.leave()
    assert decided(one) == [(1, Outcome.OK)]
    one.drain(lambda: one.vote(2, Outcome.IO_ERROR))
    assert decided(one) == [(2, Outcome.IO_ERROR)]


def test_more_operations_than_places_wait_and_no_vote_counts_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each place is used 40 times: more often than laps are told apart."""
    places = 8
    assert places < PLACES
    monkeypatch.setattr(boards, "PLACES", places)
    monkeypatch.setattr("sglang_hc.ranks.pending_ops.PLACES", places)
    one, two = all_pending()
    started = [begin(pending, *range(40 * places)) for pending in (one, two)]
    assert [len(some) for some in started] == [places, places]
    while len(one):
        first = min(one._open)
        for pending, some in zip((one, two), started, strict=True):
            for number in range(first, len(some)):
                pending.vote(number, Outcome.OK)
            assert not one.voted_by_all() if pending is one else one.voted_by_all()
        decisions = list(one.voted_by_all())
        for pending in (one, two):
            pending.decide(decisions)
            assert [one.ticket for one in pending.take_decided()] == [v.number for v in decisions]
    assert len(two) == 0


def test_only_the_board_of_this_group_is_attached_to() -> None:
    one, other = CompletionBoard.create(2), CompletionBoard.create(2)
    path, token = one.name.split()
    with pytest.raises(OSError, match="not the board"):
        CompletionBoard.attach(f"{path} {other.name.split()[1]}", 1, 2)
    with pytest.raises(OSError):
        CompletionBoard.attach(f"/proc/self/fd/100000 {token}", 1, 2)
    CompletionBoard.attach(one.name, 1, 2)


def test_another_process_sees_the_votes() -> None:
    one = CompletionBoard.create(2)
    text = (
        "import sys; from sglang_hc.ranks.board import *; "
        "board = CompletionBoard.attach(sys.argv[1], 1, 2); "
        "board.vote(Kind.BLOCK, 70000, Vote(Outcome.DAMAGED, 7))"
    )
    one.vote(Kind.BLOCK, 70000, Vote(Outcome.OK, 2**56 - 1))
    assert one.votes(Kind.BLOCK, 70000) is None
    subprocess.run([sys.executable, "-c", text, one.name], check=True, env=dict(os.environ))
    assert one.votes(Kind.BLOCK, 70000) == [(Outcome.OK, 2**56 - 1), (Outcome.DAMAGED, 7)]
    assert one.votes(Kind.SCATTER, 70000) is None
    assert one.votes(Kind.BLOCK, 70000 - PLACES) is None


def test_each_rank_shows_what_it_counted_last() -> None:
    first = CompletionBoard.create(3)
    others = [CompletionBoard.attach(first.name, rank, 3) for rank in (1, 2)]
    assert first.reports() == [{}, {}, {}]
    others[0].report({"disk_directory_hangs": 1, "longer": 7})
    others[1].report({"ok": 2**40})
    others[0].report({"disk_directory_hangs": 2})
    assert (
        first.reports() == others[1].reports() == [{}, {"disk_directory_hangs": 2}, {"ok": 2**40}]
    )
    first.vote(Kind.LOOKUP, PLACES - 1, Vote(Outcome.OK, 2**56 - 1))
    assert first.reports()[0] == {}, "votes lie elsewhere"


def test_half_a_report_is_none() -> None:
    one = CompletionBoard.create(1)
    one.report({"a": 1})
    one._reports[9] ^= 1
    assert one.reports() == [{}]
    one.report({"a": 1})
    one.report({"x" * REPORT_BYTES: 1})
    assert one.reports() == [{"a": 1}], "what does not fit is not shown"
    room = REPORT_BYTES - 8 - len('{"":1}')
    one.report({"x" * room: 1})
    assert one.reports() == [{"x" * room: 1}]
