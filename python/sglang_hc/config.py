"""Every option of the server once: flag, type, default, help, and a check with a clear message."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from sglang_hc.errors import ConfigError, decode_json
from sglang_hc.memory import GIB, available_memory
from sglang_hc.option_checks import (
    check_disk,
    check_drop,
    check_forms,
    check_host_size,
    check_keep_first,
    check_profile,
    check_read_buffer,
    check_remote_config,
    check_reserve,
    check_scrub,
    check_trace,
    check_ttl,
)

CONFIG_ENV = "SGLANG_HC_CONFIG"
"""JSON object with the fields of `HcConfig`; the channel for `sgl.Engine`, which has no flags."""

HOST_SHARE = 0.4
"""Share of the free memory that the host tier takes when no size is given."""

READ_BUFFER_GIB = 0.5
"""Size of the read buffer on a GPU when none is given: at 50 GB/s what the link brings in the 10 ms
of a decode step. Without a GPU nothing overlaps with the copies, and there is none."""

REMOTES = ("file", "mooncake", "nixl", "hf3fs", "eic", "simm", "mori", "dynamic")
"""SGLang's storage back ends that keep pages of bytes, whatever the pages hold."""


class HcConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of one server: each field is a flag `--hc-NAME` and a field of CONFIG_ENV.

    Raises ConfigError for a value that cannot be used. What each option means is in `FLAGS`.
    """

    host_size_gb: float | None = None
    forms: str = "auto"
    disable: bool = False
    disk: tuple[str, ...] = ()
    eviction: str = "queue"
    prefetch: str = "queue"
    trace: str | None = None
    read_buffer_gb: float | None = None
    remote: str | None = None
    remote_config: str | None = None
    profile: str | None = None
    restore: str = "cost"
    ttl: float | None = None
    io: str = "process"
    schedule: str = "off"
    scrub_mb_s: float = 16.0
    overflow: str = "off"
    overflow_keep_first: int = 64
    overflow_drop: float = 0.5
    overflow_reserve: int = 1024
    exact: bool = False

    def __post_init__(self) -> None:
        for name, flag in FLAGS.items():
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else (value,):
                if one is not None:
                    flag.verify(name, one)
        if self.remote_config is not None and self.remote is None:
            raise ConfigError(
                "remote_config (--hc-remote-config) is for a remote store; name one with "
                f"--hc-remote, one of {', '.join(REMOTES)}"
            )

    @classmethod
    def from_mapping(cls, values: object, where: str) -> HcConfig:
        """Config from plain values. Raises ConfigError that names `where` and the field."""
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, ConfigError):  # a check of ours, reached by msgspec
                raise error.__cause__ from None
            known = f"; known are {', '.join(sorted(FLAGS))}" if "unknown" in str(error) else ""
            raise ConfigError(f"{where}: {error}{known}") from None

    @classmethod
    def from_json(cls, text: str, where: str = CONFIG_ENV) -> HcConfig:
        """Config from a JSON object. Raises ConfigError."""
        return cls.from_mapping(decode_json(text, object, where), where)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> HcConfig:
        """Config from parsed `--hc-*` flags."""
        given: dict[str, Any] = {}
        for name in FLAGS:
            value = getattr(args, f"hc_{name}")
            given[name] = tuple(value) if isinstance(value, list) else value
        return cls(**given)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types: it travels in SGLang's server arguments and shows in /server_info."""
        plain: dict[str, object] = msgspec.to_builtins(self)
        return {n: list(v) if isinstance(v, tuple) else v for n, v in plain.items()}


class Flag(NamedTuple):
    """How one field of HcConfig appears on the command line.

    check: raises ConfigError for a value that cannot be used; it does not name the option.
    """

    help: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    check: Callable[[Any], None] | None = None

    def verify(self, name: str, value: object) -> None:
        """Raise ConfigError that names the field and the flag."""
        try:
            if self.choices is not None and value not in self.choices:
                raise ConfigError(f"{value!r} is not one of {', '.join(self.choices)}")
            if self.check is not None:
                self.check(value)
        except ConfigError as error:
            raise ConfigError(f"{name} ({flag_of(name)}): {error}") from None


