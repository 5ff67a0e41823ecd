"""The disk goes out of use while a history is met, at every point where it can, under
SGLang's real scheduler.

What every test asserts: the tokens are those of a server that never evicted, no slot is lost
(`counted`), and each block that did not come is counted once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_hc.store.outcome import Outcome
from support.core import Reply, run_in_child
from support.meetings import (
    BLOCKS,
    FAST,
    HeldDisk,
    counted,
    halving_profile,
    second_turn,
    start,
)

FORM = "hidden:2,kv:2"


class DyingDisk(HeldDisk):
    """A disk that is given up after so many answers, which come in the order of the questions: at
    the next look everything that was asked for and not answered is answered IO_ERROR, as where a
    directory hangs."""

    def dies_after(self, answers: int) -> None:
        self.left = answers
        self.asked.clear()

    def poll(self) -> list[Any]:
        found = self._take()
        while self._under_way:
            time.sleep(0.001)
            found += self._take()
        held = sorted(self._held, key=lambda done: done.ticket)
        self._held.clear()
        if self.left:
            found += held[: self.left]
            self._held.extend(held[self.left :])
            self.left = max(0, self.left - len(held))
        else:
            found += [done._replace(outcome=Outcome.IO_ERROR) for done in held]
        return found


class Death(NamedTuple):
    """The second turn, when the disk was given up after so many answers. asked: reads."""

    answers: int
    asked: int
    reply: Reply
    counts: dict[str, int]


def deaths(folder: str, profile: str, points: Sequence[int]) -> list[Death]:
    core, first = start(FORM, folder, profile)
    disk, found = DyingDisk(core), []
    for answers in points:
        disk.dies_after(answers)
        reply, counts = counted(core, lambda: core.ask(second_turn(first), 24))
        found.append(Death(answers, len(disk.asked), reply, counts))
        core.forget()
    return found


def test_a_disk_that_is_given_up_at_any_point_of_a_meeting(wanted: dict, tmp_path: Path) -> None:
    """What had come is restored, if nothing behind it is lost: the last blocks come first."""
    profile = halving_profile(tmp_path, FAST)
    points = range(BLOCKS + 1)
    found = run_in_child(deaths, str(tmp_path / "d"), profile, points)
    for answers, asked, reply, counts in found:
        assert reply.tokens == wanted[FORM][1], answers
        assert counts["meetings"] == 1, answers
        lost = max(0, asked - answers)
        assert counts.get("disk_read_io_error", 0) == lost, answers
        assert (reply.cached > 0) == (answers > 0), answers
    assert [one.answers for one in found] == list(points)
    assert sum(one.asked > one.answers for one in found) >= BLOCKS - 2
