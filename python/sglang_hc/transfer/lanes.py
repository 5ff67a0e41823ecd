"""Ordered copies beside the computation, and when they are done: one small class per device.

A lane is a queue of copies that runs beside the compute stream. Fences order the two; marks tell
the host when everything enqueued before them has happened. Marks are real flags: torch's CPU events
always answer "done", which would hide every ordering mistake from tests.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in a lane."""

    def done(self) -> bool:
        """Everything enqueued before the mark has happened. Never waits."""

    def wait(self) -> None:
        """Block the host until `done`."""


class Lane(Protocol):
    """A queue of copies. All methods belong to one thread and return at once."""

    def after_compute(self) -> None:
        """Copies enqueued from now on start after the compute work submitted so far."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` into `target`; both keep their bytes until a later mark is done."""

    def mark(self) -> Mark: ...

    def before_compute(self, mark: Mark) -> None:
        """Compute work submitted from now on starts after `mark`."""

    def pin(self, buffer: Any) -> None:
        """Make host memory (any object with the buffer protocol) fit for copies beside compute."""


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class HostLane:
    """Lane of a machine without an accelerator: every copy happens at once."""

    _mark = _Done()

    def after_compute(self) -> None:
        return None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Mark:
        return self._mark

    def before_compute(self, mark: Mark) -> None:
        return None

    def pin(self, buffer: Any) -> None:
        return None


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaLane:
    """Lane on its own CUDA stream. "Compute" is the stream current at the time of the call."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._pinned: list[Any] = []

    def after_compute(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:  # the allocator must not reuse it before this stream is through
                tensor.record_stream(self._stream)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaMark(event)

    def before_compute(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        torch.cuda.current_stream().wait_event(mark.event)

    def pin(self, buffer: Any) -> None:
        """Register host memory with CUDA. Raises RuntimeError when the driver refuses."""
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister of {tensor.numel()} bytes: {status}")
        self._pinned.append(tensor)


def lane_for(device: torch.device) -> Lane:
    """The lane of a device: CUDA stream, or at once on a CPU."""
    return CudaLane(device) if device.type == "cuda" else HostLane()
