"""The disk store seen from outside: what is written comes back, elsewhere and later too."""

from __future__ import annotations

import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.store.block import Block
from sglang_hc.store.disk import DiskStore, StoredModel
from sglang_hc.store.disk.backend import aligned_buffer
from sglang_hc.store.disk.reader import PIECE_BYTES
from sglang_hc.store.outcome import Outcome
from support.disk_store import (
    FINGERPRINT,
    LAYOUT,
    Faults,
    FaultyBackend,
    block_files,
    check_ledgers,
    data_of,
    empty_slot,
    is_served,
    make_path,
    open_store,
    path_of_block,
    put,
    read_block,
    read_bytes,
    remove,
)


def folders(root: Path, count: int) -> list[Path]:
    return [root / f"disk{number}" for number in range(count)]


def names(blocks: Sequence[Block]) -> list[bytes]:
    return [block.block_id for block in blocks]


@pytest.mark.parametrize("directories", [1, 2, 3])
def test_what_is_written_is_read_back_whole(tmp_path: Path, directories: int) -> None:
    store = open_store(*folders(tmp_path, directories))
    blocks = make_path(7)
    assert put(store, blocks) == [Outcome.OK] * 7
    assert all(is_served(store, block) for block in blocks)
    check_ledgers(store)
    store.close()


