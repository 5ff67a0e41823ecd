"""Votes on a shared board: what is settled when, and what one rank's no means."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.ranks import ballot as ballot_module
from sglang_hc.ranks import board as boards
from sglang_hc.ranks.ballot import Ballot, Decided, Verdict, verdict_of
from sglang_hc.ranks.board import PLACES, REPORT_BYTES, Kind, Vote, VoteBoard
from sglang_hc.store.outcome import GOOD, Outcome
from support.several_ranks import together


def ballots(count: int = 2, kind: Kind = Kind.SCATTER) -> list[Ballot]:
    first = VoteBoard.create(count)
    others = [VoteBoard.attach(first.name, rank, count) for rank in range(1, count)]
    return [Ballot(board, kind) for board in (first, *others)]


def decided(ballot: Ballot) -> list[tuple[int, Outcome]]:
    """Tickets and outcomes of what was decided."""
    return [(done.ticket, done.outcome) for done in ballot.take_decided()]


def begin(ballot: Ballot, *tickets: int) -> list[int]:
    """Begins operations; returns those that were started so far, which grows."""
    started: list[int] = []
    for ticket in tickets:
        ballot.begin(ticket, lambda ticket=ticket: started.append(ticket))
    return started


def test_nothing_is_settled_before_everybody_has_voted() -> None:
    one, two = ballots()
    for ballot in (one, two):
        assert begin(ballot, 7, 8) == [7, 8]
    one.vote(7, Outcome.OK)
    one.vote(8, Outcome.OK)
    assert not one.settled() and not one.take_decided()
    two.vote(8, Outcome.IO_ERROR)
    assert one.settled() == [Verdict(1, Outcome.IO_ERROR)]
    two.vote(7, Outcome.OK)
    assert one.settled() == [Verdict(1, Outcome.IO_ERROR), Verdict(0, Outcome.OK)]
    assert one.failures == {(1, Outcome.IO_ERROR): 1}
    assert len(one) == 2  # seen, and not decided before all are told
    verdicts = list(one.settled())
    for ballot in (one, two):
        ballot.decide(verdicts)
        assert decided(ballot) == [(8, Outcome.IO_ERROR), (7, Outcome.OK)]
        assert len(ballot) == 0 and not ballot.settled()


@given(st.lists(st.sampled_from(list(Outcome)), min_size=1))
def test_one_no_is_a_no_for_all(votes: list[Outcome]) -> None:
    verdict = verdict_of(votes)
    assert verdict in votes
    assert (verdict in GOOD) == all(vote in GOOD for vote in votes)
    if Outcome.STUCK in votes:
        assert verdict is Outcome.STUCK, "the slot is not safe, whatever else is said"
    elif Outcome.MISSING in votes:
        assert verdict is Outcome.MISSING


def test_nobody_waits_for_ever_for_a_part_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank whose part it is gives it up for all; what it says later is heard by nobody."""
    monkeypatch.setattr(ballot_module, "SETTLE_S", 0.1, raising=False)
    one, two = ballots()
    for ballot in (one, two):
        begin(ballot, 1, 2)
        ballot.vote(1, Outcome.OK)
    one.vote(2, Outcome.OK)
    together([lambda: one.settle(lambda: None), lambda: two.settle(lambda: None)])
    for ballot in (one, two):
        assert decided(ballot) == [(1, Outcome.OK), (2, Outcome.STUCK)]
    two.vote(2, Outcome.OK)
    assert not two.settled() and not decided(two) and len(two) == 0
    for ballot in (one, two):
        begin(ballot, 3)
    two.leave()
    two.settle(lambda: None)
    assert decided(two) == [(3, Outcome.STUCK)], "nor does a rank that stops"


def test_all_wait_for_the_slowest_without_being_told() -> None:
    one, two = ballots()
    late = [Outcome.OK, Outcome.IO_ERROR]
    for ballot in (one, two):
        begin(ballot, 1, 2)
    one.vote(2, Outcome.OK)
    one.vote(1, Outcome.OK)

    def poll() -> None:
        if late:
            two.vote(3 - len(late), late.pop(0))

    one.settle(poll)
    two.settle(poll)
    for ballot in (one, two):
        assert decided(ballot) == [(1, Outcome.OK), (2, Outcome.IO_ERROR)]
    assert not one.settled()


