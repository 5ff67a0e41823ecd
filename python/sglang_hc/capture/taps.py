"""The tap: hidden states at the input of each fused QKV projection, left in one static buffer.

The copy is a part of the forward pass and goes to a fixed address, so a CUDA graph records and
replays it. A hook that only kept a reference would run once, while the graph is captured, and would
serve stale states from then on. On a GPU the copy runs beside the projection, with which it shares
its input, and ends before the work behind the projection begins, so the input cannot be overwritten
or freed too early.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class TapBuffer:
    """(layers, rows, hidden_size) states of the last pass, in the first rows of the buffer. A pass
    with more rows than the buffer leaves its first ones."""

    def __init__(
        self,
        layers: int,
        rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        branch: SideBranch | None = None,
        first_column: int = 0,
    ) -> None:
        """branch: where the copies run; None: in line with the model. hidden_size, first_column: of
        the columns that are kept, of states that may have more."""
        self.branch = branch
        self._columns = slice(first_column, first_column + hidden_size)
        self.states = torch.empty((layers, rows, hidden_size), dtype=dtype, device=device)
        self._paused = False

    @property
    def rows(self) -> int:
        return self.states.shape[1]

    @property
    def row_bytes(self) -> int:
        """Of one row of one layer."""
        return self.states.shape[2] * self.states.element_size()

    def install(self, index: int, projection: torch.nn.Module) -> None:
        """Tap the first argument of `projection` into layer `index`. Before any graph capture."""
        target, columns, branch = self.states[index], self._columns, self.branch

        def tap(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._paused:
                return
            hidden = args[0] if args else kwargs["hidden_states"]
            count = min(hidden.shape[0], target.shape[0])
            with contextlib.nullcontext() if branch is None else branch.forked():
                target[:count].copy_(hidden[:count, columns])

        projection.register_forward_pre_hook(tap, with_kwargs=True)
        if branch is not None:
            # Called when the copy or the projection raises as well.
            projection.register_forward_hook(lambda *_: branch.join(), always_call=True)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Passes inside leave the buffer alone, because what they compute belongs to no request."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def bytes(self, rows: int) -> torch.Tensor:
        """The first `rows` rows as (layers, rows, row bytes) uint8."""
        return self.states[:, :rows].view(torch.uint8)


class SideBranch:
    """A stream that forks off the current one, for short work beside it, and joins it again.
    Belongs to one thread.

    Fork and join are two events that live as long as the branch. A CUDA graph that is captured
    around them contains the branch and replays it without Python.
    Memory that the work inside uses must not be changed or freed before the join. So the caching
    allocator need not know of this stream.
    """

    def __init__(self, streams: Any, stream: Any) -> None:
        """streams: torch's module of the device, `torch.cuda`. stream: one that no other work
        uses."""
        self.stream = stream
        self._streams = streams
        self._fork, self._end = streams.Event(), streams.Event()
        self._left = False

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """Work submitted inside runs beside the current stream, after the work that is already
        there. The branch must be joined even if an exception ends it."""
        self._fork.record(self._streams.current_stream())
        self.stream.wait_event(self._fork)
        self._left = True
        with self._streams.stream(self.stream):
            yield

    def join(self) -> None:
        """The current stream waits for the branch. Nothing happens without a fork before."""
        if not self._left:
            return
        self._left = False
        self._end.record(self.stream)
        self._streams.current_stream().wait_event(self._end)
