"""Threads that take work in the order in which it came. Used by everything that does I/O."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Workers(Generic[T]):
    """Daemon threads that take items in their order, up to `most` that wait at a time.

    most: asked before each batch.
    perform: does a batch, on one of the threads, and answers for each item of it. What it raises is
    logged, and the thread goes on.
    """

    def __init__(
        self,
        name: str,
        perform: Callable[[list[T]], None],
        most: Callable[[], int] = lambda: 1,
        threads: int = 1,
    ) -> None:
        self._perform = perform
        self._most = most
        self._items: deque[T] = deque()
        self._work = threading.Semaphore(0)
        self._closing = False
        self._began: dict[int, float] = {}
        """When the threads that are at work began their batches, by thread."""
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}_{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        """Items that no thread has taken yet."""
        return len(self._items)

    @property
    def busy_since(self) -> float:
        """When the longest of the batches that are being done began, on `time.monotonic`; infinity
        when none is."""
        return min(self._began.copy().values(), default=float("inf"))

    def submit(self, item: T) -> None:
        """Do this after what was submitted before."""
        self._items.append(item)
        self._work.release()

    def withdraw(self) -> list[T]:
        """Items that no thread has taken yet; none will."""
        taken: list[T] = []
        with suppress(IndexError):
            while True:
                taken.append(self._items.popleft())
        return taken

    def close(self, timeout: float | None = None) -> bool:
        """Finish what was submitted and end the threads; False if that takes longer than `timeout`
        seconds."""
        self._closing = True
        self._work.release(len(self._threads))
        end = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            self._work.acquire()
            batch: list[T] = []
            most = self._most()
            with suppress(IndexError):  # another thread may take the last one
                while len(batch) < most:
                    batch.append(self._items.popleft())
            if batch:
                self._began[threading.get_ident()] = time.monotonic()
                try:
                    self._perform(batch)
                except Exception:
                    logger.exception("%s: work failed", threading.current_thread().name)
                finally:
                    del self._began[threading.get_ident()]
            elif self._closing:
                return
