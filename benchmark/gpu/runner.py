"""Runs steps one after the other within a budget of minutes, whatever becomes of each of them.

A step is a process of its own that appends its cells itself (`benchmark.harness.cells`). Here
it gets a limit, its output is kept up to a size, and one cell says how it ended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmark import ROOT
from benchmark.harness import processes
from benchmark.harness.cells import (
    FAILED,
    LEFT_OUT,
    LOG_TAIL,
    OK,
    CellFile,
    append,
    latest,
    read,
)

STOPPED = "stopped"
"""Status of a step that the end of the minutes cut off; its cells so far are kept."""

CELLS, LOG, PAGE = "cells.jsonl", "log.txt", "report.html"
"""All files of an output folder: few enough to be copied back together."""

RESERVE_S = 15.0
"""Kept of the minutes for stopping the last step and for the page."""

STEP_LOG, WHOLE_LOG = 512 << 10, 8 << 20
"""Bytes that one step, and all steps together, may write to the log."""

REHEARSAL_LIMIT_S = 300.0

GRACE_S = 5.0
"""A step that is stopped may use these seconds to stop its servers before it is killed."""

LOOK_S = 0.1


@dataclass(frozen=True)
class Step:
    """One process of the campaign.

    command: a module, and its words; `{scratch}` stands for a folder that is deleted afterwards.
    minutes: expected on one GPU of the H100 class. rehearsal: words that follow in a rehearsal and
    win over the ones before; None: not rehearsed, because another step runs the same code.
    gpu_only: why there is nothing to do without a GPU.
    """

    name: str
    about: str
    minutes: float
    command: tuple[str, ...]
    rehearsal: tuple[str, ...] | None = None
    rehearsal_minutes: float = 0.5
    takes_server_args: bool = True
    gpu_only: str = ""

    @property
    def key(self) -> str:
        """Of the cell that says how the step ended."""
        return f"step {self.name}"

    def expected_s(self, rehearse: bool) -> float:
        return 60 * (self.rehearsal_minutes if rehearse else self.minutes)

    def limit_s(self, rehearse: bool) -> float:
        """A first run compiles kernels and reads cold files: twice what is expected, and more. A
        rehearsal shares its cores with other work."""
        return REHEARSAL_LIMIT_S if rehearse else 2 * self.expected_s(rehearse) + 60


@dataclass
class Runner:
    """One call of the campaign. `deadline`: of `time.monotonic`, the page included."""

    output: Path
    deadline: float
    scratch: Path
    environment: Mapping[str, str]
    gpu: bool
    rehearse: bool = False
    server_args: str = ""
    begun: list[str] = field(default_factory=list)

    @property
    def cells(self) -> Path:
        return self.output / CELLS

    def carry_over(self, files: Sequence[Path]) -> int:
        """Copy what other files measured and this one lacks, unchanged; returns how many cells."""
        known = latest(read(self.cells))
        copied = 0
        for file in files:
            for key, cell in latest(read(file)).items():
                if cell["status"] == OK and known.get(key, {}).get("status") != OK:
                    append(self.cells, cell)
                    known[key] = cell
                    copied += 1
        return copied

    def run(self, steps: Sequence[Step]) -> None:
        """Everything that is not done and fits; what failed before comes last."""
        for step in in_order(steps, self.cells):
            left = self.deadline - RESERVE_S - time.monotonic()
            if step.gpu_only and not self.gpu:
                self._end(step, LEFT_OUT, step.gpu_only, "", 0.0)
            elif step.expected_s(self.rehearse) > left:
                say(f"{step.name}: not begun, {step.expected_s(self.rehearse):.0f} s do not fit")
            else:
                self.begun.append(step.name)
                self._run(step, left)

    def failed(self, steps: Sequence[Step]) -> list[str]:
        """Names of the steps of this call that ended badly."""
        ends = latest(read(self.cells))
        return [s.name for s in steps if s.name in self.begun and ends[s.key]["status"] == FAILED]

    def _run(self, step: Step, left: float) -> None:
        say(f"{step.name}: {step.about}; {left / 60:.1f} minutes left")
        limit = min(step.limit_s(self.rehearse), left)
        scratch = self.scratch / step.name
        scratch.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        log = _Log(self.output / LOG, scratch / "output.txt")
        process = subprocess.Popen(
            processes.tied(self.words(step, scratch)),
            stdin=subprocess.DEVNULL, stdout=log.sink, stderr=subprocess.STDOUT, cwd=ROOT,
            env={**os.environ, **self.environment}, start_new_session=True,
        )  # fmt: skip
        try:
            in_time = self._wait(process, began + limit, log)
        finally:
            processes.end(process, GRACE_S)
            tail = log.close()
        seconds = time.monotonic() - began
        shutil.rmtree(scratch, ignore_errors=True)
        if not in_time and limit == left:
            self._end(step, STOPPED, "the minutes ran out", tail, seconds)
        elif not in_time:
            self._end(step, FAILED, f"killed at its limit of {limit:.0f} s", tail, seconds)
        elif process.returncode:
            self._end(step, FAILED, f"exit status {process.returncode}", tail, seconds)
        else:
            self._end(step, OK, "", "", seconds)

    def words(self, step: Step, scratch: Path) -> list[str]:
        """The command line of a step."""
        chosen = [*step.command, *((step.rehearsal or ()) if self.rehearse else ())]
        chosen = [word.replace("{scratch}", str(scratch)) for word in chosen]
        words = [sys.executable, "-m", *chosen]
        if step.takes_server_args and self.server_args:
            words.append(f"--server-args={self.server_args}")
        return [*words, "--cells", str(self.cells.resolve())]

    def _wait(self, process: subprocess.Popen[bytes], deadline: float, log: _Log) -> bool:
        while time.monotonic() < deadline:
            log.copy()
            try:
                process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
            return True
        return False

    def _end(self, step: Step, status: str, reason: str, tail: str, seconds: float) -> None:
        command = " ".join(["python", "-m", *step.command])
        values = {"reason": reason, "log": tail} if reason else {}
        known = latest(read(self.cells)).get(step.key)
        if status != LEFT_OUT or known is None:
            CellFile(self.cells, "campaign", command).add(step.key, values, seconds, status)
        say(f"{step.name}: {status}{', ' if reason else ''}{reason} ({seconds:.0f} s)")


def in_order(steps: Sequence[Step], cells: Path) -> list[Step]:
    """Steps that are not done: first those that never failed, in the order given."""
    ends = {step.name: latest(read(cells)).get(step.key, {}).get("status") for step in steps}
    todo = [step for step in steps if ends[step.name] != OK]
    return sorted(todo, key=lambda step: ends[step.name] == FAILED)


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


class _Log:
    """Takes a step's output and copies its begin to the campaign's log, within the sizes above."""

    def __init__(self, log: Path, own: Path) -> None:
        self._own = own
        self.sink = own.open("wb")
        self._source = own.open("rb")
        self._log = log.open("ab")
        self._left = min(STEP_LOG, max(0, WHOLE_LOG - log.stat().st_size))

    def copy(self) -> None:
        data = self._source.read(self._left)
        self._left -= len(data)
        self._log.write(data)
        self._log.flush()

    def close(self) -> str:
        """The end of the output."""
        self.sink.close()
        self.copy()
        self._source.close()
        self._log.close()
        size = self._own.stat().st_size
        with self._own.open("rb") as file:
            file.seek(max(0, size - LOG_TAIL))
            return file.read().decode(errors="replace")
