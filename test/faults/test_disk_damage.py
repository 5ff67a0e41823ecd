"""Bit flips, cut files and lost directories: never wrong bytes, always a counted reason."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.store.disk.backend import DirectBackend, File
from sglang_hc.store.disk.directory import DirectoryError
from sglang_hc.store.disk.writer import Block
from sglang_hc.store.outcome import Outcome
from support.disk_store import (
    data_of,
    make_path,
    open_store,
    put,
    read_bytes,
    remove,
)

BUFFERED = DirectBackend(direct=False)


def make_pristine(folder: Path, count: int = 12) -> list[Block]:
    store = open_store(folder, backend=BUFFERED)
    blocks = make_path(count)
    assert set(put(store, blocks)) == {Outcome.OK}
    store.close()
    return blocks


def index_of(folder: Path) -> Path:
    return folder / "sglang-hc" / "index.sqlite"


def slabs_of(folder: Path) -> list[Path]:
    return sorted((folder / "sglang-hc").glob("slab-*.dat"))


def serve_all(folder: Path, blocks: list[Block]) -> tuple[int, int]:
    """(blocks served right, blocks refused with a counted reason); fails on wrong bytes."""
    store = open_store(folder, backend=BUFFERED)
    try:
        right = refused = 0
        for block in blocks:
            status, got = read_bytes(store, block.block_id)
            if status is Outcome.OK:
                assert np.array_equal(got, data_of(block)), "wrong bytes were served"
                right += 1
            else:
                assert status in (Outcome.DAMAGED, Outcome.MISSING), "the tier counts these"
                assert store.contains([block.block_id]) == 0, "a bad block is offered again"
                refused += 1
        # The directory is still good for new blocks.
        fresh = make_path(2, seed=77)
        if store.in_use():
            answers = put(store, fresh)
            served = [read_bytes(store, b.block_id) for b in fresh]
            for answer, block, (status, got) in zip(answers, fresh, served, strict=True):
                assert (
                    answer is not Outcome.OK
                    or not store.in_use()
                    or (status is Outcome.OK and np.array_equal(got, data_of(block)))
                )
        return right, refused
    finally:
        store.close()


def flip_bits(scratch: Path, times: int, where: str, seed: int) -> tuple[int, int]:
    """One random bit at a time in a copy of a good directory.

    Returns (copies of which a block was refused, copies whose index was rebuilt).
    """
    rng = random.Random(seed)
    pristine = scratch / "pristine"
    blocks = make_pristine(pristine)
    refused = rebuilt = 0
    for _ in range(times):
        copy = scratch / "copy"
        shutil.copytree(pristine, copy)
        files = [index_of(copy)] if where == "index" else slabs_of(copy)
        chosen = rng.choices(files, [path.stat().st_size for path in files])[0]
        content = bytearray(chosen.read_bytes())
        # Most of a small index is unused zeros: aim at what is in use.
        used = [at for at, byte in enumerate(content) if byte] if where == "index" else None
        at = rng.choice(used) if used else rng.randrange(len(content))
        content[at] ^= 1 << rng.randrange(8)
        chosen.write_bytes(content)
        inode = index_of(copy).stat().st_ino
        right, _ = serve_all(copy, blocks)
        refused += right < len(blocks)
        rebuilt += index_of(copy).stat().st_ino != inode
        shutil.rmtree(copy)
    return refused, rebuilt


def test_fifty_bit_flips_in_slabs_serve_nothing_wrong(scratch: Path) -> None:
    refused, _ = flip_bits(scratch, 50, "slabs", seed=1)
    assert refused > 10, "no flip hit anything: the test proves nothing"


def test_fifty_bit_flips_in_the_index_serve_nothing_wrong(scratch: Path) -> None:
    """What cannot be read any more is noticed and rebuilt from the slots."""
    refused, rebuilt = flip_bits(scratch, 50, "index", seed=1)
    assert refused + rebuilt > 0, "no flip hit anything: the test proves nothing"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["slabs", "index"])
def test_five_hundred_bit_flips_serve_nothing_wrong(
    scratch: Path, where: str, tell: Callable[[str], None]
) -> None:
    refused, rebuilt = flip_bits(scratch, 500, where, seed=2)
    tell(
        f"500 bit flips, one in each copy of a directory, in its {where}: 0 wrong bytes served, "
        f"blocks refused in {refused} copies, index rebuilt in {rebuilt}"
    )
    assert refused + rebuilt > 10


def test_every_byte_of_a_slot_is_covered(scratch: Path) -> None:
    """Any changed byte of header or data up to the end of the last chunk is noticed."""
    folder = scratch / "disk"
    block = make_pristine(folder, 1)[0]
    slab = slabs_of(folder)[0]
    good = slab.read_bytes()
    store = open_store(folder, backend=BUFFERED)
    end = 4096 + store.model.slot_bytes
    store.close()
    rng = random.Random(5)
    for at in [4096, 4096 + 4095, 8192, end - 1, *(rng.randrange(4096, end) for _ in range(20))]:
        bad = bytearray(good)
        bad[at] ^= 0x10
        slab.write_bytes(bad)
        index = index_of(folder).read_bytes()
        assert serve_all(folder, [block]) == (0, 1), f"byte {at} is not covered"
        slab.write_bytes(good)
        for path in slabs_of(folder)[1:]:
            path.unlink()
        index_of(folder).write_bytes(index)


@pytest.mark.parametrize("left", [0.0, 0.4, 0.9])
def test_a_cut_slab_loses_only_its_own_blocks(scratch: Path, left: float) -> None:
    folder = scratch / "disk"
    blocks = make_pristine(folder)
    slabs = slabs_of(folder)
    os.truncate(slabs[1], int(left * slabs[1].stat().st_size))
    right, refused = serve_all(folder, blocks)
    assert right + refused == 12 and 0 < refused <= -(-12 // (len(slabs) - 1))


def test_a_lost_slab_loses_only_its_own_blocks(scratch: Path) -> None:
    folder = scratch / "disk"
    blocks = make_pristine(folder)
    slabs = slabs_of(folder)
    slabs[1].unlink()
    right, refused = serve_all(folder, blocks)
    assert right + refused == 12 and 0 < refused <= -(-12 // (len(slabs) - 1))


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "garbage", "marked"])
def test_a_lost_index_is_rebuilt_from_the_slots(scratch: Path, damage: str) -> None:
    """Users of other stores found their SSD full of litter after a restart; here the slots say
    themselves what they hold."""
    folder = scratch / "disk"
    blocks = make_pristine(folder)
    index = index_of(folder)
    if damage == "missing":
        index.unlink()
    elif damage == "empty":
        os.truncate(index, 0)
    elif damage == "cut":
        os.truncate(index, index.stat().st_size // 2)
    elif damage == "garbage":
        index.write_bytes(os.urandom(index.stat().st_size))
    else:
        (index.parent / "index.damaged").touch()
    assert serve_all(folder, blocks) == (len(blocks), 0)
    assert not (index.parent / "index.damaged").exists()
    store = open_store(folder, backend=BUFFERED)
    store.check_integrity()
    store.close()


def test_damage_found_while_running_turns_the_tier_off(scratch: Path) -> None:
    """No exception reaches the caller; the next start is in order again."""
    folder = scratch / "disk"
    blocks = make_pristine(folder)
    store = open_store(folder, backend=BUFFERED)
    index_of(folder).write_bytes(b"\xff" * index_of(folder).stat().st_size)
    Path(f"{index_of(folder)}-wal").write_bytes(b"")
    directory = store.directories[0]
    directory.index._connection.execute("PRAGMA cache_size=0")
    answers = set()
    for seed in range(200, 260):
        answers |= set(put(store, make_path(4, seed=seed)))
        if not store.in_use():
            break
    assert not store.in_use() and Outcome.IO_ERROR in answers
    assert store.contains([blocks[0].block_id]) == 0
    assert read_bytes(store, blocks[0].block_id)[0] is Outcome.IO_ERROR
    store.touch([blocks[0].block_id])
    assert remove(store, [blocks[0].block_id]) == 0
    store.tick()
    store.close()
    right, _ = serve_all(folder, blocks)
    assert right == len(blocks)


def test_one_of_two_directories_lost_before_a_start(scratch: Path) -> None:
    """The other one's blocks are served, and what is written again is whole."""
    folders = [scratch / "a", scratch / "b"]
    store = open_store(*folders, backend=BUFFERED)
    blocks = make_path(8)
    put(store, blocks)
    store.close()
    shutil.rmtree(folders[1])
    store = open_store(*folders, backend=BUFFERED)
    assert store.contains([block.block_id for block in blocks]) == 1
    for block in blocks[::2]:
        status, got = read_bytes(store, block.block_id)
        assert status is Outcome.OK and np.array_equal(got, data_of(block))
    for block in blocks[1::2]:
        assert read_bytes(store, block.block_id)[0] is Outcome.MISSING
    assert put(store, blocks) == [Outcome.DUPLICATE, Outcome.OK] * 4
    assert store.contains([block.block_id for block in blocks]) == 8
    store.check_integrity()
    store.close()


