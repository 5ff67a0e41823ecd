"""Sending one workload to one server: arrivals, think time, barriers, limits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmark.harness.client import Client, Reply, RequestFailed
from benchmark.harness.workload import History
from sglang_hc.tools.workloads.sessions import Session, Workload


@dataclass(frozen=True)
class Pace:
    """How a workload is sent.

    max_parallel: sessions in flight at once, None for no limit. round_barrier: turn n+1 of any
    session starts after turn n of all; then arrival times spread the requests of every round and
    think time is not applied. time_scale: workload seconds to real seconds. window_s: what ends in
    so many real seconds is measured; they begin when everybody of those that begin at once has an
    answer, and are over sooner when somebody has nothing left to ask. What then still runs is given
    up. None for whole sessions, all of them.
    """

    max_parallel: int | None = None
    round_barrier: bool = False
    time_scale: float = 1.0
    window_s: float | None = None


@dataclass
class Record:
    """One finished or failed request. Times in seconds; `start_s` since the run began."""

    session: int
    turn: int
    measured: bool
    label: str
    start_s: float
    reply: Reply
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Flat fields of the request log."""
        reply = self.reply
        return {
            "session": self.session,
            "turn": self.turn,
            "measured": self.measured,
            "label": self.label,
            "start": self.start_s,
            "ttft": reply.ttft_s,
            "latency": reply.latency_s,
            "itl": reply.itl_s,
            "prompt_len": reply.prompt_tokens,
            "output_len": reply.tokens,
            "hits": reply.hits,
            "output_ids": reply.ids,
            "error": self.error,
        }


class Window(NamedTuple):
    """tokens: those that came in these seconds, also of requests that ended later or never."""

    seconds: float
    tokens: int


@dataclass
class Run:
    """All records of one workload on one server, in order of their start, and the whole duration.

    duration_s covers the measured requests only: first start to last token, or the window in which
    they ended.
    """

    records: list[Record] = field(default_factory=list)
    window: Window | None = None

    @property
    def measured(self) -> list[Record]:
        return [record for record in self.records if record.measured and not record.error]

    @property
    def failed(self) -> list[Record]:
        return [record for record in self.records if record.error]

    @property
    def duration_s(self) -> float:
        done = self.measured
        if not done:
            return 0.0
        if self.window is not None:
            return self.window.seconds
        return max(r.start_s + r.reply.latency_s for r in done) - min(r.start_s for r in done)

    def outputs(self) -> dict[tuple[int, int], Record]:
        """Records that succeeded, by (session, turn)."""
        return {(r.session, r.turn): r for r in self.records if not r.error}


class _Drive:
    def __init__(
        self, client: Client, workload: Workload, pace: Pace, progress: Callable[[], object]
    ) -> None:
        self._client = client
        self._workload = workload
        self._pace = pace
        self._progress = progress
        self._begun = time.perf_counter()
        limit = pace.max_parallel or len(workload.sessions)
        self._slots = asyncio.Semaphore(max(1, limit))
        self._first = set(range(min(limit, len(workload.sessions))))
        self._waiting = len(workload.sessions)
        self._all_answered, self._somebody_idle = asyncio.Event(), asyncio.Event()
        self._histories = [History(session) for session in workload.sessions]
        self._broken: set[int] = set()
        self._asked: list[Record] = []
        self.run = Run()

    async def whole_sessions(self) -> None:
        await asyncio.gather(*(self._session(i) for i in range(len(self._workload.sessions))))

    async def window(self, seconds: float) -> None:
        """Sessions in a steady state: the requests that end in it are measured."""
        work = asyncio.create_task(self.whole_sessions())
        work.add_done_callback(lambda _: self._all_answered.set())
        work.add_done_callback(lambda _: self._somebody_idle.set())
        try:
            await self._all_answered.wait()
            begin = self._now()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._somebody_idle.wait(), seconds)
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
        end = min(begin + seconds, self._now())
        came = sum(begin <= at <= end for one in self._asked for at in _token_times(one))
        self.run.window = Window(end - begin, came)
        for record in self.run.records:
            record.measured &= begin <= record.start_s + record.reply.latency_s <= end

    async def rounds(self) -> None:
        depth = max(len(session.turns) for session in self._workload.sessions)
        for turn in range(depth):
            at = self._now()
            await asyncio.gather(
                *(
                    self._round_turn(at, index, turn)
                    for index, session in enumerate(self._workload.sessions)
                    if turn < len(session.turns)
                )
            )

    async def _session(self, index: int) -> None:
        session = self._workload.sessions[index]
        await self._until(session.arrival)
        async with self._slots:
            self._waiting -= 1
            for turn, asked in enumerate(session.turns):
                await asyncio.sleep(asked.think * self._pace.time_scale)
                if asked.at is not None:
                    await self._until(asked.at)
                await self._ask(session, index, turn)
                self._first.discard(index)
                if not self._first:
                    self._all_answered.set()
            if not self._waiting:
                self._somebody_idle.set()

    async def _round_turn(self, at: float, index: int, turn: int) -> None:
        session = self._workload.sessions[index]
        await self._until(session.arrival, at)
        async with self._slots:
            await self._ask(session, index, turn)

    async def _ask(self, session: Session, index: int, number: int) -> None:
        turn = session.turns[number]
        history = self._histories[index]
        record = Record(index, number, turn.measured, turn.label, self._now(), Reply())
        if index in self._broken and not session.whole:
            record.error = "not sent: an earlier turn of this session failed"
        else:
            history.ask(turn)
            try:
                self._asked.append(record)
                await self._client.ask(history, max(1, turn.answer.length), record.reply)
                history.answer(record.reply.ids)
            except RequestFailed as error:
                record.error = str(error)
                self._broken.add(index)
        self.run.records.append(record)
        self._progress()

    def _now(self) -> float:
        return time.perf_counter() - self._begun

    async def _until(self, at_s: float, since_s: float = 0.0) -> None:
        await asyncio.sleep(since_s + at_s * self._pace.time_scale - self._now())


def _token_times(record: Record) -> Iterator[float]:
    """When the tokens of a reply came, in seconds since the run began."""
    reply = record.reply
    if not reply.tokens:
        return iter(())
    return itertools.accumulate(reply.itl_s, initial=record.start_s + reply.ttft_s)


async def drive(
    client: Client, workload: Workload, pace: Pace, progress: Callable[[], object] = lambda: None
) -> Run:
    """Send `workload` and return its records. Failed requests are records too, never exceptions.

    After a failed turn the rest of that session is recorded as not sent. `progress` is called
    once for every request that ended.
    """
    work = _Drive(client, workload, pace, progress)
    if pace.window_s is not None:
        await work.window(pace.window_s)
    else:
        await (work.rounds() if pace.round_barrier else work.whole_sessions())
    work.run.records.sort(key=lambda record: (record.start_s, record.session))
    return work.run
