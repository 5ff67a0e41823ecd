"""Short work beside the current stream, which the stream waits for a little later.

A fork and a join by two events that live as long as the branch: a CUDA graph that is captured
between them holds the branch too, and replays it without Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class SideBranch:
    """One stream that leaves the current one and comes back to it. Belongs to one thread.

    What the work inside reads and writes must neither be changed nor freed before the join. So the
    caching allocator need not be told of this stream.
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
        """Work submitted inside runs beside the current stream, after what that stream has so far.

        Left by an exception too, the branch is to be joined.
        """
        self._fork.record(self._streams.current_stream())
        self.stream.wait_event(self._fork)
        self._left = True
        with self._streams.stream(self.stream):
            yield

    def join(self) -> None:
        """The current stream goes on behind the branch. Without a fork before, nothing happens."""
        if not self._left:
            return
        self._left = False
        self._end.record(self.stream)
        self._streams.current_stream().wait_event(self._end)
