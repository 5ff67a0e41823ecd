"""Blocks of a path lie side by side where there is room, and are read by few large calls."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.store.disk import DiskStore, reader
from sglang_hc.store.disk.index_file import Place
from sglang_hc.store.disk.reader import Read
from sglang_hc.store.disk.writer import Block
from sglang_hc.store.outcome import Outcome
from support.disk_store import (
    LAYOUT,
    MEMORY,
    Faults,
    FaultyBackend,
    data_of,
    empty_slot,
    failing,
    make_path,
    open_store,
    put,
    read_block,
    remove,
)

ROOM = 60_000_000
"""Budget whose slabs hold a whole batch."""


class Reads(Faults):
    """Counts calls that read a slab."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.on_read = self.note

    def note(self, path: str) -> None:
        self.count += 1


def read_all(store: DiskStore, blocks: Sequence[Block]) -> list[Outcome]:
    """Read them by one call; what is served must be theirs."""
    into = [empty_slot() for _ in blocks]
    wanted = [
        Read(block.block_id, memoryview(data)) for block, data in zip(blocks, into, strict=True)
    ]
    outcomes = store.read_many(wanted)
    for block, data, outcome in zip(blocks, into, outcomes, strict=True):
        assert outcome is not Outcome.OK or np.array_equal(data, data_of(block))
    return outcomes


def places(store: DiskStore, blocks: Sequence[Block]) -> list[Place]:
    return [Place.unpack(store.directories[0].places[block.block_id]) for block in blocks]


def test_a_path_is_written_side_by_side_and_read_by_one_call(scratch: Path) -> None:
    faults = Reads()
    store = open_store(scratch, size=ROOM, backend=FaultyBackend(faults))
    blocks = make_path(32)
    assert set(put(store, blocks)) == {Outcome.OK}
    first, *_ = slots = places(store, blocks)
    assert slots == [Place(first.slab, first.slot + number) for number in range(32)]
    faults.count = 0
    assert read_all(store, blocks[::-1]) == [Outcome.OK] * 32
    assert faults.count == 1
    store.check_integrity()
    store.close()


@pytest.mark.parametrize(("slots", "calls"), [(8, 4), (7, 5), (1, 32)])
def test_no_call_is_longer_than_a_run_may_be(scratch: Path, slots: int, calls: int) -> None:
    faults = Reads()
    store = open_store(scratch, size=ROOM, backend=FaultyBackend(faults))
    blocks = make_path(32)
    put(store, blocks)
    faults.count = 0
    with mock.patch.object(reader, "RUN_BYTES", slots * (4096 + LAYOUT.slot_bytes)):
        assert read_all(store, blocks) == [Outcome.OK] * 32
    assert faults.count == calls
    store.close()


