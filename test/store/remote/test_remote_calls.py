"""Several calls at a time: each has frames of its own, and the answers keep their order, whichever
call ends first."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.remote import Frames
from sglang_hc.store.remote.backend import FRAME_BYTES, MOST_FRAMES
from support.clock import Clock
from support.disk_store import names_of
from support.examples import examples
from support.remote import (
    FOREVER,
    MODEL,
    SLOTS,
    FakeBackend,
    FakeStore,
    blocks_over,
    data_of,
    make_path,
    make_pool,
    save,
    wait,
)
from support.waiting import HANGS_S, until

CALLS = 3


class Gated(FakeBackend):
    """Calls wait until they are let go, in any order."""

    def __init__(self, store: FakeStore, frames: Frames) -> None:
        super().__init__(store, frames)
        self.gated = False
        self.under_way: dict[tuple[int, ...], threading.Event] = {}
        """By the frames of each call."""
        self._lock = threading.Lock()

    def _pass(self, frames: Sequence[int]) -> None:
        mine, gate = tuple(frames), threading.Event()
        with self._lock:
            taken = {frame for call in self.under_way for frame in call}
            assert not taken & set(mine), "two calls in one frame"
            self.under_way[mine] = gate
        assert not self.gated or gate.wait(HANGS_S)
        with self._lock:
            del self.under_way[mine]

    def let_go(self, number: int) -> None:
        """One call, and wait until it is gone."""
        frames, gate = list(self.under_way.items())[number % len(self.under_way)]
        gate.set()
        until(lambda: self.under_way.get(frames) is not gate)

    def get(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
        self._pass(frames)
        return super().get(keys, frames)

    def put(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
        self._pass(frames)
        return super().put(keys, frames)


def gated(store: FakeStore, clock: Clock | None = None) -> tuple[Gated, KnownBlocks]:
    """With a clock that stands still, as here, a call reads one block."""
    frames = Frames(MODEL.header_bytes, MODEL.block_bytes, CALLS)
    backend = Gated(store, frames)
    return backend, blocks_over(backend, frames, make_pool(), clock=clock or Clock())


@settings(max_examples=examples(25))
@given(st.integers(1, SLOTS), st.lists(st.integers(0, CALLS - 1), min_size=SLOTS))
def test_answers_keep_their_order_and_blocks_their_bytes(count: int, order: list[int]) -> None:
    backend, io = gated(FakeStore())
    pool, path = io._store._pool, make_path(count)
    backend.gated = True
    for slot, block in enumerate(path):
        pool.slot(slot)[:] = data_of(block.block_id)
        io.write(slot, block, slot, FOREVER)
    done: list = []
    for number in [*order, *range(SLOTS)]:
        until(lambda: backend.under_way or len(backend.store.values) == count)
        if backend.under_way:
            backend.let_go(number)
        done += io.poll()
    until(lambda: len(done) == count, lambda: done.extend(io.poll()))
    assert [(one.ticket, one.outcome) for one in done] == [(n, Outcome.OK) for n in range(count)]
    pool.bytes[:] = 0
    for slot, block in enumerate(path):
        io.read(slot, block.block_id, slot, FOREVER)
    done = []
    for left, number in zip(range(count, 0, -1), order, strict=False):
        until(lambda: len(backend.under_way) == min(CALLS, left))  # noqa: B023
        backend.let_go(number)
        done += io.poll()
    until(lambda: len(done) == count, lambda: done.extend(io.poll()))
    assert [(one.ticket, one.outcome) for one in done] == [(n, Outcome.OK) for n in range(count)]
    for slot, name in enumerate(names_of(path)):
        assert np.array_equal(pool.slot(slot), data_of(name))
    io.close()


def test_one_call_that_hangs_keeps_its_frames_and_the_others_serve() -> None:
    """Until it is back the store is not asked; what it writes then is nobody's."""
    clock = Clock()
    backend, io = gated(FakeStore(), clock)
    pool, path = io._store._pool, make_path(CALLS + 2)
    save(io, pool, path)
    pool.bytes[:] = 0
    backend.gated = True
    for slot, block in enumerate(path[:CALLS]):
        io.read(slot, block.block_id, slot, clock.now + 10)
    until(lambda: len(backend.under_way) == CALLS)
    (hung,) = set(backend.under_way) - set(list(backend.under_way)[1:])
    for _ in range(CALLS - 1):
        backend.let_go(1)
    clock.now += 11
    done = wait(io, CALLS)
    late = [one.ticket for one in done if one.outcome is Outcome.TIMED_OUT]
    assert len(late) == 1 and io.counts["remote_hangs"] == 1
    for slot, block in enumerate(path[:CALLS]):
        assert np.array_equal(pool.slot(slot), data_of(block.block_id)) == (slot not in late)
    io.read(CALLS, path[CALLS].block_id, CALLS, FOREVER)
    assert wait(io, 1)[0].outcome is Outcome.TIMED_OUT and list(backend.under_way) == [hung]
    backend.let_go(0)
    until(lambda: io.levels()["remote_usable"])
    assert not pool.slot(late[0]).any()
    backend.gated = False
    io.read(CALLS + 1, path[CALLS + 1].block_id, CALLS + 1, FOREVER)
    assert wait(io, 1)[0].outcome is Outcome.OK
    io.close()


@pytest.mark.parametrize(
    ("block_bytes", "calls", "each"),
    [
        (4096, 4, MOST_FRAMES),
        (FRAME_BYTES // 9, 4, 2),
        (FRAME_BYTES // 4, 3, 1),
        (FRAME_BYTES, 1, 1),
    ],
)
def test_calls_share_the_memory_of_one(block_bytes: int, calls: int, each: int) -> None:
    """Fewer are under way at a time where it is short."""
    frames = Frames(MODEL.header_bytes, block_bytes, 4)
    assert frames.call_frames == each
    for parts in (frames.for_loads, frames.for_saves):
        assert [len(part) for part in parts] == [each] * calls
    used = [frame for part in (*frames.for_loads, *frames.for_saves) for frame in part]
    assert used == list(range(len(frames.bytes)))
