"""Bit flips, cut, renamed and lost files, power cuts: never wrong bytes, always an answer."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hc.store.block import Block
from sglang_hc.store.disk import DiskStore
from sglang_hc.store.outcome import GOOD, Outcome
from support.disk_store import (
    BUFFERED,
    FILE,
    block_files,
    check_ledgers,
    is_served,
    make_path,
    open_store,
    path_of_block,
    put,
    read_bytes,
)


def check_dropped(store: DiskStore, block: Block) -> Outcome:
    """A damaged block is no more than a miss, is removed, and can be written again. Returns how the
    read of it ended."""
    outcome, _ = read_bytes(store, block.block_id)
    assert outcome in (Outcome.DAMAGED, Outcome.MISSING)
    assert store.contains([block.block_id]) == 0, "a bad block is offered again"
    assert not Path(store.directories[0].path(block.block_id)).exists()
    assert put(store, [block]) == [Outcome.OK] and is_served(store, block)
    return outcome


def flip_bits(scratch: Path, times: int, seed: int) -> str:
    """One random bit at a time in a block's file. Says what was found."""
    rng = random.Random(seed)
    store = open_store(scratch, backend=BUFFERED)
    blocks = make_path(8)
    put(store, blocks)
    in_header = 0
    for _ in range(times):
        block = rng.choice(blocks)
        path = path_of_block(store, block)
        at = rng.randrange(FILE)
        with path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        in_header += at < 4096
        assert check_dropped(store, block) is Outcome.DAMAGED, f"byte {at} is not covered"
    assert all(is_served(store, block) for block in blocks)
    check_ledgers(store)
    store.close()
    return f"{times} bit flips, {in_header} of them in headers: each found, 0 wrong bytes served"


def test_bit_flips_serve_nothing_wrong(scratch: Path, tell: Callable[[str], None]) -> None:
    tell(flip_bits(scratch, 1000, seed=1))


@pytest.mark.slow
def test_twenty_thousand_bit_flips_serve_nothing_wrong(
    scratch: Path, tell: Callable[[str], None]
) -> None:
    tell(flip_bits(scratch, 20_000, seed=2))


@pytest.mark.parametrize("direct", [True, False])
def test_a_folder_in_place_of_a_file_is_found(scratch: Path, direct: bool) -> None:
    """And where a block is to be written it is replaced."""
    store = open_store(scratch, backend=None if direct else BUFFERED)
    block, new = make_path(2)
    Path(store.directories[0].path(new.block_id)).mkdir(parents=True)
    assert put(store, [block, new]) == [Outcome.OK] * 2 and is_served(store, new)
    path = path_of_block(store, block)
    path.unlink()
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "file").touch()
    check_dropped(store, block)
    assert store.counters()["directory_pauses"] == 0


def test_a_file_under_another_blocks_name_is_found(scratch: Path) -> None:
    """Of the same model, and of another one whose blocks are as large."""
    store = open_store(scratch, backend=BUFFERED)
    other = open_store(scratch, backend=BUFFERED, fingerprint=bytes(16))
    blocks, foreign = make_path(4), make_path(1, fingerprint=bytes(16))
    put(store, blocks)
    put(other, foreign)
    first, second, third, _ = (path_of_block(store, block) for block in blocks)
    shutil.copy(first, second)
    shutil.copy(path_of_block(other, foreign[0]), third)
    for block in blocks[1:3]:
        assert check_dropped(store, block) is Outcome.DAMAGED
    unknown = Path(store.directories[0].path(bytes(16)))
    unknown.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(first, unknown)
    assert store.directories[0].find(bytes(16)), "it may be one by its name"
    assert read_bytes(store, bytes(16))[0] is Outcome.DAMAGED and not unknown.exists()
    assert is_served(store, blocks[0]) and is_served(store, blocks[3])


def test_one_of_two_directories_lost_before_a_start(scratch: Path) -> None:
    """The other one's blocks are served, and what is written again is whole."""
    folders = [scratch / "a", scratch / "b"]
    store = open_store(*folders, backend=BUFFERED)
    blocks = make_path(24)
    put(store, blocks)
    kept = set(store.directories[0].blocks)
    store.close()
    shutil.rmtree(folders[1])
    store = open_store(*folders, backend=BUFFERED)
    assert set(store.block_ids()) == kept
    outcomes = put(store, blocks)
    assert set(outcomes) == set(GOOD) and outcomes.count(Outcome.DUPLICATE) == len(kept)
    assert all(is_served(store, block) for block in blocks)


# -- power cuts -----------------------------------------------------------------------------------


def leave(path: Path, rng: random.Random) -> bool:
    """What a power cut leaves of a file that has its name and was not synced: each of its sectors,
    or zeros, up to any length. Whether that is all of it."""
    content = path.read_bytes()
    fate = rng.choice(("kept", "zeros", "torn", "short", "empty"))
    if fate == "zeros":
        path.write_bytes(bytes(len(content)))
    elif fate == "torn":
        sectors = [content[at : at + 512] for at in range(0, len(content), 512)]
        lost = set(rng.sample(range(len(sectors)), rng.randrange(1, len(sectors))))
        path.write_bytes(b"".join(bytes(512) if n in lost else s for n, s in enumerate(sectors)))
    elif fate == "short":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif fate == "empty":
        path.write_bytes(b"")
    return path.read_bytes() == content


@pytest.mark.parametrize("seed", range(6))
def test_after_a_power_cut_a_block_is_whole_or_not_there(scratch: Path, seed: int) -> None:
    """Nothing is synced: files that have their names may have any bytes, and names may be lost. The
    small files of a directory may be zeros too, and what was being written may be left."""
    rng = random.Random(seed)
    store = open_store(scratch, size=40 * FILE, backend=BUFFERED)
    blocks = make_path(36)
    put(store, blocks)
    root = scratch / "sglang-hc"
    left = {block.block_id: leave(path_of_block(store, block), rng) for block in blocks}
    for block in rng.sample(blocks, 4):
        path_of_block(store, block).unlink()
        left[block.block_id] = False
    unfinished = Path(store.directories[0].membership.path_of(77, FILE))
    unfinished.write_bytes(bytes(rng.randrange(FILE)))
    for name in ("lock", "format"):
        if rng.random() < 0.5:
            (root / name).write_bytes(bytes(rng.randrange(3)))
    store.directories[0].close()  # as the end of its process
    store = open_store(scratch, size=40 * FILE, backend=BUFFERED)
    assert not unfinished.exists() and (root / "format").read_text() == "3\n"
    for block in blocks:
        assert is_served(store, block) == left[block.block_id]
    assert set(store.block_ids()) == {name for name, whole in left.items() if whole}
    assert sum(1 for _ in block_files(scratch)) == len(store)
    check_ledgers(store)
    assert {*put(store, blocks)} <= {*GOOD}
    assert all(is_served(store, block) for block in blocks)
