"""Disk, executor and clocks of a storm: the real ones, at moments that follow from its seed.

An operation is done late: when its time has come, and not when it was asked for. So a slot that is
used again too early is overwritten for sure, and not only when threads happen to be slow.
"""

from __future__ import annotations

import errno
import random
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from sglang_hc.ranks.agreement import Ranks
from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.executor import Completion, Operation
from sglang_hc.store.outcome import Outcome
from support.disk_store import EIO, ENOSPC, Faults, failing, open_with
from support.storm_actions import Clock, Disk, Scatters
from support.waiting import in_time, until

PASS_S = 0.01
"""Seconds that a pass takes on the clock of decisions."""
EPOCH = 1_700_000_000.0


class Weather:
    """What disks, copies and clocks do now. folder: the disk's, "" for none. wall: the system's
    clock at the start, in seconds after `EPOCH`."""

    def __init__(self, seed: str, folder: str, wall: float) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.faults = Faults()
        self.disk = Disk()
        self.scatters = Scatters()
        self.now = 0.0
        self._wall = EPOCH + wall
        self.counts: Counter[str] = Counter()

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        """As `disk.steady_time`: the system's clock at the start, and what passed since."""
        return self._wall + self.now

    def change(self, action: Disk | Scatters | Clock) -> None:
        if isinstance(action, Clock):
            self.now += action.monotonic
        elif isinstance(action, Scatters):
            self.scatters = action
        else:
            self.disk = action
            self._fault(action.fault)

    def _fault(self, name: str | None) -> None:
        vars(self.faults).update(vars(Faults()))
        if name == "read error":
            self.faults.on_read = EIO
        elif name == "short read":
            self.faults.short = 512
        elif name == "write error":
            self.faults.on_write = EIO
        elif name == "full":
            self.faults.on_write = ENOSPC
        elif name == "read-only":
            self.faults.on_write = failing(errno.EROFS)
        elif name == "removed":
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            assert name is None, name


class _Late:
    """Operations in their order, each with the poll from which on it may be done."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._due: deque[tuple[int, Callable[[], Any]]] = deque()
        self._polls = 0

    def add(self, delay: int, work: Callable[[], Any]) -> None:
        self._due.append((self._polls + self._rng.randint(0, delay), work))

    def take(self) -> list[Any]:
        """Do what is due; what it returns."""
        self._polls += 1
        due = [work for at, work in self._due if at <= self._polls]
        self._due = deque(one for one in self._due if one[0] > self._polls)
        return [work() for work in due]

    def __len__(self) -> int:
        return len(self._due)


class LateDisk:
    """`LocalBlockIo` whose operations are done when the weather says."""

    def __init__(self, inner: Any, weather: Weather) -> None:
        self._inner = inner
        self._weather = weather
        self._late = _Late(weather.rng)
        self._others: list[BlockDone] = []
        """Answers to what does not depend on the weather."""

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float, *layers: Any) -> None:
        def work() -> BlockDone:
            if self._weather.monotonic() >= deadline:
                return self._done(ticket, Outcome.TIMED_OUT)
            self._inner.read(ticket, block_id, slot, in_time(), *layers)
            return self._answer(ticket)

        self._late.add(self._weather.disk.delay, work)

    def write(self, ticket: int, block: Any, slot: int, deadline: float) -> None:
        if self._weather.disk.refuses:
            self._late.add(0, lambda: self._done(ticket, Outcome.DROPPED))
            return

        def work() -> BlockDone:
            if self._weather.monotonic() >= deadline:
                return self._done(ticket, Outcome.TIMED_OUT)
            self._inner.write(ticket, block, slot, in_time())
            return self._answer(ticket)

        self._late.add(self._weather.disk.delay, work)

    def look_up(self, ticket: int, block_ids: Sequence[bytes], deadline: float) -> None:
        def work() -> BlockDone:
            if self._weather.monotonic() >= deadline:
                return self._done(ticket, Outcome.TIMED_OUT)
            self._inner.look_up(ticket, block_ids, in_time())
            return self._answer(ticket)

        self._late.add(self._weather.disk.delay, work)

    def poll(self) -> list[BlockDone]:
        late = self._late.take()
        others, self._others = [*self._others, *self._inner.poll()], []
        return [*late, *others]

    def close(self) -> None:
        while len(self._late):
            self._late.take()
        self._inner.close()

    def _answer(self, ticket: int) -> BlockDone:
        found: list[BlockDone] = []

        def look() -> None:
            for done in self._inner.poll():
                (found if done.ticket == ticket else self._others).append(done)

        until(lambda: found, look, pause=0.0002)
        (done,) = found
        self._weather.counts[f"{done.tier} {done.outcome.value}"] += 1
        return done._replace(at=time.monotonic())

    def _done(self, ticket: int, outcome: Outcome) -> BlockDone:
        tier: str = self._inner.tier.value
        self._weather.counts[f"{tier} {outcome.value}"] += 1
        return BlockDone(ticket, outcome, tier, time.monotonic())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class LateExecutor:
    """`Executor` whose operations are done in their order, when the weather says. One that is to
    fail writes nothing."""

    def __init__(self, inner: Any, weather: Weather) -> None:
        self._inner = inner
        self._weather = weather
        self._queue: deque[tuple[int, int, Operation]] = deque()
        self._polls = self._last = 0

    def submit(self, ticket: int, operation: Operation) -> None:
        delay = self._weather.rng.randint(0, self._weather.scatters.delay)
        self._last = max(self._last, self._polls + delay)
        self._queue.append((self._last, ticket, operation))

    def poll(self) -> list[Completion]:
        self._polls += 1
        done = []
        while self._queue and self._queue[0][0] <= self._polls:
            _, ticket, operation = self._queue.popleft()
            done.append(self._do(ticket, operation))
        return done

    def drain(self) -> list[Completion]:
        done = []
        while self._queue:
            done += self.poll()
        return done

    def _do(self, ticket: int, operation: Operation) -> Completion:
        fails = self._weather.scatters.fails
        if fails and self._weather.rng.randrange(fails) == 0:
            self._weather.counts["scatters failed"] += 1
            return Completion(ticket, False)
        self._inner.submit(ticket, operation)
        (done,) = self._inner.drain()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class StormRanks(Ranks):
    """One rank whose clock is that of a storm."""

    def __init__(self, weather: Weather) -> None:
        self._weather = weather
        self.clock = weather.monotonic

    def pause(self) -> None:
        self._weather.now += PASS_S


def use(weather: Weather) -> None:
    """The engine that this process builds is in this weather."""
    from sglang_hc.srt.start import build, stores

    open_with(weather.faults, weather.wall)
    threads, executor = stores.DiskThreads, build.ThreadExecutor
    stores.DiskThreads = lambda *args, **given: LateDisk(threads(*args, **given), weather)
    build.ThreadExecutor = lambda *args: LateExecutor(executor(*args), weather)
    build.ranks_of = lambda group: StormRanks(weather)
