"""Copy streams of the tests. Each says when its copies happen; `FakeCopyStream` is shared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sglang_hc.device.copy_stream import SideStream
from sglang_hc.device.cuda_copies import Ranges, each_range


class FakeCopyStream:
    """Ranges are copied one by one; there is no side stream; nothing needs pinning."""

    beside_compute = batches = True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        raise NotImplementedError

    def copy_ranges(self, target: torch.Tensor, source: torch.Tensor, ranges: Ranges) -> None:
        for into, out_of in each_range(target, source, ranges):
            self.copy(into, out_of)

    def side_stream(self) -> SideStream | None:
        return None

    def pin(self, buffer: Any) -> None:
        return None

    def close(self) -> None:
        return None


class LateEvent:
    """Done when the copy stream got that far."""

    def __init__(self, copy_stream: LateCopyStream, at: int) -> None:
        self.copy_stream, self.at = copy_stream, at

    def done(self) -> bool:
        return self.copy_stream.performed >= self.at

    def wait(self) -> None:
        self.copy_stream.advance_to(self.at)


class LateCopyStream(FakeCopyStream):
    """Copies nothing until it has to: a missing fence leaves the target unwritten.

    The source is read at that late moment, so a buffer reused too early shows as wrong bytes. What
    the copies are to wait for, the opposite stream's, is waited for as late.
    """

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.enqueued = 0
        self.performed = 0

    def computed(self) -> LateEvent:
        return LateEvent(self, 0)  # what is computed here is computed at once

    def after(self, computed: Any) -> None:
        if computed.copy_stream is not self:
            self._enqueue(computed.wait)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._enqueue(partial(target.copy_, source))

    def _enqueue(self, work: Callable[[], object]) -> None:
        self.queue.append(work)
        self.enqueued += 1

    def record(self) -> LateEvent:
        return LateEvent(self, self.enqueued)

    def before_compute(self, event: Any) -> None:
        event.wait()

    def opposite(self) -> LateCopyStream:
        return LateCopyStream()

    def close(self) -> None:
        self.advance_to(self.enqueued)

    def advance_to(self, count: int) -> None:
        while self.performed < count:
            self.queue.popleft()()
            self.performed += 1


class OwnPaceStream(LateCopyStream):
    """Copies go on when the test says so; those the other way have a stream of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.other: OwnPaceStream | None = None

    def opposite(self) -> OwnPaceStream:
        self.other = self.other or OwnPaceStream()
        return self.other

    def go_on(self, copies: int) -> None:
        self.advance_to(min(self.enqueued, self.performed + copies))
