"""Steps of the campaign as forks of the test process, which has SGLang imported already: starting
is nine tenths of what a rehearsal takes.

The command lines, the code of the steps and their engines are real. What differs: a step and a
case of a benchmark are forks and no new interpreters, and of the servers only that of `REAL` is
SGLang's; the others are `support.fake_sglang`.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from benchmark.gpu import runner
from support.core import import_engine, run_in_child

REAL = ("benchmark.gpu.multi_turn", "auto")
"""Module and arm of the step whose server is real."""


def fork_steps(patch: pytest.MonkeyPatch) -> None:
    """From now on campaigns in this process fork their steps."""
    import_engine()
    instead = SimpleNamespace(
        Popen=ForkedStep, DEVNULL=None, STDOUT=None, TimeoutExpired=subprocess.TimeoutExpired
    )
    patch.setattr(runner, "subprocess", instead)
    patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # where the fake server is


class ForkedStep:
    """In place of the `Popen` of a step."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdout: IO[bytes],
        cwd: Path,
        env: Mapping[str, str],
        **_: Any,
    ) -> None:
        command = list(words[list(words).index("-m") + 1 :])
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_step, args=(command, stdout.fileno(), cwd, env))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a step", timeout or 0.0)
        return self._process.exitcode


def _step(command: list[str], output: int, cwd: Path, env: Mapping[str, str]) -> None:
    """`python -m COMMAND` in this process."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    _replace(command)
    sys.argv = list(command)
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _replace(command: list[str]) -> None:
    from benchmark.harness import arms, cases

    cases.run_case = forked_case
    if command[0] != REAL[0] or command[command.index("--arms") + 1] != REAL[1]:
        arms.HC_MODULE = arms.SGLANG_MODULE = "support.fake_sglang"


def forked_case(module: str, case: dict[str, Any], timeout: float = 900) -> Any:
    """As `cases.run_case`. A case that hangs runs into the limit of its step."""
    try:
        found = run_in_child(importlib.import_module(module).measure, case)
    except AssertionError as error:
        raise RuntimeError(f"{module} {case} failed:\n{error}") from error
    return json.loads(json.dumps(found))
