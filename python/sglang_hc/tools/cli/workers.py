"""Processes that simulate beside each other."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

WORKERS = 2


def workers() -> ProcessPoolExecutor:
    """They end with this process, however it ends. An interrupt of all ends them too, not only what
    each does just now: so nobody waits for what is left to do."""
    fork = get_context("fork")
    return ProcessPoolExecutor(WORKERS, fork, initializer=_end_with, initargs=(os.getpid(),))


def _end_with(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
