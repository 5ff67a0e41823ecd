"""Ends in directories and in remote stores: found again after a restart, and never wrong."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_hc.forms import EndLayout
from sglang_hc.store.chain import Chain
from sglang_hc.store.disk.folders import model_folders
from sglang_hc.store.disk.format import StoredModel, check_file
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.remote import Frames, RemoteStore
from sglang_hc.tree.forgetting import Forgetting
from support.disk_store import (
    BUFFERED,
    EIO,
    LAYOUT,
    Faults,
    FaultyBackend,
    check_ledgers,
    flip,
    only_in,
    open_store,
    remove,
)
from support.ends_world import STATE, WINDOW, EndsWorld
from support.host import FINGERPRINT
from support.remote import FakeBackend, FakeStore
from support.waiting import HANGS_S, until

SLOTS = 32


@contextmanager
def server(
    folder: Path, layout: EndLayout = WINDOW, faults: Faults | None = None
) -> Iterator[EndsWorld]:
    """Tiers over a directory, until an orderly stop."""
    backend, counts = FaultyBackend(faults or Faults()), Counter[str]()
    blocks = open_store(folder, fingerprint=FINGERPRINT, backend=backend)
    name = layout.fingerprint(FINGERPRINT)
    parts = open_store(folder, layout=layout, fingerprint=name, backend=backend)
    world = EndsWorld(
        layout,
        SLOTS,
        blocks_io=KnownBlocks(DiskThreads(blocks, HostPool(LAYOUT, SLOTS), counts)),
        parts_io=lambda pool: KnownBlocks(DiskThreads(parts, pool, counts)),
    )
    world.stores = blocks, parts
    try:
        yield world
    finally:
        world.disk.drain()
        for store in (blocks, parts):
            check_ledgers(store)
        world.disk.close()


def settle(world: EndsWorld) -> None:
    until(lambda: not world.disk.is_busy, world.disk.poll)


def serve(world: EndsWorld, word: str) -> int:
    """A request waits until it is ready. Returns up to which block it goes on."""
    request = world.ask(word)
    until(lambda: world.ready(request), lambda: (world.poll(), world.look()))
    return world.deepest(word)


def saved(folder: Path, *words: str, layout: EndLayout = WINDOW) -> list[Path]:
    """Files of end parts, after a server has computed paths with ends and was stopped."""
    with server(folder, layout) as world:
        world.end(*words)
        settle(world)
        assert world.below.counters["disk_saved_end_parts"] > 0
        assert world.disk.levels()["disk_end_parts"] == len(world.stores[1])
    return part_files(folder, layout)


def part_files(folder: Path, layout: EndLayout = WINDOW) -> list[Path]:
    name = layout.fingerprint(FINGERPRINT).hex()
    (own,) = [f for f in model_folders(str(folder / "sglang-hc")) if name in f.path]
    return sorted(path for path in Path(own.path).glob("?/?/*") if path.is_file())


@pytest.mark.parametrize("layout", [WINDOW, STATE])
def test_a_restarted_server_finds_ends_again(tmp_path: Path, layout: EndLayout) -> None:
    files = saved(tmp_path, "abcd", layout=layout)
    assert len(files) == layout.blocks
    for path in files:  # what fsck proves of every block
        with open(path, "rb") as file:
            data = file.read()
        reader = BUFFERED.open(str(path))
        header = check_file(reader.read, bytes.fromhex(path.name), len(data))
        reader.close()
        assert header.tokens == b"" and header.position in (2, 3)
    with server(tmp_path, layout) as world:
        assert serve(world, "abcdef") == 4
        assert world.below.counters["disk_loaded_end_parts"] == layout.blocks


@pytest.mark.parametrize("at", [20, 100, 5000])
def test_a_part_with_a_flipped_bit_makes_the_match_shorter(tmp_path: Path, at: int) -> None:
    saved(tmp_path, "ab")
    early = set(part_files(tmp_path))
    (damaged, _) = sorted(set(saved(tmp_path, "abcdef")) - early)
    flip(damaged, at)
    with server(tmp_path) as world:
        assert serve(world, "abcdef") == 2
        assert world.below.counters["disk_read_damaged"] == 1
        assert world.ends.free_slots == world.ends.num_slots - 2
    assert not damaged.exists()


def test_the_part_of_another_block_is_no_part_of_this_one(tmp_path: Path) -> None:
    """Planted: a file under the name of another one."""
    saved(tmp_path, "ab", layout=STATE)
    early = set(part_files(tmp_path, STATE))
    (late,) = set(saved(tmp_path, "abcd", layout=STATE)) - early
    (first,) = early
    late.write_bytes(first.read_bytes())
    with server(tmp_path, STATE) as world:
        assert serve(world, "abcd") == 2
        assert world.below.counters["disk_read_damaged"] == 1


def test_a_part_that_another_server_removed_makes_the_match_shorter(tmp_path: Path) -> None:
    saved(tmp_path, "ab")
    early = set(part_files(tmp_path))
    later = set(saved(tmp_path, "abcdef")) - early
    with server(tmp_path) as world:
        name = WINDOW.fingerprint(FINGERPRINT)
        other = open_store(tmp_path, layout=WINDOW, fingerprint=name)
        assert remove(other, [bytes.fromhex(min(later).name)]) == 1
        other.close()
        assert serve(world, "abcdef") == 2
        assert world.below.counters["disk_read_missing"] == 1


def test_a_disk_that_fails_costs_the_end_alone(tmp_path: Path) -> None:
    saved(tmp_path, "abcd")
    faults = Faults()
    name = WINDOW.fingerprint(FINGERPRINT).hex()
    faults.on_read = only_in(name, EIO)
    with server(tmp_path, faults=faults) as world:
        assert serve(world, "abcd") == 0
        assert world.below.counters["disk_read_io_error"] > 0
        assert world.ends.free_slots == world.ends.num_slots


def test_a_read_that_hangs_holds_up_no_request_for_ever(tmp_path: Path) -> None:
    saved(tmp_path, "abcd", layout=STATE)
    faults, go_on = Faults(), threading.Event()
    name = STATE.fingerprint(FINGERPRINT).hex()
    faults.on_read = only_in(name, lambda path: assert_(go_on.wait(HANGS_S)))
    with server(tmp_path, STATE, faults) as world:
        request = world.ask("abcd")
        assert not world.ready(request)
        world.clock.pass_time(60.0)
        assert world.ready(request) and world.deepest("abcd") == 0
        go_on.set()
        settle(world)
        assert world.deepest("abcd") == 4


def assert_(true: bool) -> None:
    assert true


def test_what_a_namespace_is_to_forget_is_in_no_file(tmp_path: Path) -> None:
    saved(tmp_path, "abcd")
    with server(tmp_path) as world:
        answers: list[object] = []
        world.disk.erase(Forgetting(None), (), answers.append)
        until(lambda: bool(answers), world.disk.poll)
        assert serve(world, "abcd") == 0
    assert not part_files(tmp_path)


def test_a_remote_store_behind_the_disk_has_ends_as_well(tmp_path: Path) -> None:
    """The disk is new; the end comes from the remote store."""
    blocks, parts = FakeStore(), FakeStore()
    for turn, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        folder.mkdir()
        with both(folder, blocks, parts) as world:
            if not turn:
                world.end("abcd")
                settle(world)
            else:
                assert serve(world, "abcde") == 4
                assert world.below.counters["remote_loaded_end_parts"] == 2
    assert len(parts.values) == 2


@contextmanager
def both(folder: Path, blocks: FakeStore, parts: FakeStore) -> Iterator[EndsWorld]:
    counts = Counter[str]()
    name = WINDOW.fingerprint(FINGERPRINT)
    near = open_store(folder, fingerprint=FINGERPRINT)
    near_parts = open_store(folder, layout=WINDOW, fingerprint=name)
    pool = HostPool(LAYOUT, SLOTS)

    def remote(kept: FakeStore, own: object, model: StoredModel) -> KnownBlocks:
        frames = Frames(model.header_bytes, model.block_bytes)
        return KnownBlocks(RemoteStore(FakeBackend(kept, frames), frames, own, model, counts))

    world = EndsWorld(
        WINDOW,
        SLOTS,
        blocks_io=Chain(
            KnownBlocks(DiskThreads(near, pool, counts)), remote(blocks, pool, near.model)
        ),
        parts_io=lambda own: Chain(
            KnownBlocks(DiskThreads(near_parts, own, counts)), remote(parts, own, near_parts.model)
        ),
    )
    try:
        yield world
    finally:
        world.disk.close()
