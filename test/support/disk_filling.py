"""Stores that are filled path by path, and what is left of them."""

from __future__ import annotations

from sglang_hc.store.disk import DiskStore
from sglang_hc.store.outcome import Outcome
from support.clock import Clock
from support.disk_store import FINGERPRINT, make_path, put

START = 1_700_000_000.0


def names(seed: int, count: int = 8, fingerprint: bytes = FINGERPRINT) -> list[bytes]:
    return [block.block_id for block in make_path(count, seed=seed, fingerprint=fingerprint)]


def left(store: DiskStore, count: int = 8, seeds: int = 40) -> list[int]:
    """Seeds of which all blocks are there."""
    model = store.model.fingerprint
    return [seed for seed in range(seeds) if store.contains(names(seed, count, model)) == count]


def fill(store: DiskStore, seeds: range, clock: Clock, pause: float = 60) -> None:
    for seed in seeds:
        clock.now += pause
        blocks = make_path(8, seed=seed, fingerprint=store.model.fingerprint)
        assert put(store, blocks) == [Outcome.OK] * 8
