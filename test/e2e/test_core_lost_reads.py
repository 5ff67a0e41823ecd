"""The disk goes out of use while a history is met or streamed, at every point where it can, under
SGLang's real scheduler.

What every test asserts: the tokens are those of a server that never evicted, no slot is lost
(`counted`), and each block that did not come is counted once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_hc.store.outcome import Outcome
from support.core import Core, Reply, run_in_child
from support.meetings import (
    BLOCKS,
    FAST,
    HeldDisk,
    counted,
    forget,
    halving_profile,
    second_turn,
    start,
)

FORM = "hidden:2,kv:2"
LAYERS = 4
STREAMED = 1e-5
"""By this price of a token of a layer all of the history is read layer by layer."""


class DyingDisk(HeldDisk):
    """A disk that is given up after so many answers, which come in the order of the questions: at
    the next look everything that was asked for and not answered is answered IO_ERROR, as where a
    directory hangs."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        tier = core.tree.tiers.disk
        if tier._layers is not None:
            tier._layers = tier._layers._replace(io=self)

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


def deaths(folder: str, profile: str, points: Sequence[int], streams: bool) -> list[Death]:
    core, first = start(FORM, folder, profile, streams=streams)
    disk, found = DyingDisk(core), []
    for answers in points:
        disk.dies_after(answers)
        reply, counts = counted(core, lambda: core.ask(second_turn(first), 24))
        found.append(Death(answers, len(disk.asked), reply, counts))
        forget(core)
    return found


PIECES = BLOCKS * LAYERS


@pytest.mark.parametrize(
    "points",
    [
        (0, 1, BLOCKS, 2 * BLOCKS + 5, PIECES - BLOCKS, PIECES - 1, PIECES),
        pytest.param(range(PIECES + 1), marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_is_given_up_at_any_layer_of_any_block(
    wanted: dict, tmp_path: Path, points: Sequence[int]
) -> None:
    """The layers come in their order, each of all blocks. A block is there when its last layer is;
    the others are recomputed within the pass."""
    profile = halving_profile(tmp_path, STREAMED)
    found = run_in_child(deaths, str(tmp_path / "d"), profile, points, True)
    for answers, asked, reply, counts in found:
        assert asked == PIECES, answers
        assert reply.tokens == wanted[FORM][1], answers
        assert counts["meetings_streamed"] == 1, answers
        lost = min(BLOCKS, PIECES - answers)
        assert counts.get("disk_read_io_error", 0) == lost, answers
        assert counts.get("late_layers", 0) == (lost > 0), answers
    assert [one.answers for one in found] == list(points)


def test_a_disk_that_is_given_up_at_any_point_of_a_meeting(wanted: dict, tmp_path: Path) -> None:
    """What had come is restored, if nothing behind it is lost: the last blocks come first."""
    profile = halving_profile(tmp_path, FAST)
    points = range(BLOCKS + 1)
    found = run_in_child(deaths, str(tmp_path / "d"), profile, points, False)
    for answers, asked, reply, counts in found:
        assert reply.tokens == wanted[FORM][1], answers
        assert counts["meetings"] == 1, answers
        lost = max(0, asked - answers)
        assert counts.get("disk_read_io_error", 0) == lost, answers
        assert (reply.cached > 0) == (answers > 0), answers
    assert [one.answers for one in found] == list(points)
    assert sum(one.asked > one.answers for one in found) >= BLOCKS - 2