def test_what_was_seen_settled_and_not_told_is_decided_once() -> None:
    one, two = ballots()
    for ballot in (one, two):
        begin(ballot, 1)
        ballot.vote(1, Outcome.IO_ERROR)
    assert one.settled()
    one.settle(lambda: None)
    two.settle(lambda: None)
    assert decided(one) == decided(two) == [(1, Outcome.IO_ERROR)]
    assert not one.settled()
    assert one.failures == {(0, Outcome.IO_ERROR): 1, (1, Outcome.IO_ERROR): 1}


@pytest.mark.parametrize(("of_all", "value"), [(min, 3), (max, 8)])
def test_the_value_of_a_verdict(of_all: Callable[[Iterable[int]], int], value: int) -> None:
    """A path is there as far as every rank has found it; a read takes as long as the slowest."""
    one, two, three = all_three = ballots(3)
    for ballot, own in zip(all_three, (8, 3, 5), strict=True):
        ballot.begin(6, lambda: None, of_all)
        ballot.vote(6, Outcome.OK, own)
    assert one.settled() == [Verdict(0, Outcome.OK, value)]
    two.decide(one.settled())
    assert two.take_decided() == [Decided(6, Outcome.OK, value)]
    three.leave()
    assert three.take_decided() == [Decided(6, Outcome.OK, 5)]


def test_a_rank_that_leaves_decides_alone() -> None:
    one, _two = ballots()
    begin(one, 1, 2)
    one.vote(1, Outcome.OK)
    assert not one.settled()
    one.leave()
    assert decided(one) == [(1, Outcome.OK)]
    one.settle(lambda: one.vote(2, Outcome.IO_ERROR))
    assert decided(one) == [(2, Outcome.IO_ERROR)]


def test_more_operations_than_places_wait_and_no_vote_counts_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each place is used 40 times: more often than laps are told apart."""
    places = 8
    assert places < PLACES
    monkeypatch.setattr(boards, "PLACES", places)
    monkeypatch.setattr("sglang_hc.ranks.ballot.PLACES", places)
    one, two = ballots()
    started = [begin(ballot, *range(40 * places)) for ballot in (one, two)]
    assert [len(some) for some in started] == [places, places]
    while len(one):
        first = min(one._open)
        for ballot, some in zip((one, two), started, strict=True):
            for number in range(first, len(some)):
                ballot.vote(number, Outcome.OK)
            assert not one.settled() if ballot is one else one.settled()
        verdicts = list(one.settled())
        for ballot in (one, two):
            ballot.decide(verdicts)
            assert [one.ticket for one in ballot.take_decided()] == [v.number for v in verdicts]
    assert len(two) == 0


def test_only_the_board_of_this_group_is_attached_to() -> None:
    one, other = VoteBoard.create(2), VoteBoard.create(2)
    path, token = one.name.split()
    with pytest.raises(OSError, match="not the board"):
        VoteBoard.attach(f"{path} {other.name.split()[1]}", 1, 2)
    with pytest.raises(OSError):
        VoteBoard.attach(f"/proc/self/fd/100000 {token}", 1, 2)
    VoteBoard.attach(one.name, 1, 2)


def test_another_process_sees_the_votes() -> None:
    one = VoteBoard.create(2)
    text = (
        "import sys; from sglang_hc.ranks.board import *; "
        "VoteBoard.attach(sys.argv[1], 1, 2).vote(Kind.BLOCK, 70000, Vote(Outcome.DAMAGED, 7))"
    )
    one.vote(Kind.BLOCK, 70000, Vote(Outcome.OK, 2**56 - 1))
    assert one.votes(Kind.BLOCK, 70000) is None
    subprocess.run([sys.executable, "-c", text, one.name], check=True, env=dict(os.environ))
    assert one.votes(Kind.BLOCK, 70000) == [(Outcome.OK, 2**56 - 1), (Outcome.DAMAGED, 7)]
    assert one.votes(Kind.SCATTER, 70000) is None
    assert one.votes(Kind.BLOCK, 70000 - PLACES) is None


def test_each_rank_shows_what_it_counted_last() -> None:
    first = VoteBoard.create(3)
    others = [VoteBoard.attach(first.name, rank, 3) for rank in (1, 2)]
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
    one = VoteBoard.create(1)
    one.report({"a": 1})
    one._reports[9] ^= 1
    assert one.reports() == [{}]
    one.report({"a": 1})
    one.report({"x" * REPORT_BYTES: 1})
    assert one.reports() == [{"a": 1}], "what does not fit is not shown"
    room = REPORT_BYTES - 8 - len('{"":1}')
    one.report({"x" * room: 1})
    assert one.reports() == [{"x" * room: 1}]
