"""States of recurrent layers on their way from end parts to the device.

A state is needed whole before the first layer of a pass runs, because the request copies it to a
slot of its own. So it is written at admission, in the order of the compute stream.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_hc.device.copy_stream import CopyStream
from sglang_hc.ranks.agreement import ALONE, Ranks
from sglang_hc.store.host_pool import Bytes
from sglang_hc.store.scatter_queue import Event
from sglang_hc.tree.ends import EndPart, Ends


class StateSink(Protocol):
    """The device's pool of states."""

    def write(self, rows: Sequence[torch.Tensor], slot: torch.Tensor) -> None:
        """Make the state of a slot, (1,) on the device, what `rows` are: (layers, 1, part bytes)
        uint8 for each part, in host memory."""


class StateRestorer:
    """Belongs to the scheduler thread, on the compute stream."""

    def __init__(
        self,
        ends: Ends,
        rows: Sequence[Bytes],
        sink: StateSink,
        copies: CopyStream,
        counters: Counter[str],
        ranks: Ranks = ALONE,
    ) -> None:
        """rows: `EndPool.state`. copies: knows when compute work is over."""
        self._ends = ends
        self.rows = [torch.from_numpy(part) for part in rows]
        self._sink = sink
        self._copies = copies
        self._counters = counters
        self._ranks = ranks
        self._under_way: deque[tuple[Event, EndPart]] = deque()

    def restore(self, part: EndPart, slot: torch.Tensor) -> None:
        """Write the state of a ready end part to a slot, (1,) on the device, before all work that
        is submitted later. The part is pinned until it is there."""
        self._ends.pin((part,))
        try:
            self._sink.write([rows[part.slot] for rows in self.rows], slot)
        except Exception:
            self._ends.unpin((part,))
            raise
        self._ends.used(part.node)
        self._under_way.append((self._ranks.mark(self._copies.computed()), part))
        self._counters["restored_states"] += 1

    def poll(self) -> None:
        """Unpin what is on the device. Never waits."""
        while self._under_way and self._under_way[0][0].done():
            _, part = self._under_way.popleft()
            self._ends.unpin((part,))

    def clear(self) -> None:
        """Wait for what is under way."""
        while self._under_way:
            self._under_way[0][0].wait()
            self.poll()
