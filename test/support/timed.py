"""A device of which only the time is known: computation and copies, each in the order in which it
was submitted, beside each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from support.copy_streams import FakeCopyStream


@dataclass(frozen=True)
class TimedEvent:
    at: float

    def done(self) -> bool:
        raise AssertionError("nobody asks the device how far it is")

    def wait(self) -> None:
        raise AssertionError("nobody waits for the device")


class TimedCopyStream(FakeCopyStream):
    """Copies of `bytes_per_s` in one direction, and the computation that they run beside.

    copying: seconds until what was submitted is over. `computing` is that of the computation.
    """

    def __init__(self, bytes_per_s: float, other: TimedCopyStream | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self.copying = 0.0
        self._compute = [0.0] if other is None else other._compute
        self._other = other

    @property
    def computing(self) -> float:
        return self._compute[0]

    def compute(self, seconds: float) -> None:
        """Submit work of so many seconds."""
        self._compute[0] += seconds

    def computed(self) -> TimedEvent:
        return TimedEvent(self.computing)

    def after(self, computed: Any) -> None:
        self.copying = max(self.copying, computed.at)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copying += source.numel() / self.bytes_per_s

    def record(self) -> TimedEvent:
        return TimedEvent(self.copying)

    def before_compute(self, event: Any) -> None:
        self._compute[0] = max(self.computing, event.at)

    def opposite(self) -> TimedCopyStream:
        """As fast, and free."""
        self._other = self._other or TimedCopyStream(self.bytes_per_s, self)
        return self._other