def test_one_of_two_indexes_damaged_while_running(scratch: Path) -> None:
    """The directory is out until a restart, said once; the other goes on, upkeep included."""
    folders = [scratch / "a", scratch / "b"]
    store = open_store(*folders, backend=BUFFERED, scrub_bytes_per_s=1 << 20)
    blocks = make_path(8)
    put(store, blocks)
    bad = store.directories[1]
    bad.fail("for the test")
    names = [block.block_id for block in blocks]
    assert store.contains(names) == 1 and store.contains(names[2:]) == 1
    assert read_bytes(store, names[1])[0] is Outcome.IO_ERROR
    assert store.take_directory_changes() == ([], names[1::2])
    fresh = make_path(6, seed=3)
    assert put(store, fresh) == [Outcome.OK] * 6
    assert all(read_bytes(store, block.block_id)[0] is Outcome.OK for block in fresh)
    store.tick()
    assert store.counters()["scrubbed_bytes"] > 0
    assert len(store.in_use()) == 1 and not bad.usable()
    store.close()
    store = open_store(*folders, backend=BUFFERED)
    assert store.contains(names) == 8, "its index is made again from the slots"
    assert store.contains([block.block_id for block in fresh]) == 6
    store.check_integrity()
    store.close()


def test_another_models_slot_is_not_served(scratch: Path) -> None:
    """A row that points at a block of another model, with everything else intact."""
    folder = scratch / "disk"
    mine = make_pristine(folder, 2)
    other = bytes(16)
    store = open_store(folder, backend=BUFFERED, fingerprint=other)
    assert store.contains([mine[0].block_id]) == 0
    theirs = make_path(2, seed=9, fingerprint=other)
    put(store, theirs)
    store.close()
    with sqlite3.connect(index_of(folder)) as connection:
        slab, slot = connection.execute(
            "SELECT slab, slot FROM blocks WHERE block_id=?", (mine[0].block_id,)
        ).fetchone()
        connection.execute("DELETE FROM blocks WHERE block_id=?", (mine[0].block_id,))
        connection.execute(
            "UPDATE blocks SET slab=?, slot=? WHERE block_id=?", (slab, slot, theirs[0].block_id)
        )
    store = open_store(folder, backend=BUFFERED, fingerprint=other)
    assert store.contains([theirs[0].block_id]) == 1
    assert read_bytes(store, theirs[0].block_id)[0] is Outcome.DAMAGED
    store.close()