def test_a_call_has_no_more_buffers_than_the_system_takes(scratch: Path) -> None:
    """Of the smallest blocks there are 512 in a run: 1,024 buffers, headers included."""
    layout = BlockLayout(LayerPlan(0, 1, 0), StateShape(1, 32, (32, 32), "float16"))
    faults = Reads()
    store = open_store(scratch, size=ROOM, backend=FaultyBackend(faults), layout=layout)
    assert store.model.slot_bytes == 8192
    blocks = make_path(513)
    items = [(block, memoryview(data_of(block, 4096))) for block in blocks]
    assert set(store.write_many(items)) == {Outcome.OK}
    reads = [Read(block.block_id, memoryview(empty_slot(4096))) for block in blocks]
    faults.count = 0
    assert set(store.read_many(reads)) == {Outcome.OK}
    slabs = [number for number, _ in places(store, blocks)]
    assert faults.count == sum(-(-slabs.count(number) // 512) for number in set(slabs))
    for block, read in zip(blocks, reads, strict=True):
        assert np.array_equal(read.into, data_of(block, 4096))
    store.close()


def test_two_batches_at_once_do_not_lie_between_each_other(scratch: Path) -> None:
    """The second one begins after the room that the first has left to fill."""
    store = open_store(scratch, size=ROOM)
    put(store, make_path(1))
    slabs, size = store.directories[0].slabs, store.model.slot_bytes
    one = slabs.allocate(size, None, 7)
    other = slabs.allocate(size, None, 7)
    assert one is not None and other is not None and other == Place(one.slab, one.slot + 8)
    assert slabs.allocate(size, one, 6) == Place(one.slab, one.slot + 1)
    assert slabs.allocate(size, other, 6) == Place(other.slab, other.slot + 1)
    store.close()


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 39), max_size=39), st.integers(0, 40))
def test_a_free_run_of_half_the_length_at_least_is_found(gone: set[int], more: int) -> None:
    """`gone`: which of 40 slots side by side are free again."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        store = open_store(Path(folder), size=ROOM)
        size, slabs = store.model.slot_bytes, store.directories[0].slabs
        put(store, make_path(1))
        _, there = slabs.usage(size)
        taken = [slabs.allocate(size) for _ in range(there - 1)]
        assert None not in taken and slabs.allocate(size) is None
        free = {taken[number] for number in gone if number < len(taken)}
        slabs.unlease(taken)
        slabs.release(free)
        place = slabs.allocate(size, None, more)
        assert (place is None) == (not free)
        if place is not None:
            assert 2 * run_from(place, free) + 1 >= min(more + 1, longest_run(free))
            slabs.unlease([place])
        store.close()


def run_from(place: Place, free: set[Place]) -> int:
    """Free slots side by side from this one on."""
    return next(n for n in itertools.count() if Place(place.slab, place.slot + n) not in free)


def longest_run(free: set[Place]) -> int:
    return max(run_from(place, free) for place in free)


@pytest.mark.parametrize("bad", [0, 3, 7])
def test_one_unreadable_block_of_a_run_costs_only_itself(scratch: Path, bad: int) -> None:
    faults = Faults()
    store = open_store(scratch, size=ROOM, backend=FaultyBackend(faults))
    blocks = make_path(8)
    put(store, blocks)
    first = places(store, blocks)[0]
    path = scratch / "sglang-hc" / f"slab-{first.slab:08d}.dat"
    with path.open("r+b") as file:
        file.seek(4096 + (first.slot + bad) * (4096 + LAYOUT.slot_bytes) + 5000)
        file.write(b"flipped")
    expected = [Outcome.OK] * 8
    expected[bad] = Outcome.DAMAGED
    assert read_all(store, blocks) == expected
    store.check_integrity()
    store.close()


def test_a_run_that_cannot_be_read_is_read_block_by_block(scratch: Path) -> None:
    """The call for the whole run fails once; no block is lost for it."""
    faults = Faults()
    store = open_store(scratch, size=ROOM, backend=FaultyBackend(faults))
    blocks = make_path(8)
    put(store, blocks)
    calls: list[str] = []

    def fail_once(path: str) -> None:
        calls.append(path)
        if len(calls) == 1:
            failing(5)(path)

    faults.on_read = fail_once
    assert read_all(store, blocks) == [Outcome.OK] * 8
    assert len(calls) == 9
    store.close()


def test_late_and_missing_blocks_of_a_run_are_answers(scratch: Path) -> None:
    store = open_store(scratch, size=ROOM)
    blocks = make_path(4)
    put(store, blocks[:3])
    wanted = [Read(block.block_id, memoryview(empty_slot())) for block in blocks]
    wanted[1] = Read(blocks[1].block_id, memoryview(empty_slot()), deadline=0.0)
    assert store.read_many(wanted) == [
        Outcome.OK, Outcome.TIMED_OUT, Outcome.OK, Outcome.MISSING,
    ]  # fmt: skip
    assert read_all(store, blocks[:3]) == [Outcome.OK] * 3, "a late block stays"
    store.close()


def test_a_block_asked_for_twice_is_read_twice(scratch: Path) -> None:
    store = open_store(scratch, size=ROOM)
    blocks = make_path(2)
    put(store, blocks)
    assert read_all(store, [*blocks, *blocks]) == [Outcome.OK] * 4
    store.check_integrity()
    store.close()


def test_a_batch_that_is_dealt_out_leaves_no_gaps(scratch: Path) -> None:
    """Each directory keeps free behind a batch only what the batch will fill there."""
    store = open_store(scratch / "a", scratch / "b", size=ROOM)
    for seed in range(2):
        assert set(put(store, make_path(32, seed=seed))) == {Outcome.OK}
    for directory in store.directories:
        slots = sorted(Place.unpack(packed) for packed in directory.places.values())
        assert [slot - slots[0].slot for _, slot in slots] == list(range(32))
    store.close()


def layers_of(store: DiskStore, block: Block, layers: Sequence[int]) -> tuple[Outcome, bool]:
    """Read some layers of a block. Returns the outcome, and whether they are the block's."""
    into = empty_slot()
    outcome = read_block(store, block.block_id, into, layers=layers)
    spans = [LAYOUT.chunk(layer) for layer in layers]
    wanted = data_of(block)
    same = all(np.array_equal(into[at : at + n], wanted[at : at + n]) for at, n in spans)
    return outcome, same


