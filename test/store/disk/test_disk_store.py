"""The disk store seen from outside: what is written comes back, elsewhere and later too."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.store.disk import StoredModel
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
    names_of,
    open_store,
    path_of_block,
    put,
    read_block,
    read_bytes,
    remove,
)


def test_contains_counts_the_leading_blocks(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a", tmp_path / "b")
    blocks = make_path(5)
    put(store, blocks[:2] + blocks[3:])
    assert store.contains(names_of(blocks)) == 2
    assert store.contains(names_of(blocks)[3:]) == 2
    assert store.contains([]) == 0
    assert read_bytes(store, names_of(blocks)[2])[0] is Outcome.MISSING


@pytest.mark.parametrize("directories", [1, 2])
def test_a_restart_finds_everything_by_identity(tmp_path: Path, directories: int) -> None:
    paths = [tmp_path / str(number) for number in range(directories)]
    blocks = make_path(20)
    store = open_store(*paths)
    put(store, blocks)
    store.close()
    again = open_store(*reversed(paths))
    assert again.contains(names_of(blocks)) == 20
    assert all(is_served(again, block) for block in blocks)
    check_ledgers(again)


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


def test_what_leaves_is_noted_from_when_somebody_asks(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    blocks = make_path(3)
    put(store, blocks)
    assert remove(store, [names_of(blocks)[0]]) == 1
    assert sorted(store.take_changes()) == sorted(names_of(blocks)[1:]), "all that are here"
    assert remove(store, [names_of(blocks)[1], b"x" * 16]) == 1
    assert store.take_changes() == [names_of(blocks)[1]] and store.take_changes() == []
    assert store.block_ids() == [names_of(blocks)[2]]
    check_ledgers(store)
    store.close()
    store = open_store(tmp_path)
    assert store.contains(names_of(blocks)) == 0 and len(store) == 1


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
    (directory,) = store.directories
    with directory.ledger.held():
        assert directory.ledger.used == store.model.file_bytes


# -- calls to the disk ----------------------------------------------------------------------------


MIB = 1 << 20


@pytest.mark.parametrize(
    ("layers", "chunk", "calls", "longest"),
    [
        (2, 4096, 1, 3 * 4096),
        (8, MIB // 2, 1, 4096 + PIECE_BYTES),
        (9, MIB // 2, 2, 4096 + PIECE_BYTES),
        (17, MIB // 2, 3, 4096 + PIECE_BYTES),
        (2, 2 * PIECE_BYTES, 4, 4096 + PIECE_BYTES),
    ],
)
def test_no_call_is_longer_than_a_piece(
    scratch: Path, layers: int, chunk: int, calls: int, longest: int
) -> None:
    """The header is read with the first piece. chunk: bytes of each layer."""
    part = chunk // 2 // BLOCK_TOKENS
    layout = BlockLayout(LayerPlan(0, 0, layers), StateShape(layers, 64, (part, part), "uint8"))
    assert layout.slot_bytes == layers * chunk
    sizes: list[int] = []
    faults = Faults(on_range=lambda path, begin, end: sizes.append(end - begin))
    store = open_store(
        scratch, size=100 * MIB, backend=FaultyBackend(faults), layout=layout,
        fingerprint=layout.fingerprint("large"),
    )  # fmt: skip
    (block,) = make_path(1)
    put(store, [block])
    assert is_served(store, block)
    assert len(sizes) == calls and max(sizes) == longest
