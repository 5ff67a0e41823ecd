"""Running every point of a benchmark on every arm, interleaved."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmark.harness.arms import Arm
from benchmark.harness.client import Client, RequestFailed
from benchmark.harness.driver import Pace, drive
from benchmark.harness.kept import KeptRuns
from benchmark.harness.points import Cell, Point
from benchmark.harness.server import ServerFailed, ServerProcess
from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.workloads.sessions import Workload

_START_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class SuiteSettings:
    """together: all servers live, interleaved point by point; otherwise one server at a time,
    interleaved repeat by repeat. Logs go to output/logs. warmup: sent to every fresh server.
    kept: takes every run as soon as it is over; what it has already is not run again."""

    repeat: int
    together: bool
    output: Path
    warmup: Workload
    timeout_s: float
    kept: KeptRuns | None = None


class Suite:
    """Runs arms over points. `start_s` holds the start times of the servers it started."""

    def __init__(self, arms: Sequence[Arm], points: Sequence[Point], settings: SuiteSettings):
        self._arms = list(arms)
        self._points = list(points)
        self._settings = settings
        self._live: dict[str, str] = {}
        self.start_s: dict[str, list[float]] = {}

    def run(self) -> list[Cell]:
        """All cells, in the order they ran, without those that are kept already. Raises UsageError
        when a server does not start."""
        together = self._settings.together or all(arm.url for arm in self._arms)
        cells: list[Cell] = []
        with contextlib.ExitStack() as servers:
            if together:
                for arm in self._arms:
                    if any(self._todo(arm, repeat) for repeat in range(self._settings.repeat)):
                        servers.enter_context(self._served(arm))
            for repeat in range(self._settings.repeat):
                # A B, B A, ...: a drift of the machine hits both sides equally.
                order = self._arms if repeat % 2 == 0 else self._arms[::-1]
                if together:
                    for point in self._points:
                        cells += [
                            self._cell(arm, point, repeat)
                            for arm in order
                            if point in self._todo(arm, repeat)
                        ]
                else:
                    for arm in order:
                        todo = self._todo(arm, repeat)
                        if todo:
                            with self._served(arm):
                                cells += [self._cell(arm, point, repeat) for point in todo]
        return cells

    def _todo(self, arm: Arm, repeat: int) -> list[Point]:
        """The points of one repeat that nobody kept."""
        kept = self._settings.kept
        return [p for p in self._points if not (kept and kept.has(arm.name, p.name, repeat))]

    @contextlib.contextmanager
    def served(self, arm: Arm) -> Iterator[str]:
        """URL of an arm's server, started for the body."""
        with self._served(arm):
            yield self._live[arm.name]

    @contextlib.contextmanager
    def _served(self, arm: Arm) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if arm.url:
                self._live[arm.name] = arm.url
            else:
                print(f"starting {arm.name}", flush=True)
                server = ServerProcess(
                    arm.module,
                    arm.args,
                    arm.env,
                    self._settings.output / "logs" / f"{arm.name.replace(':', '-')}.log",
                    _START_TIMEOUT_S,
                )
                try:
                    stack.enter_context(server)
                except ServerFailed as error:
                    raise UsageError(f"arm {arm.name} did not start: {error}") from None
                self._live[arm.name] = server.url
                self.start_s.setdefault(arm.name, []).append(round(server.start_s, 1))
            asyncio.run(self._warm_up(arm))
            try:
                yield
            finally:
                del self._live[arm.name]

    async def _warm_up(self, arm: Arm) -> None:
        workload = self._settings.warmup
        if not workload.sessions:
            return
        async with self._client(arm) as client:
            run = await drive(client, workload, Pace(max_parallel=1))
        if run.failed:
            raise UsageError(f"arm {arm.name}: the warm-up failed: {run.failed[0].error}")

    def _cell(self, arm: Arm, point: Point, repeat: int) -> Cell:
        workload = point.workload(repeat)
        words = f"{arm.name} {point.name} repeat {repeat + 1}/{self._settings.repeat}"
        with tqdm(total=workload.num_turns, desc=words, unit="req", mininterval=0.5) as bar:
            cell = asyncio.run(self._cell_async(arm, point, repeat, workload, bar.update))
        if self._settings.kept is not None:
            starts = self.start_s.get(arm.name) or [0.0]
            self._settings.kept.keep(cell, point, arm, starts[-1])
        return cell

    async def _cell_async(
        self,
        arm: Arm,
        point: Point,
        repeat: int,
        workload: Workload,
        progress: Callable[[], object],
    ) -> Cell:
        async with self._client(arm) as client:
            try:
                flushed = await client.flush_cache()
            except RequestFailed as error:
                raise UsageError(f"arm {arm.name}: {error}") from None
            load = os.getloadavg()[0]
            run = await drive(client, workload, point.pace, progress)
        return Cell(arm.name, point.name, repeat, run, load, flushed)

    def _client(self, arm: Arm) -> Client:
        return Client(self._live[arm.name], self._settings.timeout_s)
