"""The benchmarks' engine as tests use it.

`run_in_child` forks, so each test has its own engine and pays the import once per test session.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

from benchmark.harness import core
from benchmark.harness.in_process import import_engine

Core, Idle, Reply, MODELS = core.Core, core.Idle, core.Reply, core.MODELS

Once = Callable[..., Any]
"""The fixture `once` of e2e/conftest.py."""


def run_in_child(body: Callable[..., Any], *args: Any) -> Any:
    """Call `body(*args)` in a forked process; returns what it returns, raises what it raises. One
    that hangs runs into the limit of its test."""
    import_engine()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child() -> None:
        try:
            theirs.send((True, body(*args)))
        except BaseException:
            theirs.send((False, traceback.format_exc()))

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        try:
            good, value = ours.recv()
        except EOFError:
            process.join(10)
            raise AssertionError(f"the engine process died, exit {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if not good:
        raise AssertionError(value)
    return value
