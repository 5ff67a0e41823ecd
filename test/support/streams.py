"""A device whose computation and copies happen later, in any order that the fences allow.

`LateCopyStream` (support/copy_streams.py) computes at once and so cannot show a copy that
overwrites what the computation has yet to read. Here all queues are late: work is a closure that
runs when the device gets to it, and a seed decides which queue moves. What the computation saw is
the truth of a test.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sglang_hc.device.copy_stream import SideStream
from sglang_hc.device.cuda_copies import Ranges, each_range
from support.copy_streams import FakeCopyStream
from support.tiers import ToyPool

COMPUTE, COPIES, SIDE, BACK = 0, 1, 2, 3


@dataclass
class _Queue:
    """(work, (queue, count) it waits for or None) in order, and how many are over."""

    waiting: deque[tuple[Callable[[], object] | None, tuple[int, int] | None]] = field(
        default_factory=deque
    )
    submitted: int = 0
    over: int = 0


class StreamEvent:
    """Over when its queue got that far."""

    def __init__(self, device: StreamDevice, queue: int) -> None:
        self.device, self.queue = device, queue
        self.at = device.queues[queue].submitted

    def done(self) -> bool:
        return self.device.queues[self.queue].over >= self.at

    def wait(self) -> None:
        while not self.done():
            self.device.step()


class StreamDevice:
    """Four queues: the computation, one beside it, and copies either way.

    bias: weighs the computation when others can move too.

    current: the queue that is "compute" now, as the current stream is on a GPU.
    """

    def __init__(self, seed: int, bias: float = 0.5) -> None:
        self.queues = (_Queue(), _Queue(), _Queue(), _Queue())
        self.current = COMPUTE
        self._random = random.Random(seed)
        self._bias = bias

    def submit(
        self, queue: int, work: Callable[[], object] | None, after: tuple[int, int] | None = None
    ) -> None:
        self.queues[queue].waiting.append((work, after))
        self.queues[queue].submitted += 1

    def step(self) -> None:
        """One piece of work of any queue, if any. AssertionError: the fences form a ring."""
        if not any(queue.waiting for queue in self.queues):
            return
        able = [queue for queue in (COMPUTE, COPIES, SIDE, BACK) if self._able(queue)]
        assert able, "nothing can move: the fences wait for each other, or for nothing submitted"
        weights = [self._bias if queue == COMPUTE else 1 - self._bias for queue in able]
        self._move(self._random.choices(able, weights)[0])

    def run(self) -> None:
        while any(queue.waiting for queue in self.queues):
            self.step()

    def run_only(self, queue: int) -> bool:
        """One queue, as far as it gets while the other stands still. True: it got to its end."""
        while self._able(queue):
            self._move(queue)
        return not self.queues[queue].waiting

    def _move(self, queue: int) -> None:
        work, _ = self.queues[queue].waiting.popleft()
        if work is not None:
            work()
        self.queues[queue].over += 1

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.current = SIDE
        try:
            yield
        finally:
            self.current = COMPUTE

    def _able(self, queue: int) -> bool:
        if not self.queues[queue].waiting:
            return False
        after = self.queues[queue].waiting[0][1]
        return after is None or self.queues[after[0]].over >= after[1]


class SimulatedCopyStream(FakeCopyStream):
    """The device's copies in one direction. `calls` counts what was asked to be copied, `targets`
    are the addresses of the memory it was copied to."""

    def __init__(self, device: StreamDevice, queue: int = COPIES) -> None:
        self._device = device
        self._queue = queue
        self.calls = 0
        self.targets: set[int] = set()

    def computed(self) -> StreamEvent:
        return StreamEvent(self._device, self._device.current)

    def after(self, computed: Any) -> None:
        self._device.submit(self._queue, None, (computed.queue, computed.at))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape
        self._asked(target)
        self._device.submit(self._queue, lambda: target.copy_(source))

    def copy_ranges(self, target: torch.Tensor, source: torch.Tensor, ranges: Ranges) -> None:
        self._asked(target)
        for into, out_of in each_range(target, source, ranges):
            self._device.submit(self._queue, partial(into.copy_, out_of))

    def record(self) -> StreamEvent:
        return StreamEvent(self._device, self._queue)

    def before_compute(self, event: Any) -> None:
        self._device.submit(self._device.current, None, (event.queue, event.at))

    def side_stream(self) -> SideStream | None:
        return self._device.beside

    def opposite(self) -> SimulatedCopyStream:
        return SimulatedCopyStream(self._device, COPIES if self._queue == BACK else BACK)

    def close(self) -> None:
        self._device.run()

    def _asked(self, target: torch.Tensor) -> None:
        self.calls += 1
        self.targets.add(target.untyped_storage().data_ptr())


class StreamPool:
    """A toy pool whose writes are late. `seen` notes (layer, copy of its K/V) at each `attend`."""

    def __init__(self, device: StreamDevice, slots: int, layers: int) -> None:
        self.toy = ToyPool(slots, layers)
        self.seen: list[tuple[int, list[torch.Tensor]]] = []
        self._device = device

    def rows(self, layer: int) -> list[torch.Tensor]:
        return self.toy.rows(layer)

    def write_hidden(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self._device.submit(
            self._device.current, lambda: self.toy.write_hidden(layer, hidden, positions, slots)
        )

    def write_kv(self, layer: int, parts: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        self._device.submit(self._device.current, lambda: self.toy.write_kv(layer, parts, slots))

    def attend(self, layer: int) -> None:
        """What a layer's attention reads, noted when the device gets there."""
        self._device.submit(
            COMPUTE,
            lambda: self.seen.append((layer, [part.clone() for part in self.toy.rows(layer)])),
        )
