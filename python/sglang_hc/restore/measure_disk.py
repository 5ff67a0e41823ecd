"""How long blocks take from the disk tier's directories, read by the store itself."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout
from sglang_hc.store.block import Block
from sglang_hc.store.disk import DirectorySpec, DiskStore, StoredModel, Upkeep
from sglang_hc.store.disk.reader import Read
from sglang_hc.store.disk.threads import READ_THREADS
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome

ROUNDS = 3
"""Reads of each size; their median counts."""

MOST_BYTES = 1 << 30
"""Memory for the blocks of one size. A size that needs more is left out, but not the first two."""


def disk_samples(
    disks: Sequence[str],
    layout: BlockLayout,
    tokens: Sequence[int],
    budget_s: float,
    clock: Callable[[], float],
) -> tuple[list[tuple[int, float]], float]:
    """(tokens, seconds to read all stored layers of so many tokens into host slots), and the
    `spread` of the repeats.

    The blocks are first written into scratch folders in the `--hc-disk` directories, which are
    removed again. Sizes whose blocks need more than MOST_BYTES, or could not be written in half of
    the budget or for want of room, are left out, except the first two. Reads bypass the page cache
    where the file system allows it. Raises DirectoryError and OSError.
    """
    every = [(n, -(-n // BLOCK_TOKENS)) for n in sorted(tokens)]
    sizes = every[:2] + [s for s in every[2:] if s[1] * layout.slot_bytes <= MOST_BYTES]
    folders: list[str] = []
    try:
        for disk in disks:
            path = DirectorySpec.parse(disk).path
            os.makedirs(path, mode=0o700, exist_ok=True)
            folders.append(tempfile.mkdtemp(prefix="profile-", dir=path))
        # Headers too, and all of them in one of several folders.
        size = 4 * sizes[-1][1] * layout.slot_bytes
        specs = [DirectorySpec(folder, size) for folder in folders]
        model = StoredModel.of(layout.chunks(), layout.fingerprint("profile"), "profile")
        store = DiskStore.open(specs, model, Upkeep(background=False))
        try:
            pool = HostPool(layout, sizes[-1][1])
            needed = sizes[min(1, len(sizes) - 1)][1]
            written = _write(store, pool, needed, budget_s / 2, clock)
            return _read(store, pool, [s for s in sizes if s[1] <= written], len(disks), clock)
        finally:
            store.close()
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def spread(repeats: Sequence[Sequence[float]]) -> float:
    """How much repeats differ: median over minimum of each measurement, and the median of these; 1
    where nothing was repeated or took no time. A single slow repeat changes neither median."""
    return statistics.median(
        statistics.median(times) / min(times) if min(times) > 0 else 1.0 for times in repeats
    )


def _write(
    store: DiskStore, pool: HostPool, least: int, budget_s: float, clock: Callable[[], float]
) -> int:
    """Write blocks 0, 1, ...; returns how many. Raises OSError if it is fewer than `least`."""
    began = clock()
    for index in range(pool.num_slots):
        if index >= least and clock() - began > budget_s:
            return index
        outcome = store.write(_block(index), pool.view(index))
        if outcome is not Outcome.OK:
            if index >= least:  # a disk that is nearly full
                return index
            raise OSError(f"a block could not be written: {outcome}")
    return pool.num_slots


def _read(
    store: DiskStore,
    pool: HostPool,
    sizes: Sequence[tuple[int, int]],
    directories: int,
    clock: Callable[[], float],
) -> tuple[list[tuple[int, float]], float]:
    def fetch(index: int) -> Outcome:
        return store.read(Read(_identity(index + 1), pool.view(index)))

    samples, repeats = [], []
    with ThreadPoolExecutor(READ_THREADS * directories) as readers:
        for tokens, blocks in sizes:
            times = []
            for _ in range(ROUNDS):
                began = clock()
                statuses = list(readers.map(fetch, range(blocks)))
                times.append(clock() - began)
                if any(status is not Outcome.OK for status in statuses):
                    raise OSError(f"blocks could not be read: {statuses}")
            samples.append((tokens, statistics.median(times)))
            repeats.append(times)
    return samples, spread(repeats)


def _identity(index: int) -> bytes:
    return index.to_bytes(16, "big")


def _block(index: int) -> Block:
    return Block(_identity(index + 1), _identity(index), "", index, bytes(4 * BLOCK_TOKENS))
