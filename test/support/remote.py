"""A remote store in memory that can be told to misbehave, and what drives it in tests."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockDone, BlockIo
from sglang_hc.store.disk.format import StoredModel
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.remote import Frames, RemoteBackend, RemoteStore
from support import disk_store
from support.waiting import HANGS_S, until

LAYOUT = BlockLayout(LayerPlan(0, 1, 1), StateShape(2, 32, (16, 16), "uint8"))
FINGERPRINT = LAYOUT.fingerprint("toy")
MODEL = StoredModel.of(LAYOUT.chunks(), FINGERPRINT, "toy")
SLOTS = 12
FOREVER = 1e9


class FakeStore:
    """Envelopes in a dictionary, shared by any number of back ends."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.raises: Exception | None = None
        self.unreadable: set[str] = set()
        """A get of any of these keys raises."""
        self.unwritable: set[str] = set()
        """A put of any of these keys raises."""
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.calls: list[str] = []

    def hang(self) -> None:
        """Calls hang from now on, until `open` is set."""
        self.open.clear()
        self.entered.clear()

    def wait_for_call(self) -> None:
        """Until a call is there that came after `hang`."""
        assert self.entered.wait(HANGS_S)

    def call(self, what: str) -> None:
        """Every operation passes here: it may hang or raise."""
        self.calls.append(what)
        self.entered.set()
        assert self.open.wait(HANGS_S)
        if self.raises is not None:
            raise self.raises


class FakeBackend:
    """RemoteBackend over a FakeStore. Like SGLang's, a put of a key that is there does nothing."""

    name = "FakeBackend"

    def __init__(self, store: FakeStore, frames: Frames) -> None:
        self.store, self.frames = store, frames
        self.closed = False

    def exists(self, keys: Sequence[str]) -> int:
        self.store.call("exists")
        for count, key in enumerate(keys):
            if key not in self.store.values:
                return count
        return len(keys)

    def get(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
        self.store.call("get")
        if self.store.unreadable.intersection(keys):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        for key, frame in zip(keys, frames, strict=True):
            value = np.frombuffer(self.store.values.get(key, b""), dtype=np.uint8)
            self.frames.bytes[frame, : len(value)] = value
        return [key in self.store.values for key in keys]

    def put(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
        self.store.call("put")
        if self.store.unwritable.intersection(keys):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for key, frame in zip(keys, frames, strict=True):
            self.store.values.setdefault(key, self.frames.bytes[frame].tobytes())
        return [True] * len(keys)

    def delete(self, keys: Sequence[str]) -> bool:
        for key in keys:
            self.store.values.pop(key, None)
        return True

    def clear(self) -> None:
        self.store.call("clear")
        self.store.values.clear()

    def close(self) -> None:
        self.closed = True


def make_pool() -> HostPool:
    return HostPool(LAYOUT, SLOTS)


def make_blocks(
    store: FakeStore,
    pool: HostPool,
    clock: Callable[[], float] = time.monotonic,
    model: StoredModel = MODEL,
    backend: type[FakeBackend] = FakeBackend,
) -> KnownBlocks:
    frames = frames_of(model)
    return blocks_over(backend(store, frames), frames, pool, model, clock)


def frames_of(model: StoredModel = MODEL) -> Frames:
    return Frames(model.header_bytes, model.block_bytes)


def blocks_over(
    backend: RemoteBackend,
    frames: Frames,
    pool: HostPool,
    model: StoredModel = MODEL,
    clock: Callable[[], float] = time.monotonic,
) -> KnownBlocks:
    """Blocks in the store behind a back end, as one server without ranks has them."""
    return KnownBlocks(RemoteStore(backend, frames, pool, model, Counter(), clock), clock)


make_path = partial(disk_store.make_path, fingerprint=FINGERPRINT)
data_of = partial(disk_store.data_of, size=LAYOUT.slot_bytes)


def wait(io: BlockIo, count: int) -> list[BlockDone]:
    """The next `count` answers."""
    done: list[BlockDone] = []
    until(lambda: len(done) >= count, lambda: done.extend(io.poll()))
    return done


def save(io: BlockIo, pool: HostPool, blocks: Sequence[Block]) -> list:
    """Write blocks from the first slots; their outcomes."""
    for slot, block in enumerate(blocks):
        pool.slot(slot)[:] = data_of(block.block_id)
        io.write(slot, block, slot, FOREVER)
    return [done.outcome for done in wait(io, len(blocks))]


def find(io: BlockIo, names: Sequence[bytes]) -> int:
    """What a lookup says once it is through."""
    until(lambda: not io.ask(names), io.poll)
    return io.contains(names)


TICKETS = itertools.count(1)
TARGET = SLOTS - 1
"""A slot that `save` does not use."""


def load(io: KnownBlocks, name: bytes) -> Outcome:
    """Read a block into TARGET."""
    ticket = next(TICKETS)
    io.read(ticket, name, TARGET, FOREVER)
    done = wait(io, 1)[0]
    assert (done.ticket, done.tier) == (ticket, "remote")
    return done.outcome


def read_in_one_call(io: BlockIo, store: FakeStore, path: Sequence[Block]) -> None:
    """Read blocks into the first slots. They are asked for while another read hangs, of the first
    of them, whose ticket is their number; so one call reads them, if it may be as large."""
    store.hang()
    io.read(len(path), path[0].block_id, TARGET, FOREVER)
    store.wait_for_call()
    for slot, block in enumerate(path):
        io.read(slot, block.block_id, slot, FOREVER)
    store.open.set()


def write_in_one_call(
    io: BlockIo, store: FakeStore, first: Block, path: Sequence[Block], deadline: float = FOREVER
) -> None:
    """Write blocks from the first slots, as `read_in_one_call` reads them: while a write of `first`
    hangs, whose ticket is their number."""
    store.hang()
    io.write(len(path), first, TARGET, FOREVER)
    store.wait_for_call()
    for slot, block in enumerate(path):
        io.write(slot, block, slot, deadline)
    store.open.set()


def check_round_trip(backend: RemoteBackend, frames: Frames, seed: int = 0) -> None:
    """Blocks written through one set of frames are found and read."""
    pool = make_pool()
    io = blocks_over(backend, frames, pool)
    path = make_path(5, seed=seed)
    assert save(io, pool, path) == [Outcome.OK] * 5
    names = [block.block_id for block in path]
    fresh = blocks_over(backend, frames, pool)
    assert find(fresh, names) == 5
    for slot, name in enumerate(names, start=5):
        fresh.read(slot, name, slot, FOREVER)
    assert [done.outcome for done in wait(fresh, 5)] == [Outcome.OK] * 5
    for slot, name in enumerate(names, start=5):
        assert np.array_equal(pool.slot(slot), data_of(name))
    assert find(fresh, [bytes(16)]) == 0
    io.close()
    fresh.close()
