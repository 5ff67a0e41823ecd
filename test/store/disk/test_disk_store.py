"""The disk store seen from outside: what is written comes back, elsewhere and later too."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.store.disk.backend import aligned_buffer
from sglang_hc.store.disk.directory import DirectoryError, DirectorySpec
from sglang_hc.store.disk.format import StoredModel
from sglang_hc.store.outcome import Outcome
from support.disk_store import (
    FILE,
    FINGERPRINT,
    LAYOUT,
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


@pytest.mark.parametrize("directories", [1, 2, 3])
def test_what_is_written_is_read_back_whole_and_by_layer(tmp_path: Path, directories: int) -> None:
    store = open_store(*folders(tmp_path, directories))
    blocks = make_path(7)
    assert put(store, blocks) == [Outcome.OK] * 7
    for block in blocks:
        status, got = read_bytes(store, block.block_id)
        assert status is Outcome.OK
        assert np.array_equal(got, data_of(block))
    into = empty_slot()
    assert read_block(store, blocks[2].block_id, into, layers=[2, 5]) is Outcome.OK
    expected = np.zeros_like(into)
    for layer in (2, 5):
        offset, length = LAYOUT.chunk(layer)
        expected[offset : offset + length] = data_of(blocks[2])[offset : offset + length]
    assert np.array_equal(into, expected), "only the wanted layers are touched"
    check_ledgers(store)
    store.close()


def test_aligned_memory_goes_to_the_disk_directly(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    block = make_path(1)[0]
    slot = aligned_buffer(LAYOUT.slot_bytes)
    slot[:] = data_of(block).tobytes()
    assert store.write(block, memoryview(slot)) is Outcome.OK
    into = aligned_buffer(LAYOUT.slot_bytes)
    assert read_block(store, block.block_id, into) is Outcome.OK
    assert into == slot
    store.close()


def test_contains_counts_the_leading_blocks(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    blocks = make_path(5)
    names = [block.block_id for block in blocks]
    put(store, blocks[:2] + blocks[3:])
    assert store.contains(names) == 2
    assert store.contains(names[3:]) == 2
    assert store.contains([]) == 0
    assert read_bytes(store, names[2])[0] is Outcome.MISSING
    store.close()


@pytest.mark.parametrize("directories", [1, 2])
def test_a_restart_finds_everything_by_identity(tmp_path: Path, directories: int) -> None:
    paths = folders(tmp_path, directories)
    blocks = make_path(20)
    store = open_store(*paths)
    put(store, blocks)
    store.close()
    again = open_store(*reversed(paths))
    assert again.contains([block.block_id for block in blocks]) == 20
    for block in blocks:
        status, got = read_bytes(again, block.block_id)
        assert status is Outcome.OK and np.array_equal(got, data_of(block))
    check_ledgers(again)
    again.close()


def test_a_second_disk_does_not_lose_what_the_first_holds(tmp_path: Path) -> None:
    first, second = folders(tmp_path, 2)
    old, new = make_path(6, seed=1), make_path(6, seed=2)
    store = open_store(first)
    put(store, old)
    store.close()
    store = open_store(first, second)
    put(store, new)
    for block in old + new:
        status, got = read_bytes(store, block.block_id)
        assert status is Outcome.OK and np.array_equal(got, data_of(block))
    check_ledgers(store)
    store.close()
    alone = open_store(first)
    assert alone.contains([block.block_id for block in old]) == 6
    for block in new:
        assert is_served(alone, block) == (alone.contains([block.block_id]) == 1)
    alone.close()


def test_a_chunk_lies_where_the_format_says(tmp_path: Path) -> None:
    """Header, then the block: layer i starts at header_bytes plus its offset in the block."""
    store = open_store(tmp_path)
    (block,) = make_path(1)
    put(store, [block])
    content = path_of_block(store, block).read_bytes()
    store.close()
    assert len(content) == 4096 + LAYOUT.slot_bytes
    for layer, offset, length in LAYOUT.chunks():
        expected = data_of(block)[offset : offset + length].tobytes()
        assert content[4096 + offset : 4096 + offset + length] == expected, layer


def test_a_duplicate_is_not_written_twice(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    blocks = make_path(2)
    assert put(store, [blocks[0], blocks[0]]) == [Outcome.OK, Outcome.DUPLICATE]
    assert put(store, blocks) == [Outcome.DUPLICATE, Outcome.OK]
    assert len(store) == 2
    check_ledgers(store)
    store.close()


def test_what_leaves_is_not_noted_before_somebody_asks(tmp_path: Path) -> None:
    """Where nobody does, the names of all blocks that ever left would be kept."""
    store = open_store(tmp_path)
    blocks = make_path(3)
    put(store, blocks)
    remove(store, [blocks[0].block_id])
    assert not store.directories[0]._changed
    assert store.take_changes() == []
    remove(store, [blocks[1].block_id])
    assert store.take_changes() == [blocks[1].block_id]
    store.close()


def test_what_is_removed_is_reported_and_gone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    blocks = make_path(3)
    names = [block.block_id for block in blocks]
    put(store, blocks)
    assert store.take_changes() == []
    assert remove(store, [names[1], b"x" * 16]) == 1
    assert store.contains(names) == 1
    assert store.take_changes() == [names[1]] and store.take_changes() == []
    check_ledgers(store)
    store.close()
    store = open_store(tmp_path)
    assert store.contains(names) == 1
    store.close()


def test_files_are_private(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new")
    put(store, make_path(1))
    root = tmp_path / "new" / "sglang-hc"
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    store.close()


def test_the_size_that_the_error_names_is_just_enough(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="too small") as error:
        open_store(tmp_path, size=10_000)
    size = int(1e9 * float(str(error.value).split()[-2]))
    with pytest.raises(DirectoryError, match="too small"):
        open_store(tmp_path, size=4 * FILE - 1)
    open_store(tmp_path, size=size).close()


@pytest.mark.parametrize(
    ("text", "path", "size"),
    [
        ("/mnt/ssd", "/mnt/ssd", None),
        ("/mnt/ssd:200", "/mnt/ssd", 200 * 10**9),
        ("/mnt/ssd:0.5", "/mnt/ssd", 5 * 10**8),
        ("/a:b", "/a:b", None),
        ("/a:b:3", "/a:b", 3 * 10**9),
        ("/a:.b", "/a:.b", None),
        ("/a:20/b", "/a:20/b", None),
    ],
)
def test_directory_specs(text: str, path: str, size: int | None) -> None:
    assert DirectorySpec.parse(text) == DirectorySpec(path, size)


@pytest.mark.parametrize(
    "text", ["", "/mnt:", "/mnt:-1", "/mnt:0", "/mnt:1.2.3", "/mnt:200GB", "/mnt:1e3"]
)
def test_bad_directory_specs_name_the_option(text: str) -> None:
    with pytest.raises(DirectoryError, match="--hc-disk"):
        DirectorySpec.parse(text)


def test_there_may_be_more_directories_than_layers(tmp_path: Path) -> None:
    store = open_store(*folders(tmp_path, 6))
    blocks = make_path(12)
    assert put(store, blocks) == [Outcome.OK] * 12
    assert all(is_served(store, block) for block in blocks)
    store.close()


def test_threads_write_read_and_delete_at_once(tmp_path: Path) -> None:
    """Whatever is served while slots change owners under the readers is what was written."""
    store = open_store(*folders(tmp_path, 2), size=50 * FILE)
    paths = [make_path(6, seed=seed) for seed in range(40)]
    wrong: list[str] = []

    def work(start: int) -> None:
        for turn in range(3):
            for number in range(start, 40, 4):
                put(store, paths[number])
                for block in paths[(number + turn) % 40]:
                    status, got = read_bytes(store, block.block_id)
                    if status is Outcome.OK and not np.array_equal(got, data_of(block)):
                        wrong.append(block.block_id.hex())
                    if status is Outcome.IO_ERROR:
                        wrong.append(status.value)
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
    store.close()


def test_memory_that_cannot_take_a_block_is_a_programming_error(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match="bytes for a block of"):
        store.write(make_path(1)[0], memoryview(bytearray(10)))
    with pytest.raises(ValueError, match="must start at a page"):
        read_block(store, bytes(16), memoryview(empty_slot(LAYOUT.slot_bytes + 4096))[8:])
    with pytest.raises(ValueError, match="fingerprint"):
        StoredModel.of(LAYOUT.chunks(), FINGERPRINT[:8], "x")
    store.close()
