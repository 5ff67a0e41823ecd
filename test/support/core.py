"""The benchmarks' engine as tests use it.

`run_in_child` forks, so each test has its own engine and pays the import once per test session.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from benchmark.harness import core
from benchmark.harness.in_process import import_engine

Core, Idle, Reply, MODELS = core.Core, core.Idle, core.Reply, core.MODELS

Once = Callable[..., Any]
"""The fixture `once` of e2e/conftest.py."""


def run_in_child(body: Callable[..., Any], *args: Any) -> Any:
    """Call `body(*args)` in a forked process; returns what it returns, raises what it raises. One
    that hangs runs into the limit of its test."""
    (value,) = run_in_children([partial(body, *args)])
    return value


def run_in_children(bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call each body in a forked process of its own, all at once; returns what they return, in
    their order. Raises what the first of them raises that fails."""
    import_engine()
    context = multiprocessing.get_context("fork")
    processes, pipes = [], []
    for body in bodies:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(theirs, body))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    found: dict[int, Any] = {}
    try:
        while len(found) < len(pipes):
            for pipe in wait([pipe for number, pipe in enumerate(pipes) if number not in found]):
                number = pipes.index(pipe)
                try:
                    good, value = pipe.recv()
                except EOFError:
                    processes[number].join(10)
                    good, value = False, f"it died, exit {processes[number].exitcode}"
                if not good:
                    raise AssertionError(f"process {number}: {value}")
                found[number] = value
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [found[number] for number in range(len(pipes))]


def _child(pipe: Any, body: Callable[[], Any]) -> None:
    gc.freeze()  # SGLang collects garbage while it starts: not in what a thousand imports left
    try:
        pipe.send((True, body()))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)  # a rank that waits for another one in a destructor would never end
