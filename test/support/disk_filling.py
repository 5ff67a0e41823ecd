"""Stores that are filled path by path, and what is left of them."""

from __future__ import annotations

from sglang_hc.store.disk import DiskStore
from sglang_hc.store.outcome import Outcome
from support.clock import Clock
from support.disk_store import make_path, names_of, put

START = 1_700_000_000.0


def names(seed: int, count: int = 8) -> list[bytes]:
    return names_of(make_path(count, seed=seed))


def left(store: DiskStore, count: int = 8) -> list[int]:
    """Seeds, below 40, of which all blocks are there."""
    return [seed for seed in range(40) if store.contains(names(seed, count)) == count]


def fill(store: DiskStore, seeds: range, clock: Clock, pause: float = 60) -> None:
    for seed in seeds:
        clock.now += pause
        assert put(store, make_path(8, seed=seed)) == [Outcome.OK] * 8