FLAGS: dict[str, Flag] = {
    "host_size_gb": Flag(
        f"host tier in GiB (default: {HOST_SHARE:.0%} of the free memory)",
        metavar="GIB",
        check=check_host_size,
    ),
    "forms": Flag(
        "auto, kv, hidden, or counts per form such as recompute:2,hidden:24,kv:6",
        metavar="PLAN",
        check=check_forms,
    ),
    "disable": Flag("plain SGLang without the tiers, for comparison"),
    "disk": Flag(
        "keep blocks in this directory too; repeat for several SSDs",
        metavar="DIR[:SIZE_GB]",
        check=check_disk,
    ),
    "eviction": Flag(
        "what leaves first: what no waiting request needs, or by age or use",
        choices=("queue", "lru", "fifo", "lfu"),
    ),
    "prefetch": Flag(
        "when blocks are read from disk: ahead of a request's turn, when it arrives, never",
        choices=("queue", "on-arrival", "off"),
    ),
    "trace": Flag(
        "record what the tiers do in this file, for `sglang-hc replay`",
        metavar="FILE",
        check=check_trace,
    ),
    "read_buffer_gb": Flag(
        "device memory in GiB for chunks of waiting requests, copied before their turn; 0 is off "
        f"(default: {READ_BUFFER_GIB:g}, without a GPU 0)",
        metavar="GIB",
        check=check_read_buffer,
    ),
    "remote": Flag(
        "keep blocks in a store that other servers share; one of SGLang's storage back ends",
        choices=REMOTES,
    ),
    "remote_config": Flag(
        "options of the remote store, as SGLang's --hicache-storage-backend-extra-config",
        metavar="JSON|FILE",
        check=check_remote_config,
    ),
    "profile": Flag(
        "what moving and computing cost here, a file of sglang-hc profile (default: measured at "
        "the first start, then cached)",
        metavar="FILE",
        check=check_profile,
    ),
    "restore": Flag(
        "what is restored: what is faster than recomputing it by the measured costs, or every hit",
        choices=("cost", "always"),
    ),
    "ttl": Flag(
        "blocks not used for so long leave the host tier and the disk (default: never)",
        metavar="SECONDS",
        check=check_ttl,
    ),
    "io": Flag(
        "what files snapshots and reads and writes disks: a process of its own, or threads of the "
        "scheduler's",
        choices=("process", "thread"),
    ),
    "schedule": Flag(
        "ready-first admits requests whose state is in memory before those that wait for it",
        choices=("off", "ready-first"),
    ),
    "scrub_mb_s": Flag(
        "how much of what is on disk is read and verified in the background; 0 for nothing",
        metavar="MB_PER_S",
        check=check_scrub,
    ),
    "overflow": Flag(
        "a prompt longer than the context window: SGLang's own answer, or its head and its end are "
        "kept, cut so that later turns find what earlier ones left",
        choices=("off", "recompute"),
    ),
    "overflow_keep_first": Flag(
        "tokens at the start of a prompt that are never cut; at least a block",
        metavar="TOKENS",
        check=check_keep_first,
    ),
    "overflow_drop": Flag(
        "share of the window that one cut drops",
        metavar="SHARE",
        check=check_drop,
    ),
    "overflow_reserve": Flag(
        "tokens of the window that a cut leaves for the answer at least",
        metavar="TOKENS",
        check=check_reserve,
    ),
    "exact": Flag(
        "restore only what comes back bit by bit: KV form, and what a check at start proves"
    ),
}
"""Every option once, in the order of `--help`; the types and defaults are `HcConfig`'s."""


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--hc-{name.replace('_', '-')}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the `--hc-*` flags."""
    group = parser.add_argument_group("sglang-hc", "the tiers below the GPU's radix cache")
    for field in msgspec.structs.fields(HcConfig):
        flag = FLAGS[field.name]
        option: dict[str, Any] = {"help": flag.help.replace("%", "%%")}
        if field.type is bool:
            option["action"] = "store_true"
        else:
            option |= {"metavar": flag.metavar, "choices": flag.choices, "default": field.default}
            option["type"] = _reader(flag.check, _PARSERS.get(field.type, str))
            if field.default == ():
                option |= {"action": "append", "default": []}
        group.add_argument(flag_of(field.name), **option)


_PARSERS: dict[Any, Callable[[str], Any]] = {float: float, float | None: float, int: int}


def _reader(
    check: Callable[[Any], None] | None, parse: Callable[[str], Any]
) -> Callable[[str], Any]:
    """An argparse type that reports a failed check in argparse's own way."""

    def read(text: str) -> Any:
        try:
            value = parse(text)
        except ValueError:
            kind = "a whole number" if parse is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {kind}, got {text!r}") from None
        try:
            if check is not None:
                check(value)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return read


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
