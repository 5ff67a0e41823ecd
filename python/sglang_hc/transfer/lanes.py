"""Ordered copies beside the computation, and when they are done: one small class per device.

A lane is a queue of copies that runs beside the compute stream. Fences order the two; marks tell
the host when everything enqueued before them has happened. Marks are real flags: torch's CPU events
always answer "done", which would hide every ordering mistake from tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in a lane, or in the compute work (`Lane.computed`)."""

    def done(self) -> bool:
        """Everything enqueued before the mark has happened. Never waits."""

    def wait(self) -> None:
        """Block the host until `done`."""


Side = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which a stream beside the compute stream is "compute", for what is submitted
and for the lane's `computed` and `before_compute`."""


class Lane(Protocol):
    """A queue of copies. All methods belong to one thread and return at once."""

    own_memory: bool
    """The device has memory of its own, so what goes to the host is staged there."""

    def computed(self) -> Mark:
        """A point behind the compute work submitted so far."""

    def after(self, computed: Mark) -> None:
        """Copies enqueued from now on start after that point in the compute work."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into `target`; both live and keep their bytes until a later mark is done.

        Both uint8 and of one shape: contiguous, or (rows, bytes) with contiguous rows that lie any
        stride apart.
        """

    def mark(self) -> Mark:
        """A point behind the copies enqueued so far."""

    def before_compute(self, mark: Mark) -> None:
        """Compute work submitted from now on starts after `mark`, of copies or of other compute."""

    def side(self) -> Side | None:
        """A new stream for compute work beside the compute stream; None where nothing overlaps."""

    def pin(self, buffer: Any) -> None:
        """Make host memory (any object with the buffer protocol) fit for copies beside compute."""


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class HostLane:
    """Lane of a machine without an accelerator: every copy happens at once."""

    own_memory = False
    _mark = _Done()

    def computed(self) -> Mark:
        return self._mark

    def after(self, computed: Mark) -> None:
        return None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Mark:
        return self._mark

    def before_compute(self, mark: Mark) -> None:
        return None

    def side(self) -> Side | None:
        return None

    def pin(self, buffer: Any) -> None:
        return None


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaLane:
    """Lane on its own CUDA stream. "Compute" is the stream current at the time of the call.

    Buffers must outlive their copies: the caching allocator is told nothing of this stream.
    """

    own_memory = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._pinned: list[Any] = []
        self._runtime = cuda_runtime()

    def computed(self) -> Mark:
        return _CudaMark(torch.cuda.current_stream())

    def after(self, computed: Mark) -> None:
        assert isinstance(computed, _CudaMark)
        self._stream.wait_event(computed.event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # torch would gather strided rows on the host first; the copy engine takes them as they are.
        if target.dim() == 2 and not (target.is_contiguous() and source.is_contiguous()):
            copy_2d(self._runtime, target, source, self._stream.cuda_stream)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return _CudaMark(self._stream)

    def before_compute(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        torch.cuda.current_stream().wait_event(mark.event)

    def side(self) -> Side | None:
        return partial(torch.cuda.stream, torch.cuda.Stream(device=self._stream.device))  # type: ignore[no-untyped-call]

    def pin(self, buffer: Any) -> None:
        """Register host memory with CUDA. Raises RuntimeError when the driver refuses."""
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister of {tensor.numel()} bytes: {status}")
        self._pinned.append(tensor)


def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded. Raises OSError when torch has none."""
    major = (torch.version.cuda or "0").partition(".")[0]
    runtime = ctypes.CDLL(f"libcudart.so.{major}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    runtime.cudaMemcpy2DAsync.argtypes = [
        pointer, size, pointer, size, size, size, ctypes.c_int, pointer
    ]  # fmt: skip
    return runtime


MEMCPY_DEFAULT = 4
"""cudaMemcpyDefault: the direction follows from the addresses."""


def copy_2d(runtime: ctypes.CDLL, target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
    """Enqueue a copy of (rows, bytes) uint8 with contiguous rows on a CUDA stream handle.

    Host memory must be pinned, or the call waits for the copy. Raises RuntimeError.
    """
    rows, width = source.shape
    if source.stride(1) != 1 or target.stride(1) != 1 or target.shape != source.shape:
        raise ValueError("a copy of rows needs contiguous rows and one shape on both sides")
    status = runtime.cudaMemcpy2DAsync(
        target.data_ptr(), target.stride(0), source.data_ptr(), source.stride(0),
        width, rows, MEMCPY_DEFAULT, stream,
    )  # fmt: skip
    if status != 0:
        raise RuntimeError(
            f"cudaMemcpy2DAsync of {rows} rows of {width} bytes: CUDA error {status}"
        )


def lane_for(device: torch.device) -> Lane:
    """The lane of a device: CUDA stream, or at once on a CPU."""
    return CudaLane(device) if device.type == "cuda" else HostLane()
