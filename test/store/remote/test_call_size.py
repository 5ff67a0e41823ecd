"""How many blocks one call reads from a remote store: few from a slow one, but not one by one from
one whose calls have a price of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_hc.store.outcome import Outcome
from sglang_hc.store.remote.backend import MOST_FRAMES
from sglang_hc.store.remote.call_size import CALLS_SEEN, OWN_SHARE, SHORT_S, CallSize
from support.clock import Clock
from support.remote import (
    FOREVER,
    FakeBackend,
    make_blocks,
    make_path,
    read_in_one_call,
    save,
    wait,
)

ROUND = 1e-6
SECONDS = st.floats(1e-6, 10.0)


def sizes_of(size: CallSize, fixed: float, each: float, calls: int) -> list[int]:
    """Blocks of so many calls to a store that has always enough of them to read."""
    sizes = []
    for _ in range(calls):
        sizes.append(size.blocks)
        size.observe(size.blocks, fixed + each * size.blocks)
    return sizes


def usual(fixed: float, each: float, most: int = MOST_FRAMES) -> int:
    """The size of most calls, once the store is known."""
    sizes = sizes_of(CallSize(most), fixed, each, 4 * CALLS_SEEN)[CALLS_SEEN:]
    return Counter(sizes).most_common(1)[0][0]


@given(SECONDS | st.just(0.0), SECONDS, st.integers(1, MOST_FRAMES))
@example(0.0, SHORT_S, MOST_FRAMES)
def test_a_call_is_short_or_its_own_price_is_small(fixed: float, each: float, most: int) -> None:
    """And none is larger than it must be for one of both."""
    blocks = usual(fixed, each, most)
    seconds, one_more = fixed + blocks * each, fixed + (blocks + 1) * each
    assert 1 <= blocks <= most
    if blocks < most:
        assert one_more > SHORT_S * (1 - ROUND), "still short"
        assert fixed <= OWN_SHARE * one_more * (1 + ROUND), "too dear"
    if blocks > 1:
        assert seconds <= SHORT_S * (1 + ROUND) or fixed >= OWN_SHARE * seconds * (1 - ROUND)


def test_a_store_that_was_never_read_is_read_with_few_blocks() -> None:
    assert sizes_of(CallSize(MOST_FRAMES), 0.0, 1.0, 3) == [1, 2, 1]


def test_another_size_is_tried_where_all_calls_had_the_same() -> None:
    """They do not tell a slow store from one whose calls take long whatever they read."""
    calls = 10 * CALLS_SEEN
    sizes = sizes_of(CallSize(MOST_FRAMES), 0.0, 1.0, calls)
    assert set(sizes) == {1, 2}
    assert calls // CALLS_SEEN - 1 <= sizes.count(2) <= calls // CALLS_SEEN + 1
    size = CallSize(MOST_FRAMES)
    sizes_of(size, 0.0, 1.0, calls)
    assert sizes_of(size, 1.0, 0.0, 2 * CALLS_SEEN)[-1] == MOST_FRAMES, "the store has changed"
    assert sizes_of(size, 0.0, 1.0, 2 * CALLS_SEEN)[-1] <= 2, "and back"


@given(
    st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=3 * CALLS_SEEN),
    st.integers(1, MOST_FRAMES),
)
def test_no_call_is_more_than_twice_as_large_as_those_that_count(
    times: list[float], most: int
) -> None:
    """Whatever they took."""
    size, sizes = CallSize(most), []
    for seconds in times:
        sizes.append(size.blocks)
        size.observe(size.blocks, seconds)
        assert 1 <= size.blocks <= min(most, 2 * max(sizes[-CALLS_SEEN:]))


def test_nothing_is_learned_from_a_call_that_took_no_time() -> None:
    size = CallSize(MOST_FRAMES)
    size.observe(1, 0.0)
    assert size.blocks == 1


class SlowBackend(FakeBackend):
    """Each block takes its time on the clock of the test."""

    clock: Clock
    seconds: float
    sizes: list[int]
    """Blocks of each call."""

    def get(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
        self.sizes.append(len(keys))
        self.clock.now += len(keys) * self.seconds
        return super().get(keys, frames)


@pytest.mark.parametrize(
    ("seconds", "sizes"), [(2 * SHORT_S, [1, 2, 1, 1, 1, 1, 1]), (SHORT_S / 1000, [1, 2, 4, 1])]
)
def test_blocks_of_a_slow_store_come_one_by_one(
    store, pool, clock: Clock, seconds: float, sizes: list[int]
) -> None:
    class Backend(SlowBackend):
        pass

    Backend.clock, Backend.seconds, Backend.sizes = clock, seconds, []
    io = make_blocks(store, pool, clock, backend=Backend)
    path = make_path(7)
    save(io, pool, path)
    read_in_one_call(io, store, path)
    assert {done.outcome for done in wait(io, len(path) + 1)} == {Outcome.OK}
    io.close()
    assert Backend.sizes == sizes


def test_a_call_that_finds_a_block_gone_says_nothing_of_the_others(store, pool, clock) -> None:
    """A store answers at once that it has nothing."""

    class Backend(SlowBackend):
        pass

    Backend.clock, Backend.seconds, Backend.sizes = clock, SHORT_S / 1000, []
    io = make_blocks(store, pool, clock, backend=Backend)
    (path,) = make_path(1)
    io.read(0, path.block_id, 0, FOREVER)
    assert [done.outcome for done in wait(io, 1)] == [Outcome.MISSING]
    assert io._store._read_size.blocks == 1
    io.close()
