"""Streams and events that compute nothing but order: vector clocks in the place of a device's.

A GPU runs the work of one stream in turn and gives no other promise; what comes before what follows
from the waits between streams, from what the host waited for, and from what it submitted when. A
vector clock per stream and one for the host hold exactly that. So an access that is merely lucky on
one machine is told from an access that is ordered, without a device and without luck
(`watch.py` compares the accesses, `ordered_core.py` runs SGLang's scheduler on these streams).
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

ACTORS = 12
"""The host and the streams there may be."""

LATE = 400
"""Steps of the host, about two passes, after which it may be told that an event is over: on a GPU
work is still under way when the host asks first. What it submits once told comes after that."""


class Actor:
    """The host or a stream. `clock[i]` steps of actor i come before this one's next step."""

    def __init__(self, index: int, name: str) -> None:
        self.index, self.name = index, name
        self.clock = np.zeros(ACTORS, dtype=np.int64)

    def after(self, clock: np.ndarray[Any, Any]) -> None:
        np.maximum(self.clock, clock, out=self.clock)

    def step(self) -> None:
        self.clock[self.index] += 1


class Stream(Actor):
    """What torch's device modules call a stream."""

    def __init__(self, clocks: Clocks, index: int, name: str) -> None:
        super().__init__(index, name)
        self._clocks = clocks

    def wait_stream(self, other: Stream) -> None:
        self.after(other.clock)

    def wait_event(self, event: Event) -> None:
        if event.clock is not None:
            self.after(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._clocks)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._clocks.host.after(self.clock)

    def query(self) -> bool:
        return bool((self.clock <= self._clocks.host.clock).all())


class Event:
    """A point in a stream; None before it was recorded."""

    def __init__(self, clocks: Clocks, **_: Any) -> None:
        self._clocks = clocks
        self._at = 0
        self.clock: np.ndarray[Any, Any] | None = None

    def record(self, stream: Stream | None = None) -> None:
        clocks = self._clocks
        self.clock = np.maximum((stream or clocks.current).clock, clocks.host.clock)
        self._at = int(clocks.host.clock[0])

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._clocks.current).wait_event(self)

    def synchronize(self) -> None:
        if self.clock is not None:
            self._clocks.host.after(self.clock)

    def query(self) -> bool:
        host = self._clocks.host.clock
        known = self.clock is None or bool((self.clock <= host).all())
        if not known and host[0] - self._at < LATE:
            return False
        self.synchronize()
        return True


class Use(NamedTuple):
    """A step of an actor."""

    actor: Actor
    at: int


class _On(contextlib.AbstractContextManager[None]):
    def __init__(self, clocks: Clocks, stream: Stream | None) -> None:
        self._clocks, self._stream = clocks, stream
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        self._before.append(self._clocks.current)
        self._clocks.current = self._stream or self._clocks.current

    def __exit__(self, *_: object) -> None:
        self._clocks.current = self._before.pop()


class Clocks:
    """One host thread and the streams it submits to."""

    def __init__(self) -> None:
        self.actors: list[Actor] = [Actor(0, "host")]
        self.host = self.actors[0]
        self.default = self.stream("default")
        self.current = self.default

    def stream(self, name: str) -> Stream:
        stream = Stream(self, len(self.actors), name)
        assert stream.index < ACTORS, "more streams than this tool has clocks for"
        self.actors.append(stream)
        return stream

    def submit(self) -> Use:
        """The host hands work to the current stream: it comes after all the host did before."""
        stream = self.current
        stream.after(self.host.clock)
        stream.step()
        self.host.step()
        return Use(stream, int(stream.clock[stream.index]))

    def on_host(self) -> Use:
        """The host, or a thread it has handed work to, does something itself."""
        self.host.step()
        return Use(self.host, int(self.host.clock[0]))

    def all_over(self) -> None:
        """The host has waited for every stream, and all that is submitted comes after."""
        for actor in self.actors:
            self.host.after(actor.clock)

    def on(self, stream: Stream | None) -> _On:
        """torch's `stream` and `StreamContext`; may be entered again. None changes nothing."""
        return _On(self, stream)

    def new_stream(self, priority: int | None = None, **_: Any) -> Stream:
        """torch's `Stream`. SGLang asks for its schedule stream alone with priority 0."""
        return self.stream("schedule" if priority == 0 else f"stream {len(self.actors)}")

    def installed(self) -> contextlib.AbstractContextManager[Any]:
        """In the place of the streams of `torch.cpu`, which order nothing."""
        return mock.patch.multiple(
            torch.cpu,
            Stream=self.new_stream,
            Event=lambda **kwargs: Event(self, **kwargs),
            StreamContext=self.on,
            stream=self.on,
            current_stream=lambda device=None: self.current,
            synchronize=lambda device=None: self.all_over(),
        )
