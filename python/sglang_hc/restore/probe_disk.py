"""How long blocks take from the disk tier's directories, read by the store itself."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from tempfile import TemporaryDirectory

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout
from sglang_hc.store.block import Block
from sglang_hc.store.disk import DirectorySpec, DiskStore, StoredModel, Upkeep
from sglang_hc.store.disk.threads import READ_THREADS
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome

ROUNDS = 3
"""Reads of each size; their median counts."""

BLOCKS = 16
"""Most blocks that are read at once."""

MOST_BYTES = 1 << 29
"""Memory for them; but at least two blocks."""

WRITE_S = 2.0
"""When writing has taken so long, fewer blocks are read; but at least two."""


def read_seconds(
    disks: Sequence[str], layout: BlockLayout, clock: Callable[[], float]
) -> list[tuple[int, float]]:
    """(blocks, seconds to read so many blocks at once into host slots) of one and of many.

    The blocks are first written into scratch folders in the `--hc-disk` directories, which are
    removed again. Reads bypass the page cache where the file system allows it. Raises
    DirectoryError and OSError, also where there is no room for two blocks.
    """
    with ExitStack() as used:
        folders = []
        for disk in disks:
            path = DirectorySpec.parse(disk).path
            os.makedirs(path, mode=0o700, exist_ok=True)
            scratch = TemporaryDirectory(prefix="profile-", dir=path, ignore_cleanup_errors=True)
            folders.append(used.enter_context(scratch))
        blocks = max(2, min(BLOCKS, MOST_BYTES // layout.slot_bytes))
        # Headers too, and all of them in one of several folders.
        specs = [DirectorySpec(folder, 4 * blocks * layout.slot_bytes) for folder in folders]
        model = StoredModel.of(layout.chunks(), layout.fingerprint("profile"), "profile")
        store = DiskStore.open(specs, model, Upkeep(background=False))
        used.callback(store.close)
        readers = used.enter_context(ThreadPoolExecutor(READ_THREADS * len(disks)))
        pool = HostPool(layout, blocks)
        written = _write(store, pool, clock)
        return [(n, _read(store, pool, n, readers, clock)) for n in (1, written)]


def _write(store: DiskStore, pool: HostPool, clock: Callable[[], float]) -> int:
    """Write blocks 0, 1, ...; returns how many. Raises OSError if it is less than two."""
    began = clock()
    for index in range(pool.num_slots):
        if index >= 2 and clock() - began > WRITE_S:
            return index
        outcome = store.write(_block(index), pool.view(index))
        if outcome is not Outcome.OK:
            if index >= 2:  # a disk that is nearly full
                return index
            raise OSError(f"a block could not be written: {outcome}")
    return pool.num_slots


def _read(
    store: DiskStore,
    pool: HostPool,
    blocks: int,
    readers: ThreadPoolExecutor,
    clock: Callable[[], float],
) -> float:
    def fetch(index: int) -> Outcome:
        return store.read(_identity(index + 1), pool.view(index))

    times = []
    for _ in range(ROUNDS):
        began = clock()
        statuses = list(readers.map(fetch, range(blocks)))
        times.append(clock() - began)
        if any(status is not Outcome.OK for status in statuses):
            raise OSError(f"blocks could not be read: {statuses}")
    return statistics.median(times)


def _identity(index: int) -> bytes:
    return index.to_bytes(16, "big")


def _block(index: int) -> Block:
    return Block(_identity(index + 1), _identity(index), "", index, bytes(4 * BLOCK_TOKENS))