def test_further_layers_of_a_block_are_read_without_its_header(scratch: Path) -> None:
    reads = Reads()
    store = open_store(scratch, backend=FaultyBackend(reads))
    blocks = make_path(2)
    put(store, blocks)
    cases = [(0, [1, 2], 1), (0, [3], 1), (1, [3], 2), (0, [3, 5], 2), (1, [1], 1)]
    for block, layers, calls in cases:
        reads.count = 0
        assert layers_of(store, blocks[block], layers) == (Outcome.OK, True)
        assert reads.count == calls, (block, layers)
    store.close()


@pytest.mark.parametrize(("kept", "calls"), [(3, 1), (2, 2)])
def test_headers_of_so_many_blocks_are_kept(scratch: Path, kept: int, calls: int) -> None:
    reads = Reads()
    store = open_store(scratch, backend=FaultyBackend(reads))
    blocks = make_path(3)
    put(store, blocks)
    with mock.patch.object(reader, "HEADERS", kept):
        for block in blocks:
            assert layers_of(store, block, [1]) == (Outcome.OK, True)
        reads.count = 0
        assert layers_of(store, blocks[0], [2]) == (Outcome.OK, True)
    assert reads.count == calls
    store.close()


def test_a_block_that_is_written_anew_between_its_layers_is_not_damaged(scratch: Path) -> None:
    """With other bytes, as another batch would round them."""
    store = open_store(scratch)
    (block,) = make_path(1)
    put(store, [block])
    assert layers_of(store, block, [1]) == (Outcome.OK, True)
    remove(store, [block.block_id])
    other = empty_slot()
    other[:] = data_of(block)[::-1]
    assert store.write_many([(block, memoryview(other))]) == [Outcome.OK]
    into = empty_slot()
    assert read_block(store, block.block_id, into, layers=[2]) is Outcome.OK
    at, count = LAYOUT.chunk(2)
    assert np.array_equal(into[at : at + count], other[at : at + count])
    store.close()


@pytest.mark.parametrize("layer", [1, 3, 5])
def test_a_damaged_layer_is_found_whichever_was_read_first(scratch: Path, layer: int) -> None:
    store = open_store(scratch)
    (block,) = make_path(1)
    put(store, [block])
    assert layers_of(store, block, [3]) == (Outcome.OK, True)
    (place,) = places(store, [block])
    path = next(scratch.rglob(f"slab-{place.slab:08d}.dat"))
    directory = store.directory_of(block.block_id)
    assert directory is not None
    begin = directory.slabs._slabs[place.slab].header.offset(place.slot)
    at = begin + store.model.header_bytes + LAYOUT.chunk(layer)[0]
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert layers_of(store, block, [layer])[0] is Outcome.DAMAGED
    assert not store.contains([block.block_id])
    store.close()
