"""What the store did and why a block was not served: counters that start at a visible zero."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sglang_hc.store.disk.schema import IndexFull

_NAMES = (
    "written_blocks",
    "written_bytes",
    "write_duplicate",
    "write_no_space",
    "write_io_error",
    "read_blocks",
    "read_bytes",
    "read_missing",
    "read_damaged",
    "read_io_error",
    "read_timed_out",
    "evicted_blocks",
    "expired_blocks",
    "deleted_blocks",
    "directory_pauses",
    "index_refused",
    "scrubbed_bytes",
    "scrub_damaged",
    "maintenance_errors",
)


class Counters:
    """Sums since the store was opened, by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(_NAMES, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Raises KeyError for a name that is not in the list."""
        with self._lock:
            self._values[name] += amount

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Count an IndexFull inside and go on."""
        try:
            yield
        except IndexFull:
            self.add("index_refused")

    def snapshot(self) -> dict[str, int]:
        """All counters at one moment."""
        with self._lock:
            return dict(self._values)
