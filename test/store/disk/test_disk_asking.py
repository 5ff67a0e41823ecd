"""What other servers stored is asked for beside the scheduler's thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sglang_hc.store import known_blocks
from sglang_hc.store.disk.maintenance import LOOK_S
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.known_blocks import KnownBlocks, Presence
from support.clock import Clock
from support.disk_store import LAYOUT, make_path, open_store, put
from support.waiting import HANGS_S, until

BLOCKS = make_path(6)
NAMES = [block.block_id for block in BLOCKS]


class Asked:
    """A server's blocks, and another server that has the directory too. The disk answers questions
    when a test lets it."""

    def __init__(self, scratch: Path, clock: Callable[[], float]) -> None:
        self.store, self.other = open_store(scratch), open_store(scratch)
        self.store.tick()
        self.threads = DiskThreads(self.store, HostPool(LAYOUT, 2), Counter())
        self.io = KnownBlocks(self.threads, clock)
        self.asked: Counter[bytes] = Counter()
        self.go_on = threading.Event()
        self.go_on.set()
        self._find = self.store.find
        self.store.find = self.find  # type: ignore[method-assign]

    def find(self, block_id: bytes) -> bool:
        self.asked[block_id] += 1
        assert self.go_on.wait(HANGS_S)
        if block_id == bytes(16):
            raise RuntimeError("for the test")
        return self._find(block_id)

    def ask(self, names: Sequence[bytes]) -> bool:
        self.io.poll()
        return self.io.ask(names)

    def close(self) -> None:
        self.go_on.set()
        self.io.close()


def test_a_question_is_asked_once_and_its_answer_holds_for_a_while(scratch: Path) -> None:
    clock = Clock(1e9)
    one = Asked(scratch, clock)
    put(one.other, BLOCKS[:2])
    names = NAMES[:4]
    assert one.threads.changes() == {} and one.io.contains(names) == 0 and not one.ask([])
    one.go_on.clear()
    assert one.ask(names) and one.ask(names)
    one.go_on.set()
    until(lambda: not one.ask(names))
    assert one.asked == Counter(NAMES[:3]), "up to the first that is not there"
    assert one.io.contains(names) == 2
    assert one.threads.changes() == dict.fromkeys(NAMES[:2], True), "whoever mirrors it is told"
    assert not one.ask(names) and one.asked[NAMES[2]] == 1
    clock.now += Presence.ABSENT.value
    assert one.ask(names), "others go on storing"
    until(lambda: not one.ask(names))
    assert one.ask([bytes(16)])
    until(lambda: not one.ask([bytes(16)]), show=lambda: "it was not found")
    assert one.io.counts["disk_lookup_io_error"] == 1
    one.close()


def test_a_question_that_hangs_holds_up_nobody_else(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_blocks, "LOOKUP_S", 0.05)
    one = Asked(scratch, time.monotonic)
    one.go_on.clear()
    assert one.ask(NAMES[:1])
    until(lambda: not one.ask(NAMES[:1]))
    assert one.ask(NAMES[1:2]) and not one.ask(NAMES[1:2]), "it is told at once"
    assert one.io.counts["disk_lookup_timed_out"] == 2
    assert one.asked == Counter(NAMES[:1]), "nothing piles up behind it"
    one.go_on.set()
    monkeypatch.setattr(known_blocks, "LOOKUP_S", HANGS_S)
    put(one.other, BLOCKS[2:3])
    until(lambda: not one.ask(NAMES[2:3]) and one.io.contains(NAMES[2:3]))
    one.close()


@pytest.mark.parametrize(("seconds", "looks"), [(0.05, 60), (0.5, 12), (3.0, 2)])
def test_a_large_directory_is_read_less_often(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, looks: int
) -> None:
    """What others stored is looked for in a hundredth of the time."""
    clock, looked = Clock(), []
    one = open_store(scratch, clock=clock)
    open_store(scratch, clock=clock)

    def slow() -> None:
        looked.append(clock.now)
        clock.now += seconds

    monkeypatch.setattr(one.directories[0], "find_others", slow)
    start = clock.now
    for number in range(60):
        clock.now = start + number * LOOK_S
        one.tick()
    assert len(looked) == looks
