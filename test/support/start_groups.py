"""Ranks that start together as threads of one process: the group without a network. And what SGLang
says of a rank, which it keeps for a whole process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from sglang.srt.runtime_context import _parallel_fields

from sglang_hc.srt.binding import parallel
from sglang_hc.srt.ranks.start_group import StartGroup
from support.waiting import HANGS_S

T = TypeVar("T")

_ONE_AT_A_TIME = threading.Lock()


@contextlib.contextmanager
def as_rank(**place: Any) -> Iterator[None]:
    """Inside, SGLang says this of the rank: `tp_rank=1, tp_size=2`."""
    assert set(place) <= _parallel_fields(), "it says no such thing"
    said = SimpleNamespace(**place)
    with _ONE_AT_A_TIME, mock.patch.object(parallel, "get_parallel", lambda: said):
        yield


class Meeting:
    """Exchanges values among threads. A rank that makes a call too many or too few breaks it."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=HANGS_S)
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, value: T) -> list[T]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def leave(self) -> None:
        """Whoever still waits learns that this rank does not come."""
        self._barrier.abort()


@dataclass(frozen=True)
class InThreads(StartGroup):
    """One thread's side of a meeting, which is its `cpu_group`."""

    def each(self, value: T) -> list[T]:
        found: list[T] = self.cpu_group.exchange(self.rank, value)
        return found


def on_ranks(size: int, body: Callable[[StartGroup], T]) -> list[T]:
    """`body(group)` on every rank at once; what it returns, in the order of ranks. Raises what the
    first rank raises that fails."""
    meeting = Meeting(size)
    done = threading.Barrier(size)

    def run(rank: int) -> T:
        try:
            return body(InThreads(rank, size, meeting))
        except BaseException:
            meeting.leave()
            raise
        finally:
            done.wait(HANGS_S)
            meeting.leave()

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
        return [future.result() for future in futures]
