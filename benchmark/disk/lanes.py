"""A backend that bounds how many requests are under way in each directory, as fio's jobs do."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from sglang_hc.store.disk.backend import DirectBackend, DirectFile

Call = Callable[[Sequence[memoryview], int], int | None]
Answer = SimpleQueue[int | OSError | None]


class Request(NamedTuple):
    """A read or write, and where its result or the error it raised is waited for."""

    call: Call
    buffers: Sequence[memoryview]
    offset: int
    answer: Answer


class Lanes(DirectBackend):
    """The real disk with at most `depth` reads and writes under way in each directory, each on a
    thread of its own; what is asked beyond them waits. `close` ends the threads.

    times: seconds that each request took, for whoever empties it.

    Bare queues: an executor's futures leave the disk idle for 20 us after each request.
    """

    def __init__(self, depth: int) -> None:
        super().__init__(direct=True)
        self._depth = depth
        self._lanes: dict[str, SimpleQueue[Request | None]] = {}
        self.times: deque[float] = deque()

    def open(self, path: str, create: bool = False) -> DirectFile:
        folder = os.path.dirname(path)
        if folder not in self._lanes:
            self._lanes[folder] = SimpleQueue()
            for _ in range(self._depth):
                lane = threading.Thread(target=self._serve, args=(self._lanes[folder],))
                lane.start()
        opened = super().open(path, create)
        assert isinstance(opened, DirectFile)
        return _LaneFile(opened, self._lanes[folder])

    def close(self) -> None:
        for lane in self._lanes.values():
            for _ in range(self._depth):
                lane.put(None)

    def _serve(self, lane: SimpleQueue[Request | None]) -> None:
        while (request := lane.get()) is not None:
            started = time.perf_counter()
            result = _result(request)
            self.times.append(time.perf_counter() - started)
            request.answer.put(result)


class _LaneFile(DirectFile):
    """A file whose reads and writes wait for a lane."""

    def __init__(self, file: DirectFile, lane: SimpleQueue[Request | None]) -> None:
        super().__init__(file._descriptor)
        self._lane = lane

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        return self._in_lane(super().read, buffers, offset) or 0

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._in_lane(super().write, buffers, offset)

    def _in_lane(self, call: Call, buffers: Sequence[memoryview], offset: int) -> int | None:
        answer: Answer = SimpleQueue()
        self._lane.put(Request(call, buffers, offset, answer))
        result = answer.get()
        if isinstance(result, OSError):
            raise result
        return result


def _result(request: Request) -> int | OSError | None:
    try:
        return request.call(request.buffers, request.offset)
    except OSError as error:
        return error
