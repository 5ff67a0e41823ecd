"""Ending processes for certain: a group, everything below it, and children of a killed parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

_TIE = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"  # PR_SET_PDEATHSIG; it outlives execv
    "if os.getppid() == int(sys.argv[1]): os.execvp(sys.argv[2], sys.argv[2:])\n"
)


def tied(words: Sequence[str]) -> list[str]:
    """The command `words`, as a child of this process that the kernel kills when the thread that
    started it is gone. A parent that is killed with SIGKILL cannot clean up; without this its
    servers would live on."""
    return [sys.executable, "-S", "-c", _TIE, str(os.getpid()), *words]


def end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process that leads its own group: SIGTERM, `grace_s` seconds, then SIGKILL.

    Children that have left the group are killed as well. Returns when the process is gone.
    """
    below = descendants(process.pid)
    _signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    below += descendants(process.pid)
    _signal_group(process.pid, signal.SIGKILL)
    for pid, started in below:
        if _start_time(pid) == started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(root: int) -> list[tuple[int, str]]:
    """(pid, start time) of every process below `root`; the time guards against reused ids."""
    parents: dict[int, list[int]] = {}
    for pid in _all_pids():
        fields = _stat(pid)
        if fields:
            parents.setdefault(int(fields[1]), []).append(pid)
    found, todo = [], [root]
    while todo:
        children = parents.get(todo.pop(), [])
        todo.extend(children)
        found.extend(children)
    return [(pid, _start_time(pid)) for pid in found]


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the command name; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _start_time(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if fields else ""


def _all_pids() -> Iterable[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
