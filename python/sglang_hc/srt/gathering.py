"""Ways from the KV pool to rows that go to the host, and the choice between them at start.

`torch` launches one `index_select` per layer and part of a row. Where the package
sglang_hc_kernels is installed, `kernel` launches one kernel per part for all layers: the addresses
of the layers' buffers lie in a table on the device, which is made once, and where the rows go is
one tensor, whose address is handed over. On a GPU the second way is used where it reads the same
bytes and is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sglang_hc.capture.direct import DeviceRing, tensors_of
from sglang_hc.device import autotune
from sglang_hc.device.autotune import Seconds, bytes_differ, seconds_on
from sglang_hc.device.gather_scatter import PoolRows, gather
from sglang_hc.srt.kv_pool import Gather, KvPoolRows
from sglang_hc.srt.model.projection import installed_kernels, unused_slots

CHECKED_ROWS = 48
TIMED_ROWS = 1024
"""Rows of the timed gathering, as far as a piece of the ring holds them."""

WRITTEN = 59
"""Checked rows have bytes up to this one: finite numbers in every format that a pool may have,
because an attention kernel may multiply by rows that it masks."""


class KernelGather:
    """One launch per part of a KV row, for all layers of one pool."""

    def __init__(self, kernels: Any) -> None:
        """kernels: the package sglang_hc_kernels."""
        self._kernels = kernels
        self._tables: dict[tuple[int, ...], list[Any]] = {}

    def __call__(
        self, pool: PoolRows, layers: Sequence[int], slots: torch.Tensor,
        targets: list[torch.Tensor], at: int,
    ) -> None:  # fmt: skip
        """As `DevicePool.gather`. The first call for some layers copies to the device and waits;
        `choose` makes it, before the first request."""
        for table, target in zip(self._tables_of(pool, tuple(layers)), targets, strict=True):
            self._kernels.gather_rows(table, slots, target[:, at:])

    def _tables_of(self, pool: PoolRows, layers: tuple[int, ...]) -> list[Any]:
        """Per part, the addresses of its buffers in these layers."""
        if layers not in self._tables:
            parts = zip(*(pool.rows(layer) for layer in layers), strict=True)
            self._tables[layers] = [self._kernels.PointerTable(part) for part in parts]
        return self._tables[layers]


def gathers(kernels: Any) -> dict[str, Gather]:
    """The ways there are. kernels: None where they are not installed."""
    ways: dict[str, Gather] = {"torch": gather}
    if kernels is not None:
        ways["kernel"] = KernelGather(kernels)
    return ways


def fastest_gather(
    pool: KvPoolRows, layers: Sequence[int], allocator: Any, ring: DeviceRing
) -> Gather:
    """The way for this model on this GPU; before any request, when nobody uses a slot or the ring.

    layers: those whose KV is saved, at least one.
    """
    ways = gathers(installed_kernels())
    with unused_slots(allocator, TIMED_ROWS) as slots:
        return ways[choose(pool, layers, ways, slots, ring, seconds_on(pool.device))]


def choose(
    pool: KvPoolRows, layers: Sequence[int], ways: Mapping[str, Gather], slots: torch.Tensor,
    ring: DeviceRing, seconds: Seconds,
) -> str:  # fmt: skip
    """Name of the fastest way that reads what the first way reads, in pieces as they are served.

    slots: (n,) int64 device slots that nobody uses; they are written.
    """
    slots = slots[: ring.rows(len(layers) * sum(pool.part_bytes))]
    checked = slots[:CHECKED_ROWS]
    _fill(pool, layers, checked)
    check, timed = (_targets(pool, layers, len(some), ring) for some in (checked, slots))

    def read(way: Gather) -> torch.Tensor:
        return _read(pool, way, layers, checked, check)

    def work(way: Gather) -> None:
        way(pool, layers, slots, timed, 0)

    return autotune.choose("KV rows from the pool", ways, read, bytes_differ, work, seconds)


def _fill(pool: KvPoolRows, layers: Sequence[int], slots: torch.Tensor) -> None:
    """Bytes that differ from row to row and from layer to layer."""
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        for part in pool.rows(layer):
            shape = slots.numel(), part.shape[1]
            values = torch.randint(0, WRITTEN + 1, shape, generator=generator, dtype=torch.uint8)
            part[slots] = values.to(part.device)


def _targets(
    pool: KvPoolRows, layers: Sequence[int], rows: int, ring: DeviceRing
) -> list[torch.Tensor]:
    """Where a piece of so many rows lies in the ring."""
    return tensors_of(ring.memory, [(len(layers), rows, width) for width in pool.part_bytes])


def _read(
    pool: KvPoolRows, way: Gather, layers: Sequence[int], slots: torch.Tensor,
    targets: list[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """What one way reads, as bytes, into memory that held something else before."""
    for target in targets:
        target.fill_(WRITTEN + 1)
    # The first row alone, then the others behind it: a piece need not begin where its memory does.
    way(pool, layers, slots[:1], targets, 0)
    way(pool, layers, slots[1:], targets, 1)
    return torch.cat([target.flatten() for target in targets])
