"""Short work beside the current stream, for which that stream waits a little later.

Fork and join are two events that live as long as the branch. A CUDA graph that is captured around
them contains the branch and replays it without Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class SideBranch:
    """A stream that forks off the current one and joins it again. Belongs to one thread.

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
