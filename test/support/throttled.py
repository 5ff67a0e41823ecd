"""A lane whose source delivers so many bytes a second: a token bucket in front of real copies.

The bytes are there at once, but a mark is done only when the bucket has let its bytes through, and
compute that needs them waits for it. So copies run beside the compute, as from a device of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sglang_hc.device.copy_stream import HostLane


class BucketMark:
    """Done when the bucket has let everything before it through."""

    def __init__(self, lane: ThrottledLane, at: float) -> None:
        self._lane, self._at = lane, at

    def done(self) -> bool:
        return self._lane.clock() >= self._at

    def wait(self) -> None:
        late = self._at - self._lane.clock()
        if late > 0:
            self._lane.sleep(late)


class ThrottledLane(HostLane):
    """`bytes_per_s` on `clock`; `sleep` passes time on it."""

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

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(target, source)
        self._free = max(self._free, self.clock()) + source.numel() / self.bytes_per_s

    def mark(self) -> BucketMark:  # type: ignore[override]
        return BucketMark(self, self._free)

    def before_compute(self, mark: BucketMark) -> None:  # type: ignore[override]
        mark.wait()
