"""Every option of the server once: flag, type, default, help, and a check with a clear message."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_hc import options
from sglang_hc.forms import LayerPlan, PlanError
from sglang_hc.memory import GIB, available_memory, total_memory
from sglang_hc.options import ConfigError

CONFIG_ENV = "SGLANG_HC_CONFIG"
"""JSON object with the fields of `HcConfig`; the channel for `sgl.Engine`, which has no flags."""

HOST_SHARE = 0.4
"""Share of the free memory that the host tier takes when no size is given."""

READ_BUFFER_GIB = 0.5
"""Size of the read buffer on a GPU when none is given: at 50 GB/s what the link brings in the 10 ms
of a decode step. Without a GPU nothing overlaps with the copies, and there is none."""

REMOTES = ("file", "mooncake", "nixl", "hf3fs", "eic", "simm", "mori", "dynamic")
"""SGLang's storage back ends that keep pages of bytes, whatever the pages hold."""


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


def check_scrub(pace: float) -> None:
    """Raise ConfigError unless `pace` is a number of MB per second, 0 for none."""
    if not 0 <= pace < float("inf"):
        raise ConfigError(f"must be 0 or more MB per second, got {pace:g}")


def check_disk(text: str) -> None:
    """Raise ConfigError unless `text` reads as DIR or DIR:SIZE_GB."""
    from sglang_hc.store.disk import DirectoryError, DirectorySpec

    try:
        DirectorySpec.parse(text)
    except DirectoryError as error:
        raise ConfigError(str(error).removeprefix("--hc-disk ")) from None


def check_trace(text: str) -> None:
    """Raise ConfigError unless a file can be made there. Whether it exists is seen at the start."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise ConfigError(f"{text!r}: {what}; give a file to make")


def check_read_buffer(gib: float) -> None:
    """Raise ConfigError unless `gib` is a size; whether the device has room is known later."""
    if not 0 <= gib < float("inf"):
        raise ConfigError(f"must be 0 (off) or a number of GiB, got {gib:g}")


def check_remote_config(text: str) -> None:
    """Raise ConfigError unless `text` is a JSON object or names a file with one."""
    read_remote_config(text)


def read_remote_config(text: str | None) -> dict[str, object]:
    """The options of the remote store: a JSON object, or the path of a file that holds one."""
    if text is None:
        return {}
    where = "the text"
    if not text.lstrip().startswith("{"):
        where = text
        try:
            text = Path(text).expanduser().read_text()
        except OSError as error:
            raise ConfigError(
                f"{where!r} is neither a JSON object nor a file that can be read ({error.strerror})"
            ) from None
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must hold a JSON object, got {type(values).__name__}")
    return values


def check_profile(path: str) -> None:
    """Raise ConfigError unless `path` is a profile file; whose it is, is known with the model."""
    from sglang_hc.policy.cost_model import CostModelError
    from sglang_hc.profile_file import read_profile

    try:
        read_profile(path)
    except CostModelError as error:
        raise ConfigError(str(error)) from None


def check_ttl(seconds: float) -> None:
    """Raise ConfigError unless `seconds` is a time to live; 0 is for ever."""
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"must be seconds, or 0 for never, got {seconds:g}")


def _sum_of_counts(text: str) -> int:
    counts = [part.rpartition(":")[2] for part in text.split(",")]
    return sum(int(count) for count in counts if count.isdecimal())


@dataclass(frozen=True)
class HcConfig:
    """The options of one server: each field is a flag `--hc-NAME` and a field of CONFIG_ENV.

    Raises ConfigError for a value that cannot be used.
    """

    host_size_gb: float | None = options.number(
        None,
        f"host tier in GiB (default: {HOST_SHARE:.0%} of the free memory)",
        metavar="GIB",
        check=check_host_size,
    )
    forms: str = options.text(
        "auto",
        "auto, kv, hidden, or counts per form such as recompute:2,hidden:24,kv:6",
        metavar="PLAN",
        check=check_forms,
    )
    disable: bool = options.switch("plain SGLang without the tiers, for comparison")
    disk: tuple[str, ...] = options.texts(
        "keep blocks in this directory too; repeat for several SSDs",
        metavar="DIR[:SIZE_GB]",
        check=check_disk,
    )
    eviction: str = options.text(
        "queue",
        "what leaves first: what no waiting request needs, or by age or use",
        choices=("queue", "lru", "fifo", "lfu"),
    )
    prefetch: str = options.text(
        "queue",
        "when blocks are read from disk: ahead of a request's turn, when it arrives, never",
        choices=("queue", "on-arrival", "off"),
    )
    trace: str | None = options.text(
        None,
        "record what the tiers do in this file, for `sglang-hc replay`",
        metavar="FILE",
        check=check_trace,
    )
    read_buffer_gb: float | None = options.number(
        None,
        f"device memory in GiB for chunks of waiting requests, copied before their turn; 0 is off "
        f"(default: {READ_BUFFER_GIB:g}, without a GPU 0)",
        metavar="GIB",
        check=check_read_buffer,
    )
    remote: str | None = options.text(
        None,
        "keep blocks in a store that other servers share; one of SGLang's storage back ends",
        choices=REMOTES,
    )
    remote_config: str | None = options.text(
        None,
        "options of the remote store, as SGLang's --hicache-storage-backend-extra-config",
        metavar="JSON|FILE",
        check=check_remote_config,
    )
    profile: str | None = options.text(
        None,
        "what moving and computing cost here, a file of sglang-hc profile (default: measured at "
        "the first start, then cached)",
        metavar="FILE",
        check=check_profile,
    )
    ttl: float | None = options.number(
        None,
        "blocks not used for so long leave the host tier and the disk (default: never)",
        metavar="SECONDS",
        check=check_ttl,
    )

    io: str = options.text(
        "process",
        "what files snapshots and reads and writes disks: a process of its own, or threads of the "
        "scheduler's",
        choices=("process", "thread"),
    )
    schedule: str = options.text(
        "off",
        "ready-first admits requests whose state is in memory before those that wait for it",
        choices=("off", "ready-first"),
    )

    scrub_mb_s: float = options.number(
        16.0,
        "how much of what is on disk is read and verified in the background; 0 for nothing",
        metavar="MB_PER_S",
        check=check_scrub,
    )

    def __post_init__(self) -> None:
        options.check_values(self)
        if self.remote_config is not None and self.remote is None:
            raise ConfigError(
                "remote_config (--hc-remote-config) is for a remote store; name one with "
                f"--hc-remote, one of {', '.join(REMOTES)}"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], where: str) -> HcConfig:
        """Config from plain values. Raises ConfigError that names `where` and the field."""
        return cls(**options.read_mapping(cls, values, where))

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
        return cls(**options.read_args(cls, args))

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types: it travels in SGLang's server arguments and shows in /server_info."""
        values = asdict(self)
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the `--hc-*` flags."""
    group = parser.add_argument_group("sglang-hc", "the tiers below the GPU's radix cache")
    options.add_flags(HcConfig, group)


def host_bytes(config: HcConfig) -> int:
    """Size of the host tier in bytes."""
    if config.host_size_gb is not None:
        return int(config.host_size_gb * GIB)
    return int(available_memory() * HOST_SHARE)


def read_buffer_bytes(config: HcConfig, on_gpu: bool) -> int:
    """Size of the read buffer in bytes; 0 for none."""
    if config.read_buffer_gb is not None:
        return int(config.read_buffer_gb * GIB)
    return int(READ_BUFFER_GIB * GIB) if on_gpu else 0
