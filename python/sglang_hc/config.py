"""Every option of the server once: flag, type, default, help, and a check with a clear message."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeVar

from sglang_hc.forms import LayerPlan, PlanError

T = TypeVar("T")

CONFIG_ENV = "SGLANG_HC_CONFIG"
"""JSON object with the fields of `HcConfig`; the channel for `sgl.Engine`, which has no flags."""

HOST_SHARE = 0.4
"""Share of the free memory that the host tier takes when no size is given."""

GIB = 1 << 30

EVICTIONS = ("queue", "lru", "fifo", "lfu")
PREFETCHES = ("queue", "on-arrival", "off")


class ConfigError(ValueError):
    """A bad option. The message names the option and the remedy."""


@dataclass(frozen=True)
class HcConfig:
    """The options of one server.

    host_size_gb: size of the host tier in GiB; None takes HOST_SHARE of the free memory.
    forms: `auto`, `kv`, `hidden` or an explicit layer plan (see `forms.LayerPlan.parse`).
    disk: directories of the disk tier, each DIR or DIR:SIZE_GB; none by default.
    eviction: which blocks leave the host tier first, one of EVICTIONS.
    prefetch: when blocks are read from disk, one of PREFETCHES.
    disable: plain SGLang, for comparison.
    """

    host_size_gb: float | None = None
    forms: str = "auto"
    disable: bool = False
    disk: tuple[str, ...] = ()
    eviction: str = "queue"
    prefetch: str = "queue"

    def __post_init__(self) -> None:
        try:
            if self.host_size_gb is not None:
                option = "host size (--hc-host-size-gb)"
                check_host_size(self.host_size_gb)
            option = "forms (--hc-forms)"
            check_forms(self.forms)
            option = "eviction (--hc-eviction)"
            _check_choice(self.eviction, EVICTIONS)
            option = "prefetch (--hc-prefetch)"
            _check_choice(self.prefetch, PREFETCHES)
            option = "disk (--hc-disk)"
            for directory in self.disk:
                check_disk(directory)
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from None

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], where: str) -> HcConfig:
        """Config from plain values. Raises ConfigError that names `where` and the field."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                f"{where}: unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}"
            )
        size = values.get("host_size_gb")
        if isinstance(size, bool) or not isinstance(size, (int, float, type(None))):
            raise ConfigError(f"{where}: host_size_gb must be a number of GiB, got {size!r}")
        forms, disable = values.get("forms", "auto"), values.get("disable", False)
        if not isinstance(forms, str):
            raise ConfigError(f"{where}: forms must be text, got {forms!r}")
        if not isinstance(disable, bool):
            raise ConfigError(f"{where}: disable must be true or false, got {disable!r}")
        disk = values.get("disk", ())
        if not isinstance(disk, (list, tuple)) or not all(isinstance(d, str) for d in disk):
            raise ConfigError(f"{where}: disk must be a list of DIR[:SIZE_GB], got {disk!r}")
        eviction, prefetch = values.get("eviction", "queue"), values.get("prefetch", "queue")
        if not isinstance(eviction, str) or not isinstance(prefetch, str):
            raise ConfigError(f"{where}: eviction and prefetch must be text")
        host = None if size is None else float(size)
        return cls(host, forms, disable, tuple(disk), eviction, prefetch)

    @classmethod
    def from_json(cls, text: str, where: str = CONFIG_ENV) -> HcConfig:
        """Config from a JSON object. Raises ConfigError."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{where} must be a JSON object, got {type(values).__name__}")
        return cls.from_mapping(values, where)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> HcConfig:
        """Config from parsed `--hc-*` flags."""
        return cls(
            args.hc_host_size_gb,
            args.hc_forms,
            args.hc_disable,
            tuple(args.hc_disk),
            args.hc_eviction,
            args.hc_prefetch,
        )

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types: it travels in SGLang's server arguments and shows in /server_info."""
        return {**asdict(self), "disk": list(self.disk)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the `--hc-*` flags."""
    group = parser.add_argument_group("sglang-hc", "the tiers below the GPU's radix cache")
    group.add_argument(
        "--hc-host-size-gb",
        type=_argument(float, check_host_size),
        default=None,
        metavar="GIB",
        help=f"host tier in GiB (default: {HOST_SHARE:.0%} of the free memory)",
    )
    group.add_argument(
        "--hc-forms",
        type=_argument(str, check_forms),
        default="auto",
        metavar="PLAN",
        help="auto, kv, hidden, or counts per form such as hidden:20,kv:12",
    )
    group.add_argument(
        "--hc-disk",
        type=_argument(str, check_disk),
        action="append",
        default=[],
        metavar="DIR[:SIZE_GB]",
        help="keep blocks in this directory too; repeat for several SSDs",
    )
    group.add_argument(
        "--hc-eviction",
        choices=EVICTIONS,
        default="queue",
        help="what leaves the host tier first: what no waiting request needs, or by age or use",
    )
    group.add_argument(
        "--hc-prefetch",
        choices=PREFETCHES,
        default="queue",
        help="when blocks are read from disk: ahead of a request's turn, when it arrives, never",
    )
    group.add_argument(
        "--hc-disable", action="store_true", help="plain SGLang without the tiers, for comparison"
    )


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


def check_forms(text: str) -> None:
    """Raise ConfigError unless `text` reads as a plan; whether it fits is known with the model."""
    if text in ("auto", "kv", "hidden"):
        return
    try:
        LayerPlan.parse(text, _sum_of_counts(text))
    except PlanError as error:
        raise ConfigError(str(error)) from None


def _check_choice(value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{value!r} is not one of {', '.join(choices)}")


def check_disk(text: str) -> None:
    """Raise ConfigError unless `text` reads as DIR or DIR:SIZE_GB."""
    from sglang_hc.store.disk import DirectoryError, DirectorySpec

    try:
        DirectorySpec.parse(text)
    except DirectoryError as error:
        raise ConfigError(str(error).removeprefix("--hc-disk ")) from None


def host_bytes(config: HcConfig) -> int:
    """Size of the host tier in bytes."""
    if config.host_size_gb is not None:
        return int(config.host_size_gb * GIB)
    return int(available_memory() * HOST_SHARE)


def total_memory() -> int:
    """Bytes of memory this process may use at most: the machine's or its control group's."""
    return min([_meminfo("MemTotal"), *(limit for limit, _ in _cgroups())])


def available_memory() -> int:
    """Bytes that are free now, within the machine and within every enclosing control group."""
    rooms = [max(limit - used, 0) for limit, used in _cgroups()]
    return min([_meminfo("MemAvailable"), *rooms])


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"/proc/meminfo has no {field}; give --hc-host-size-gb")


def _cgroups() -> list[tuple[int, int]]:
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


def _sum_of_counts(text: str) -> int:
    counts = [part.rpartition(":")[2] for part in text.split(",")]
    return sum(int(count) for count in counts if count.isdecimal())


def _argument(convert: Callable[[str], T], check: Callable[[T], None]) -> Callable[[str], T]:
    """An argparse type that reports a failed check in argparse's own way."""

    def read(text: str) -> T:
        try:
            value = convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
        try:
            check(value)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return read
