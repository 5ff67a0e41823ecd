"""Blocks in a remote store that behaves, and in one that is slow, raises, hangs, or lies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_hc.store import presence as presence_cache
from sglang_hc.store.disk.format import StoredModel, seal_block
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.presence import Presence, PresenceCache
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
    path = make_path(4)
    assert save(io, pool, path) == [Outcome.OK] * 4
    other_pool = make_pool()
    other = make_blocks(store, other_pool, clock)
    assert find(other, names_of(path)) == 4
    for name in names_of(path):
        assert load(other, name) is Outcome.OK
        assert np.array_equal(other_pool.slot(TARGET), data_of(name))
    other.close()


def test_a_lookup_never_waits_and_is_asked_once(io: KnownBlocks, store, pool) -> None:
    names = names_of(make_path(3))
    store.open.clear()
    for _ in range(5):
        assert io.contains(names) == 0
        assert io.ask(names)
    assert store.calls.count("exists") <= 1
    store.open.set()
    until(lambda: not io.ask(names), io.poll)
    assert store.calls.count("exists") == 1
    assert io.counts["remote_lookups"] == 1


def test_the_first_gap_ends_a_lookup(io: KnownBlocks, store, pool) -> None:
    path = make_path(5)
    save(io, pool, [path[0], path[1], path[3]])
    assert find(io, names_of(path)) == 2
    assert not io.ask(names_of(path))


def test_a_miss_is_asked_again_after_a_while(io: KnownBlocks, store, pool, clock: Clock) -> None:
    path = make_path(1)
    assert find(io, names_of(path)) == 0
    writer = make_blocks(store, pool, clock)
    save(writer, pool, path)
    writer.close()
    assert find(io, names_of(path)) == 0  # still believed
    clock.now += Presence.ABSENT.value
    assert find(io, names_of(path)) == 1


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


def test_clear_empties_the_store(io: KnownBlocks, store, pool) -> None:
    path = make_path(2)
    save(io, pool, path)
    io.erase(99, None, ())
    assert io.contains(names_of(path)) == 0
    done: list = []
    until(lambda: bool(io.levels()["remote_usable"]), lambda: done.extend(io.poll()))
    assert [(one.ticket, one.outcome) for one in done] == [(99, Outcome.OK)]
    assert not store.values
    assert find(io, names_of(path)) == 0


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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(at=st.integers(0, MODEL.file_bytes - 1), flip=st.integers(1, 255))
def test_an_envelope_altered_anywhere_is_a_counted_miss(at: int, flip: int) -> None:
    store, pool, clock = FakeStore(), make_pool(), Clock()
    io = make_blocks(store, pool, clock)
    path = make_path(1)
    save(io, pool, path)
    (key,) = store.values
    value = bytearray(store.values[key])
    value[at] ^= flip
    store.values[key] = bytes(value)
    assert load(io, path[0].block_id) is Outcome.DAMAGED
    io.close()


def test_a_truncated_value_is_damage(io: KnownBlocks, store, pool) -> None:
    path = make_path(2)
    save(io, pool, path)
    assert load(io, path[1].block_id) is Outcome.OK  # leaves its bytes in the frame
    for key, value in store.values.items():
        store.values[key] = value[: len(value) // 2]
    assert load(io, path[0].block_id) is Outcome.DAMAGED


def test_a_back_end_that_claims_to_have_read_is_not_believed(pool, clock) -> None:
    class Liar(FakeBackend):
        def get(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
            return [True] * len(keys)

    store = FakeStore()
    io = make_blocks(store, pool, clock, backend=Liar)
    path = make_path(1)
    save(io, pool, path)
    assert load(io, path[0].block_id) is Outcome.DAMAGED
    io.close()


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


def test_a_block_under_another_blocks_key_is_foreign(io: KnownBlocks, store, pool) -> None:
    path = make_path(2)
    save(io, pool, path)
    mine, other = (storage_key(MODEL, name) for name in names_of(path))
    store.values[mine] = store.values[other]
    assert load(io, path[0].block_id) is Outcome.DAMAGED
    assert io.counts["remote_foreign"] == 1


def test_another_models_block_is_never_served(io: KnownBlocks, store, pool, clock) -> None:
    """Another model, plan or dtype is another fingerprint: not found, and foreign if forced."""
    theirs = StoredModel.of(LAYOUT.chunks(), bytes(16), "theirs")
    other = make_blocks(store, pool, clock, model=theirs)
    path = make_path(1)
    save(other, pool, path)
    other.close()
    assert find(io, names_of(path)) == 0
    (value,) = store.values.values()
    store.values[storage_key(MODEL, path[0].block_id)] = value
    assert load(io, path[0].block_id) is Outcome.DAMAGED
    assert io.counts["remote_foreign"] == 1


def test_a_later_version_is_a_counted_miss(io: KnownBlocks, store, pool) -> None:
    path = make_path(1)
    save(io, pool, path)
    (key,) = store.values
    value = bytearray(store.values[key])
    value[8] += 1
    store.values[key] = bytes(value)
    assert load(io, path[0].block_id) is Outcome.DAMAGED
    assert io.counts["remote_unknown_version"] == 1


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


def test_an_envelope_sealed_with_the_wrong_bytes_does_not_pass(pool, store, clock) -> None:
    """The digest is taken of what is served, not of what lies in the frame."""
    path = make_path(1)
    frame = np.zeros(MODEL.file_bytes, dtype=np.uint8)
    page, data = frame[: MODEL.header_bytes], frame[MODEL.header_bytes :]
    seal_block(page.data, data.data, path[0], MODEL, 0)
    data[5] = 1
    store.values[storage_key(MODEL, path[0].block_id)] = frame.tobytes()
    io = make_blocks(store, pool, clock)
    assert load(io, path[0].block_id) is Outcome.DAMAGED
    io.close()


def test_so_many_answers_are_remembered(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_cache, "MOST_REMEMBERED", 2)
    presence = PresenceCache(clock)
    for name in (b"a", b"b", b"a"):
        presence.note(name, Presence.PRESENT)
    assert presence.state(b"a") is presence.state(b"b") is Presence.PRESENT
    presence.note(b"c", Presence.PRESENT)
    assert presence.state(b"b") is None, "the oldest answer"
    assert presence.state(b"a") is presence.state(b"c") is Presence.PRESENT
