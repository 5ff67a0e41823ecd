"""The machine and the versions that stand beside every number."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark import ROOT


def has_gpu() -> bool:
    """Whether an NVIDIA GPU can be used here."""
    return bool(_gpus())


def describe() -> dict[str, Any]:
    """Hardware and versions, JSON-ready. Memory in GiB."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(_memory_kib() / 2**20, 1),
        "gpus": _gpus(),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("sglang", "torch", "sglang-hc")},
        "commit": commit(),
        "load_average": os.getloadavg()[0],
    }


def about(experiment: str) -> dict[str, Any]:
    """What a result begins with."""
    return {
        "experiment": experiment,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command(),
        "machine": describe(),
    }


def commit() -> str:
    """Commit of this source tree, `-dirty` when files differ; what HC_COMMIT says where there is no
    git."""
    folder = str(ROOT)
    head = _output("git", "-C", folder, "rev-parse", "--short=12", "HEAD")
    if not head:
        return os.environ.get("HC_COMMIT", "unknown")
    # Without its lock: killed in the middle, git would leave the lock behind in the user's tree.
    words = ("git", "--no-optional-locks", "-C", folder, "status")
    changed = _output(*words, "--porcelain", "-uno", "--", ".")
    return f"{head}-dirty" if changed else head


def command(words: Sequence[str] | None = None) -> str:
    """What was typed to start this process. words: the flags, where they are not those of this
    process."""
    program = ["python", "-m", module(sys.argv[0]).removesuffix(".__main__")]
    return shlex.join([*program, *(sys.argv[1:] if words is None else words)])


def module(file: str) -> str:
    """Name of the module in a file of the source tree. `__spec__` knows none when it is run by its
    path."""
    return ".".join(_in_tree(file).with_suffix("").parts)


def _in_tree(file: str) -> Path:
    """The path below the source tree, where it is there."""
    path = Path(file).resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def one_line(machine: dict[str, Any]) -> str:
    """`describe()` for a caption."""
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items() if value)
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {gpus}; "
        f"Python {machine['python']}, {versions}; commit {machine['commit']}"
    )


def _gpus() -> list[str]:
    fields = "--query-gpu=name,memory.total,driver_version"
    text = _output("nvidia-smi", fields, "--format=csv,noheader")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_kib() -> int:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1])
    return 0


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
