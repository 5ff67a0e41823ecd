"""Copies from a source of limited bandwidth: a token bucket before real copies.

The bytes are there at once, but an event is done only when the bucket has let its bytes through,
and compute that needs them waits for it. So copies run beside the compute, as from a device of its
own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sglang_hc.device.copy_stream import HostCopyStream
from sglang_hc.store.scatter_queue import Event


class BucketEvent:
    """Done when the bucket has let everything before it through."""

    def __init__(self, copy_stream: ThrottledCopyStream, at: float) -> None:
        self._copy_stream, self._at = copy_stream, at

    def done(self) -> bool:
        return self._copy_stream.clock() >= self._at

    def wait(self) -> None:
        late = self._at - self._copy_stream.clock()
        if late > 0:
            self._copy_stream.sleep(late)


class ThrottledCopyStream(HostCopyStream):
    """`bytes_per_s` on `clock`; `sleep` passes time on it."""

    beside_compute = True

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.clock = clock
        self.sleep = sleep
        self._free = 0.0
        self._opposite: ThrottledCopyStream | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        begin = max(self._free, self.clock())  # the bytes pass while the CPU copies them
        super().copy(target, source)
        self._free = begin + source.numel() / self.bytes_per_s

    def record(self) -> Event:
        return BucketEvent(self, self._free)

    def before_compute(self, event: Event) -> None:
        event.wait()

    def opposite(self) -> ThrottledCopyStream:
        """The other direction is as fast, and free."""
        if self._opposite is None:
            self._opposite = ThrottledCopyStream(self.bytes_per_s, self.clock, self.sleep)
            self._opposite._opposite = self
        return self._opposite
