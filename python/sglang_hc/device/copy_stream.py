"""Ordered copies beside the computation, and when they are done: one small class per device.

A copy stream is a queue of copies that runs beside the compute stream. Fences order the two. Events
tell the host when all work before them is done. They are classes of our own, because torch's CPU
events always answer "done", which would hide every mistake in the order from tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from sglang_hc.device.cuda_copies import (
    BATCHED,
    Ranges,
    chosen_copies,
    copy_2d,
    cuda_runtime,
    each_range,
)
from sglang_hc.device.pinning import PinnedMemory
from sglang_hc.store.scatter_queue import Event

SideStream = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which a stream beside the compute stream takes the place of "compute": for the
work submitted inside, and for the copy stream's `computed` and `before_compute`."""


class CopyStream(Protocol):
    """A queue of copies. All methods belong to one thread and return at once."""

    beside_compute: bool
    """Copies run while the device computes; else each is over when its call returns."""

    batches: bool
    """`copy_ranges` takes this thread about as long as one `copy`, however many ranges it has."""

    def computed(self) -> Event:
        """A point behind the compute work submitted so far."""

    def after(self, computed: Event) -> None:
        """Copies enqueued from now on start after that point in the compute work, or in the copies
        of the opposite stream."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into `target`; both live and keep their bytes until a later event is done.

        Both are uint8 and of one shape: contiguous, or (rows, bytes) with contiguous rows at any
        stride.
        """

    def copy_ranges(self, target: torch.Tensor, source: torch.Tensor, ranges: Ranges) -> None:
        """Copy many ranges of bytes of `source` to places in `target`, as `copy` does, in no
        particular order. Both uint8 of any shape and stride; each range lies within the bytes
        from a tensor's first element to its last one."""

    def record(self) -> Event:
        """A point behind the copies enqueued so far."""

    def before_compute(self, event: Event) -> None:
        """Compute work submitted from now on starts after `event`, one of copies or of compute."""

    def side_stream(self) -> SideStream | None:
        """A new stream for compute work beside the compute stream; None where nothing overlaps."""

    def opposite(self) -> CopyStream:
        """A copy stream that is not ordered with this one, for copies in the other direction, which
        a GPU makes at the same time. Where copies happen at once, it is this one."""

    def pin(self, buffer: Any) -> None:
        """Make host memory (any object with the buffer protocol) fit for copies beside compute.
        Raises ConfigError when it cannot be locked."""

    def close(self) -> None:
        """Wait for the copies and give pinned memory back. Ends the opposite copy stream too."""


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class HostCopyStream:
    """Copy stream of a machine without an accelerator: every copy happens at once."""

    beside_compute = False
    batches = True
    _event = _Done()

    def computed(self) -> Event:
        return self._event

    def after(self, computed: Event) -> None:
        return None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def copy_ranges(self, target: torch.Tensor, source: torch.Tensor, ranges: Ranges) -> None:
        for into, out_of in each_range(target, source, ranges):
            self.copy(into, out_of)

    def record(self) -> Event:
        return self._event

    def before_compute(self, event: Event) -> None:
        return None

    def side_stream(self) -> SideStream | None:
        return None

    def opposite(self) -> CopyStream:
        return self

    def pin(self, buffer: Any) -> None:
        return None

    def close(self) -> None:
        return None


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaCopyStream:
    """Copy stream on its own CUDA stream. "Compute" is the stream current at the time of the call.

    Buffers must outlive their copies, because the caching allocator does not know this stream.
    """

    beside_compute = True

    def __init__(self, shared: CudaDevice) -> None:
        self._shared = shared
        self.stream = shared.new_stream()
        self._opposite: CudaCopyStream | None = None
        name, self._copy_ranges = chosen_copies(shared.device)
        self.batches = name == BATCHED

    def computed(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream())

    def after(self, computed: Event) -> None:
        assert isinstance(computed, _CudaEvent)
        self.stream.wait_event(computed.event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # torch would gather strided rows on the host first; the copy engine takes them as they are.
        if target.dim() == 2 and not (target.is_contiguous() and source.is_contiguous()):
            copy_2d(self._shared.runtime, target, source, self.stream.cuda_stream)
            return
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def copy_ranges(self, target: torch.Tensor, source: torch.Tensor, ranges: Ranges) -> None:
        self._copy_ranges(target, source, ranges, self.stream.cuda_stream)

    def record(self) -> Event:
        return _CudaEvent(self.stream)

    def before_compute(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        torch.cuda.current_stream().wait_event(event.event)

    def side_stream(self) -> SideStream | None:
        return partial(torch.cuda.stream, self._shared.new_stream())

    def opposite(self) -> CopyStream:
        if self._opposite is None:
            self._opposite = CudaCopyStream(self._shared)
            self._opposite._opposite = self
        return self._opposite

    def pin(self, buffer: Any) -> None:
        self._shared.pinned.pin(buffer)

    def close(self) -> None:
        torch.cuda.synchronize(self._shared.device)
        self._shared.pinned.release()


class CudaDevice:
    """What the copy streams of one device share: the runtime, the pinned memory, and a list of the
    streams in use."""

    def __init__(self, device: torch.device, others: Sequence[Any]) -> None:
        """others: streams of work that is to run beside these copies."""
        self.device = device
        self.runtime = cuda_runtime()
        self.pinned = PinnedMemory(self.runtime)
        self._streams = list(others)

    def new_stream(self) -> Any:
        """A stream that nobody else uses. Raises RuntimeError when there is none left."""
        stream = distinct_stream(partial(torch.cuda.Stream, device=self.device), self._streams)
        self._streams.append(stream)
        return stream


DRAWS = 64
"""torch hands out 32 streams of a device in turn, so after 64 draws each came up twice."""


def distinct_stream(draw: Callable[[], Any], taken: Sequence[Any]) -> Any:
    """A stream whose handle none of `taken` has. RuntimeError after `DRAWS` draws.

    Two torch streams may be the same CUDA stream, because torch hands out a fixed number of them in
    turn. Work on both would then run one after the other instead of side by side.
    """
    handles = {stream.cuda_stream for stream in taken}
    for _ in range(DRAWS):
        stream = draw()
        if stream.cuda_stream not in handles:
            return stream
    raise RuntimeError(f"torch has no CUDA stream left beside {len(handles)} others")


def copy_stream_for(device: torch.device, others: Sequence[Any] = ()) -> CopyStream:
    """The copy stream of a device. On a CPU copies happen at once.

    others: CUDA streams beside which the copies are to run, for example the model's.
    """
    if device.type != "cuda":
        return HostCopyStream()
    return CudaCopyStream(CudaDevice(device, [torch.cuda.current_stream(device), *others]))