@pytest.mark.parametrize("version", [0, 1, 3, 999])
def test_an_unknown_version_is_refused_and_kept(scratch: Path, version: int) -> None:
    folder = scratch / "disk"
    blocks = make_pristine(folder)
    with sqlite3.connect(index_of(folder)) as connection:
        connection.execute(f"PRAGMA user_version={version}")
        connection.execute("UPDATE meta SET value=? WHERE key='format_version'", (str(version),))
    before = {path: path.read_bytes() for path in slabs_of(folder)}
    remedy = "delete .*sglang-hc, which" if version < 2 else "upgrade sglang-hc or name another"
    with pytest.raises(DirectoryError, match=rf"format {version}, .* knows format 2; {remedy}"):
        open_store(folder, backend=BUFFERED)
    assert before == {path: path.read_bytes() for path in slabs_of(folder)}
    with sqlite3.connect(index_of(folder)) as connection:
        connection.execute("PRAGMA user_version=2")
        connection.execute("UPDATE meta SET value='2' WHERE key='format_version'")
    assert serve_all(folder, blocks) == (len(blocks), 0)


def test_slabs_of_an_unknown_version_are_refused_and_kept(scratch: Path) -> None:
    folder = scratch / "disk"
    make_pristine(folder)
    count = len(slabs_of(folder))
    for path in slabs_of(folder):
        content = bytearray(path.read_bytes())
        content[8] = 3
        path.write_bytes(content)
    index_of(folder).unlink()
    with pytest.raises(DirectoryError, match="written in disk format 3"):
        open_store(folder, backend=BUFFERED)
    assert len(slabs_of(folder)) == count


def test_a_rebuilt_index_that_stays_in_its_log_is_not_used(scratch: Path) -> None:
    """The file without its log was taken for the index, as if no slab had a row: the start after
    that removed all slabs. A full disk or, as here, a reader keeps the rows in the log."""
    store = open_store(scratch)
    blocks = make_path(8)
    put(store, blocks)
    store.close()
    root = scratch / "sglang-hc"
    (root / "index.sqlite").unlink()
    fresh, readers = root / "index.sqlite.new", []

    class ReadMeanwhile(DirectBackend):
        def sync_directory(self, path: str) -> None:
            raise AssertionError("it was put in place")

        def open(self, path: str, create: bool = False) -> File:
            if fresh.exists() and not readers:
                readers.append(sqlite3.connect(fresh, isolation_level=None))
                readers[0].executescript("BEGIN; SELECT * FROM meta")
            return super().open(path, create)

    with pytest.raises(DirectoryError, match="written out of its log"):
        open_store(scratch, backend=ReadMeanwhile(direct=False))
    assert readers[0].in_transaction
    readers[0].close()
    store = open_store(scratch)
    assert store.contains([block.block_id for block in blocks]) == 8
    store.check_integrity()
    store.close()