def test_aligned_memory_goes_to_the_disk_directly(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (block,) = make_path(1)
    slot = aligned_buffer(LAYOUT.slot_bytes)
    slot[:] = data_of(block).tobytes()
    assert store.write(block, slot) is Outcome.OK
    into = aligned_buffer(LAYOUT.slot_bytes)
    assert read_block(store, block.block_id, np.frombuffer(into, np.uint8)) is Outcome.OK
    assert into == slot
    store.close()


def test_contains_counts_the_leading_blocks(tmp_path: Path) -> None:
    store = open_store(*folders(tmp_path, 2))
    blocks = make_path(5)
    put(store, blocks[:2] + blocks[3:])
    assert store.contains(names(blocks)) == 2
    assert store.contains(names(blocks)[3:]) == 2
    assert store.contains([]) == 0
    assert read_bytes(store, names(blocks)[2])[0] is Outcome.MISSING
    store.close()


@pytest.mark.parametrize("directories", [1, 2])
def test_a_restart_finds_everything_by_identity(tmp_path: Path, directories: int) -> None:
    paths = folders(tmp_path, directories)
    blocks = make_path(20)
    store = open_store(*paths)
    put(store, blocks)
    store.close()
    again = open_store(*reversed(paths))
    assert again.contains(names(blocks)) == 20
    assert all(is_served(again, block) for block in blocks)
    check_ledgers(again)
    again.close()


def test_a_second_disk_does_not_lose_what_the_first_holds(tmp_path: Path) -> None:
    first, second = folders(tmp_path, 2)
    old, new = make_path(6, seed=1), make_path(60, seed=2)
    store = open_store(first)
    put(store, old)
    store.close()
    store = open_store(first, second)
    put(store, new)
    assert all(is_served(store, block) for block in old + new)
    store.close()
    alone = open_store(first)
    found = [block for block in new if is_served(alone, block)]
    assert alone.contains(names(old)) == 6 and 10 < len(found) < 50, "a part went to the other one"
    alone.close()


def test_parts_of_a_block_lie_side_by_side(tmp_path: Path) -> None:
    """Ranks of one server have the same blocks, and each its own part of them."""
    (block,) = make_path(1)
    stores = [open_store(tmp_path, part=bytes([rank]) * 16, users=2) for rank in range(2)]
    for rank, store in enumerate(stores):
        data = data_of(bytes([rank]) * 16)
        assert store.write(block, memoryview(data)) is Outcome.OK
    for rank, store in enumerate(stores):
        outcome, got = read_bytes(store, block.block_id)
        assert outcome is Outcome.OK and np.array_equal(got, data_of(bytes([rank]) * 16))
    assert len(list(block_files(tmp_path))) == 2
    # A file that lies where another rank's should: neither rank takes it.
    path_of_block(stores[0], block).replace(path_of_block(stores[1], block))
    assert read_bytes(stores[1], block.block_id)[0] is Outcome.DAMAGED
    assert read_bytes(stores[0], block.block_id)[0] is Outcome.MISSING
    assert not list(block_files(tmp_path))
    for store in stores:
        store.close()


def test_a_duplicate_is_not_written_twice(tmp_path: Path) -> None:
    store = open_store(*folders(tmp_path, 2))
    blocks = make_path(2)
    assert put(store, [blocks[0], blocks[0]]) == [Outcome.OK, Outcome.DUPLICATE]
    assert put(store, blocks) == [Outcome.DUPLICATE, Outcome.OK]
    assert sum(1 for folder in folders(tmp_path, 2) for _ in block_files(folder)) == 2
    store.close()


def test_what_leaves_is_noted_from_when_somebody_asks(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    blocks = make_path(3)
    put(store, blocks)
    assert remove(store, [names(blocks)[0]]) == 1
    assert sorted(store.take_changes()) == sorted(names(blocks)[1:]), "all that are here"
    assert remove(store, [names(blocks)[1], b"x" * 16]) == 1
    assert store.take_changes() == [names(blocks)[1]] and store.take_changes() == []
    assert store.block_ids() == [names(blocks)[2]]
    check_ledgers(store)
    store.close()
    store = open_store(tmp_path)
    assert store.contains(names(blocks)) == 0 and len(store) == 1
    store.close()


def test_files_are_private(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new")
    put(store, make_path(1))
    root = tmp_path / "new" / "sglang-hc"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    for path in block_files(tmp_path / "new"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list((root / "new").iterdir())
    store.close()
    assert not list((root / "servers").iterdir())


def test_memory_that_cannot_take_a_block_is_a_programming_error(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match="bytes for a block of"):
        store.write(make_path(1)[0], memoryview(bytearray(10)))
    with pytest.raises(ValueError, match="must start at a page"):
        read_block(store, bytes(16), empty_slot(LAYOUT.slot_bytes + 4096)[8:])
    with pytest.raises(ValueError, match="fingerprint"):
        StoredModel.of(LAYOUT.chunks(), FINGERPRINT[:8], "x")
    store.close()


def test_names_that_are_no_blocks_are_not_found(scratch: Path) -> None:
    """In a folder with 20,000 of them."""
    store = open_store(scratch)
    (block,) = make_path(1)
    put(store, [block])
    leaf = path_of_block(store, block).parent
    store.close()
    name = block.block_id.hex()
    for foreign in (name.upper() + "A", name[:-1], f"{name}.tmp", f".{name}", "x" * 32, "é" * 32):
        (leaf / foreign).touch()
    for number in range(20_000):
        (leaf / f"{number:033d}").touch()
    (leaf.parents[1] / "z").mkdir()
    other = next(one for one in "0123456789abcdef" if not (leaf.parents[1] / one).exists())
    (leaf.parents[1] / other).touch()  # in place of a folder
    (leaf / bytes(16).hex()).touch()  # a block's name where no block of that name lies
    store = open_store(scratch)
    store.tick()
    assert store.block_ids() == [block.block_id] and is_served(store, block)
    check_used(store, 1)
    store.close()


def check_used(store: DiskStore, blocks: int) -> None:
    (directory,) = store.directories
    with directory.ledger.held():
        assert directory.ledger.used == blocks * store.model.file_bytes


# -- calls to the disk ----------------------------------------------------------------------------


class Reads(Faults):
    """Notes the bytes of each call that reads."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.on_range = lambda path, begin, end: self.sizes.append(end - begin)


def test_a_small_block_is_read_by_one_call(scratch: Path) -> None:
    reads = Reads()
    store = open_store(scratch, backend=FaultyBackend(reads))
    blocks = make_path(2)
    put(store, blocks)
    assert is_served(store, blocks[0]) and reads.sizes == [4096 + LAYOUT.slot_bytes]
    store.close()


@pytest.mark.parametrize(("layers", "calls"), [(8, 1), (9, 2), (16, 2), (17, 3)])
def test_no_call_is_longer_than_a_piece(scratch: Path, layers: int, calls: int) -> None:
    """Of eight chunks of half a mebibyte each, and once the header."""
    layout = BlockLayout(LayerPlan(0, 0, layers), StateShape(layers, 64, (4096, 4096), "uint8"))
    assert layout.slot_bytes == layers * (PIECE_BYTES >> 3)
    reads = Reads()
    store = open_store(
        scratch, size=100 << 20, backend=FaultyBackend(reads), layout=layout,
        fingerprint=layout.fingerprint("large"),
    )  # fmt: skip
    (block,) = make_path(1)
    put(store, [block])
    assert is_served(store, block)
    assert len(reads.sizes) == calls and max(reads.sizes) <= PIECE_BYTES + 4096
    store.close()


# -- threads --------------------------------------------------------------------------------------


def test_threads_write_read_and_delete_at_once(scratch: Path) -> None:
    """Whatever is served while files change under the readers is what was written."""
    size = 40 * (4096 + LAYOUT.slot_bytes)
    store = open_store(*folders(scratch, 2), size=size)
    paths = [make_path(6, seed=seed) for seed in range(40)]
    wrong: list[object] = []

    def work(start: int) -> None:
        for turn in range(3):
            for number in range(start, 40, 4):
                wrong.extend({*put(store, paths[number])} - {Outcome.OK, Outcome.DUPLICATE})
                for block in paths[(number + turn) % 40]:
                    status, got = read_bytes(store, block.block_id)
                    if status is Outcome.OK and not np.array_equal(got, data_of(block)):
                        wrong.append(block)
                    if status not in (Outcome.OK, Outcome.MISSING):
                        wrong.append(status)
                if number % 3 == 0:
                    remove(store, [paths[number][-1].block_id])

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.counters()["evicted_blocks"] > 0
    check_ledgers(store)
    assert all(is_served(store, name) for name in store.block_ids())
    store.close()
