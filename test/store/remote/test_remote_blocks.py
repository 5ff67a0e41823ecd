"""Blocks in a remote store that behaves, and in one that is slow, raises, hangs, or lies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from sglang_hc.store import known_blocks
from sglang_hc.store.disk.format import StoredModel
from sglang_hc.store.known_blocks import KnownBlocks, Presence, PresenceCache
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.remote.store import storage_key
from support.clock import Clock
from support.disk_store import names_of
from support.remote import (
    FOREVER,
    LAYOUT,
    MODEL,
    TARGET,
    FakeBackend,
    FakeStore,
    data_of,
    find,
    load,
    make_blocks,
    make_path,
    make_pool,
    save,
    until,
)

# -- a store that behaves ------------------------------------------------------------------------


def test_another_server_reads_what_one_wrote(io: KnownBlocks, store, pool, clock) -> None:
    *path, last = make_path(6)
    assert save(io, pool, [*path[:4], last]) == [Outcome.OK] * 5
    other_pool = make_pool()
    other = make_blocks(store, other_pool, clock)
    assert find(other, names_of([*path, last])) == 4, "up to the first gap"
    assert not other.ask(names_of([*path, last]))
    for name in names_of(path[:4]):
        assert load(other, name) is Outcome.OK
        assert np.array_equal(other_pool.slot(TARGET), data_of(name))
    other.close()


def test_what_is_known_to_be_there_is_not_written_again(io: KnownBlocks, store, pool) -> None:
    path = make_path(1)
    assert save(io, pool, path) == [Outcome.OK]
    assert not io.wants(path[0].block_id)
    assert save(io, pool, path) == [Outcome.DUPLICATE]
    assert store.calls.count("put") == 1


def test_close_finishes_what_was_submitted(store, pool, clock) -> None:
    io = make_blocks(store, pool, clock)
    for slot, block in enumerate(make_path(8)):
        io.write(slot, block, slot, FOREVER)
    io.close()
    assert len(store.values) == 8
    assert {done.outcome for done in io.poll()} == {Outcome.OK}


def test_a_clear_that_fails_leaves_the_store_unread(io: KnownBlocks, store, pool) -> None:
    path = make_path(2)
    save(io, pool, path)
    store.raises = OSError("down")
    io.erase(99, None, ())
    done: list = []
    until(lambda: bool(done), lambda: done.extend(io.poll()))
    assert [one.outcome for one in done] == [Outcome.IO_ERROR]
    store.raises = None
    for _ in range(3):
        io.poll()
        assert io.contains(names_of(path)) == 0 and not io.ask(names_of(path))


# -- bytes that are not the block ----------------------------------------------------------------


def test_a_truncated_value_is_damage(io: KnownBlocks, store, pool) -> None:
    path = make_path(2)
    save(io, pool, path)
    assert load(io, path[1].block_id) is Outcome.OK  # leaves its bytes in the frame
    for key, value in store.values.items():
        store.values[key] = value[: len(value) // 2]
    assert load(io, path[0].block_id) is Outcome.DAMAGED


def test_a_damaged_block_is_not_fetched_again_nor_saved_again(
    io: KnownBlocks, store, pool, clock
) -> None:
    path = make_path(1)
    save(io, pool, path)
    (key,) = store.values
    store.values[key] = bytes(len(store.values[key]))
    assert load(io, path[0].block_id) is Outcome.DAMAGED
    assert find(io, names_of(path)) == 0
    assert not io.wants(path[0].block_id)
    clock.now += Presence.ABSENT.value + 1
    assert find(io, names_of(path)) == 0


@pytest.mark.parametrize("what", ["another block", "another model", "another version"])
def test_what_is_not_this_block_is_never_served_and_counted(
    io: KnownBlocks, store, pool, clock, what: str
) -> None:
    """Another model, plan or dtype is another fingerprint: not found, and foreign if forced."""
    theirs = StoredModel.of(LAYOUT.chunks(), bytes(16), "theirs")
    other = make_blocks(store, pool, clock, model=theirs)
    mine, beside = make_path(2)
    save(other if what == "another model" else io, pool, [beside, mine])
    other.close()
    if what == "another model":
        assert find(io, [mine.block_id]) == 0
    key, reason = storage_key(MODEL, mine.block_id), "foreign"
    if what == "another version":
        value, reason = bytearray(store.values[key]), "unknown_version"
        value[8] += 1
        store.values[key] = bytes(value)
    else:
        values = list(store.values.values())
        store.values[key] = values[0] if what == "another block" else values[-1]
    assert load(io, mine.block_id) is Outcome.DAMAGED
    assert io.counts[f"remote_{reason}"] == 1


@pytest.mark.parametrize("answer", [None, [], [True, True, True]])
def test_an_answer_of_the_wrong_shape_is_an_error(pool, clock, answer) -> None:
    class Odd(FakeBackend):
        def get(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
            return answer

    io = make_blocks(FakeStore(), pool, clock, backend=Odd)
    assert load(io, make_path(1)[0].block_id) is Outcome.IO_ERROR
    io.close()


@pytest.mark.parametrize("answer", [-3, 10**6, None, "many"])
def test_a_lookup_that_answers_nonsense_promises_nothing_beyond_the_keys(pool, clock, answer):
    class Odd(FakeBackend):
        def exists(self, keys: Sequence[str]) -> int:
            return answer

    names = names_of(make_path(3))
    io = make_blocks(FakeStore(), pool, clock, backend=Odd)
    assert find(io, names) == (3 if answer == 10**6 else 0)
    io.close()


def test_exists_that_lies_costs_one_read(pool, clock) -> None:
    class Optimist(FakeBackend):
        def exists(self, keys: Sequence[str]) -> int:
            return len(keys)

    names = names_of(make_path(2))
    io = make_blocks(FakeStore(), pool, clock, backend=Optimist)
    assert find(io, names) == 2
    assert load(io, names[0]) is Outcome.MISSING
    assert io.contains(names) == 0
    io.close()


def test_so_many_answers_are_remembered(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_blocks, "MOST_REMEMBERED", 2)
    presence = PresenceCache(clock)
    for name in (b"a", b"b", b"a"):
        presence.note(name, Presence.PRESENT)
    assert presence.state(b"a") is presence.state(b"b") is Presence.PRESENT
    presence.note(b"c", Presence.PRESENT)
    assert presence.state(b"b") is None, "the oldest answer"
    assert presence.state(b"a") is presence.state(b"c") is Presence.PRESENT
