"""Several ranks in one process: each has its own tiers and its own I/O, which the test makes late,
and all share one board of votes, as the processes of a server do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sglang_hc.ranks.agreement import Agreement
from sglang_hc.ranks.board import CompletionBoard
from support.waiting import HANGS_S

R = TypeVar("R")
"""What a test has of each rank."""


class Group(Generic[R]):
    """The agreements of `count` ranks, and the pass in which they are brought forward together."""

    def __init__(self, count: int, wait: Callable[[int], Callable[[], None]]) -> None:
        """wait: for each rank, what passes the time while it waits for the others' votes."""
        self.now = 0.0
        first = CompletionBoard.create(count)
        boards = [first] + [CompletionBoard.attach(first.name, r, count) for r in range(1, count)]
        self.agreements = [
            Agreement(board, self.now, self.clock, wait(rank)) for rank, board in enumerate(boards)
        ]
        self.told = 0

    def clock(self) -> float:
        return self.now

    def begin_pass(self, patience: float, *, requests: bool) -> None:
        """What happens before the requests of a pass are handled: one broadcast."""
        for agreement in self.agreements:
            agreement.begin_pass()
        decisions = self.agreements[0].decisions(patience, requests=requests)
        if decisions is not None:
            self.told += 1
            for agreement in self.agreements:
                agreement.apply(decisions)


def together(calls: Sequence[Callable[[], None]]) -> None:
    """Each call on a thread of its own, for calls that wait for each other. Raises the first
    error."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
        assert not thread.is_alive() or errors, "the ranks wait for each other for ever"
    if errors:
        raise errors[0]


def no_wait(_rank: int) -> Callable[[], None]:
    """For a `Group` in which nobody waits."""

    def fail() -> None:
        raise AssertionError("nobody waits here")

    return fail


def name(number: int) -> bytes:
    """Identity of a block."""
    return number.to_bytes(16, "big")
