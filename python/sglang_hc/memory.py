"""How much memory this process may use: the machine's, within its control groups."""

from __future__ import annotations

import mmap
from pathlib import Path

from sglang_hc.errors import ConfigError

GIB = 1 << 30


def total_memory() -> int:
    """Bytes of memory this process may use at most: the machine's or its control group's.

    The host of a virtual machine may hold back a part of its memory until it is needed. MemTotal is
    then small at first and grows, so the memory that the machine was built with counts.
    """
    machine = max(meminfo("MemTotal"), _present())
    return min([machine, *(limit for limit, _ in cgroups())])


def available_memory() -> int:
    """Bytes that are free now, within the machine and within every enclosing control group."""
    rooms = [max(limit - used, 0) for limit, used in cgroups()]
    return min([meminfo("MemAvailable"), *rooms])


def check_host_size(gib: float) -> None:
    """Raise ConfigError unless `gib` is a size that this machine's memory can hold."""
    if not 0 < gib < float("inf"):
        raise ConfigError(f"must be above 0 GiB, got {gib:g}")
    total = total_memory()
    if gib * GIB > total:
        raise ConfigError(
            f"{gib:g} GiB is larger than this machine's memory "
            f"({total / GIB:.1f} GiB); give at most what is free "
            f"({available_memory() / GIB:.1f} GiB now)"
        )


def meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"/proc/meminfo has no {field}; give --hc-host-size-gb")


def _present() -> int:
    """Bytes of all memory zones, those that a balloon holds included; 0 if they cannot be read."""
    try:
        lines = Path("/proc/zoneinfo").read_text().splitlines()
        pages = [int(line.split()[1]) for line in lines if line.split()[:1] == ["present"]]
    except (OSError, ValueError, IndexError):
        return 0
    return sum(pages) * mmap.PAGESIZE


def cgroups() -> list[tuple[int, int]]:
    """(limit, used without reclaimable file cache) of each control group that limits memory."""
    root = Path("/sys/fs/cgroup")
    found: list[tuple[int, int]] = []
    try:
        line = Path("/proc/self/cgroup").read_text().strip().splitlines()[-1]
        below = root / line.rsplit(":", 1)[1].lstrip("/")
        for folder in [below, *below.parents]:
            if not folder.is_relative_to(root):
                break
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            if limit != "max":
                stat = (folder / "memory.stat").read_text().split()
                cache = int(stat[stat.index("inactive_file") + 1])
                found.append((int(limit), max(used - cache, 0)))
    except (OSError, ValueError, IndexError):
        pass  # no unified control groups here: the machine's memory is the only bound
    return found
