"""Every option of the server once: flag, type, default, help, and a check with a clear message."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sglang_hc.errors import ConfigError, convert, decode_json
from sglang_hc.forms import LayerPlan
from sglang_hc.memory import GIB, available_memory, check_host_size
from sglang_hc.policy.eviction import POLICIES
from sglang_hc.policy.learned import LEARNED
from sglang_hc.policy.offload import check_size
from sglang_hc.policy.streaming import ThroughputSpec
from sglang_hc.policy.writing import WriteRule
from sglang_hc.profile_file import read_profile
from sglang_hc.store.disk import DirectoryError, DirectorySpec
from sglang_hc.store.ownership import read_remote_key

CONFIG_ENV = "SGLANG_HC_CONFIG"
"""JSON object with the fields of `HcConfig`; the channel for `sgl.Engine`, which has no flags."""

HOST_SHARE = 0.4
"""Share of the free memory that the host tier takes when no size is given."""

HOST_MOST_GIB = 256
"""Most of that for one scheduler process: it locks its share for the GPU in one call when it
starts, and nobody should wait minutes for a size that he did not ask for."""

FILE = "file"
"""The remote store that is a directory, kept as those of `--hc-disk`."""

REMOTES = (FILE, "mooncake", "nixl", "dynamic")
"""It, and those of SGLang's storage back ends that tests run."""


class HcConfig(msgspec.Struct, frozen=True):
    """The options of one server: each field is a flag `--hc-NAME` and a field of CONFIG_ENV.

    Raises ConfigError for a value that cannot be used. What each option means is in `FLAGS`.
    """

    host_size_gb: float | None = None
    forms: str = "auto"
    disable: bool = False
    disk: tuple[str, ...] = ()
    write: str = "all"
    eviction: str = "queue"
    prefetch: str = "queue"
    trace: str | None = None
    remote: str | None = None
    remote_config: str | None = None
    remote_key: str | None = None
    profile: str | None = None
    restore: str = "cost"
    ttl: float | None = None
    schedule: str = "off"
    overflow: str = "off"
    overflow_keep_first: int = 64
    overflow_drop: float = 0.5
    overflow_reserve: int = 1024
    exact: bool = False
    open_routes: bool = False
    audit: float = 0.001
    offload_gb: float | str = 0.0
    throughput: str | None = None

    def __post_init__(self) -> None:
        for name, flag in FLAGS.items():
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else (value,):
                if one is not None:
                    flag.verify(name, one)
        if self.overflow == "reembed":
            self._check_reembed()
        self.check_needs(self.changed())

    def changed(self) -> list[str]:
        """Names of the options that differ from their defaults."""
        fields = msgspec.structs.fields(HcConfig)
        return [field.name for field in fields if getattr(self, field.name) != field.default]

    def check_needs(self, given: Iterable[str]) -> None:
        """Raise ConfigError for an option of `given` that does nothing without another one."""
        for name in given:
            need = FLAGS[name].need
            if need is not None and not need.met(self):
                raise ConfigError(
                    f"{name} ({flag_of(name)}) does nothing without {need.flags}; add it, or leave "
                    f"{flag_of(name)} out"
                )

    def _check_reembed(self) -> None:
        if self.exact:
            raise ConfigError(
                "--hc-exact and --hc-overflow reembed: state that has moved is not what a prefill "
                "of the cut prompt computes; use --hc-overflow recompute"
            )
        if self.prefetch == "off":
            raise ConfigError(
                "--hc-prefetch off and --hc-overflow reembed: state moves ahead of a request's "
                "turn, as a prefetch does; leave one of the two out"
            )

    @classmethod
    def from_mapping(cls, values: object, where: str) -> HcConfig:
        """Config from plain values. Raises ConfigError that names `where` and the field."""
        unknown = set(values) - set(FLAGS) if isinstance(values, dict) else set()
        if unknown:
            names = ", ".join(sorted(map(str, unknown)))
            raise ConfigError(f"{where}: unknown {names}; known are {', '.join(sorted(FLAGS))}")
        return convert(values, cls, where)

    @classmethod
    def from_json(cls, text: str, where: str = CONFIG_ENV) -> HcConfig:
        """Config from a JSON object. Raises ConfigError."""
        return cls.from_mapping(decode_json(text, object, where), where)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types: it travels in SGLang's server arguments and shows in /server_info."""
        plain: dict[str, object] = msgspec.to_builtins(self)
        return {n: list(v) if isinstance(v, tuple) else v for n, v in plain.items()}


# Checks of single values. None of them names its option; `Flag.verify` does.


def _between(low: float, high: float, what: str) -> Callable[[float], None]:
    """A check that a number is finite and lies in [low, high]; `what` says so to the user."""

    def check(value: float) -> None:
        if not low <= value <= high or value == float("inf"):
            raise ConfigError(f"must be {what}, got {value:g}")

    return check


def _check_forms(text: str) -> None:
    """Raise ConfigError unless `text` reads as a plan; whether it fits is known with the model."""
    if text in ("auto", "kv", "hidden"):
        return
    counts = [part.rpartition(":")[2] for part in text.split(",")]
    LayerPlan.parse(text, sum(int(count) for count in counts if count.isdecimal()))


def check_disk(text: str) -> None:
    """Raise ConfigError unless `text` reads as DIR or DIR:SIZE_GB."""
    try:
        DirectorySpec.parse(text)
    except DirectoryError as error:
        raise ConfigError(str(error).removeprefix("--hc-disk ")) from None


def _check_trace(text: str) -> None:
    """Raise ConfigError unless a file can be made there. Whether it exists is seen at the start."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise ConfigError(f"{text!r}: {what}; give a file to make")


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
    return decode_json(text, dict[str, object], where)


def shared_directory(config: HcConfig) -> str | None:
    """The directory of `--hc-remote file`, as `--hc-disk` names one. Raises ConfigError."""
    if config.remote != FILE:
        return None
    options = read_remote_config(config.remote_config)
    directory = options.pop("dir", None)
    if not isinstance(directory, str) or options:
        raise ConfigError(
            "--hc-remote file needs a directory that all servers share, and takes nothing else: "
            """give --hc-remote-config '{"dir": "DIR[:SIZE_GB]"}'"""
        )
    try:
        check_disk(directory)
    except ConfigError as error:
        raise ConfigError(f"--hc-remote file: {error}") from None
    return os.path.expanduser(directory)


def refuse_same_directory(config: HcConfig) -> None:
    """Raise ConfigError when two directories are one, whatever they are called."""
    shared = shared_directory(config)
    given = [*config.disk, *([] if shared is None else [shared])]
    paths = [os.path.realpath(DirectorySpec.parse(text).path) for text in given]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(
                f"{path} is given more than once to --hc-disk and --hc-remote file; give each "
                "directory once"
            )


class Need(NamedTuple):
    """What an option has no effect without.

    met: whether it is there. flags: its flags, in words.
    """

    met: Callable[[HcConfig], bool]
    flags: str


_REMOTE = Need(lambda config: config.remote is not None, f"--hc-remote ({', '.join(REMOTES)})")
_BELOW = Need(
    lambda config: bool(config.disk) or config.remote is not None or config.overflow == "reembed",
    "--hc-disk, --hc-remote or --hc-overflow reembed",
)
_STORE = Need(
    lambda config: bool(config.disk) or config.remote is not None, "--hc-disk or --hc-remote"
)
_OFFLOAD = Need(lambda config: config.offload_gb != 0, "--hc-offload-gb")
_OVERFLOW = Need(lambda config: config.overflow != "off", "--hc-overflow recompute or reembed")


class Flag(NamedTuple):
    """How one field of HcConfig appears on the command line.

    check: raises ConfigError for a value that cannot be used; it does not name the option. need:
    None for an option that has an effect by itself.
    """

    help: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    check: Callable[[Any], object] | None = None
    need: Need | None = None

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
        f"size of the host tier in GiB (default: {HOST_SHARE:.0%} of the free memory, "
        f"at most {HOST_MOST_GIB} for each GPU)",
        "GIB",
        check=check_host_size,
    ),
    "forms": Flag(
        "form of each layer off the device: auto, kv, hidden, or counts such as "
        "recompute:2,hidden:24,kv:6",
        "PLAN",
        check=_check_forms,
    ),
    "disable": Flag("serve with plain SGLang, for comparison"),
    "disk": Flag(
        "keep full blocks in this directory too; repeat the flag for several SSDs (default size: "
        "80% of what is free)",
        "DIR[:SIZE_GB]",
        check=check_disk,
    ),
    "write": Flag(
        "which blocks go to disk and to a remote store: all, or those that are used a second time "
        "and others while such as they often are, or as far as so many bytes a day go",
        "all|second-use|BYTES_PER_DAY",
        check=WriteRule.parse,
        need=_STORE,
    ),
    "eviction": Flag(
        "what leaves a tier first: queue evicts what no waiting request needs, learned also looks "
        "at how long sessions of a kind stay away, lru is for comparison",
        choices=(*POLICIES, LEARNED),
    ),
    "prefetch": Flag(
        "when blocks are read from disk: before a request's turn (queue), when it arrives, never",
        choices=("queue", "on-arrival", "off"),
        need=_BELOW,
    ),
    "trace": Flag(
        "record the load in this file; `sglang-hc simulate` and `capacity` read it",
        "FILE",
        check=_check_trace,
    ),
    "remote": Flag(
        "keep full blocks in a store that servers share: a directory (file) or one of SGLang's "
        "storage back ends",
        choices=REMOTES,
    ),
    "remote_config": Flag(
        "options of the remote store, as JSON or in a file",
        "JSON|FILE",
        check=read_remote_config,
        need=_REMOTE,
    ),
    "remote_key": Flag(
        "file of at least 16 secret bytes that the servers of a remote store share: blocks that "
        "were written without them are not served",
        "FILE",
        check=read_remote_key,
        need=_REMOTE,
    ),
    "profile": Flag(
        "costs of this machine, as `sglang-hc profile` writes them (default: measured at the "
        "first start, then cached)",
        "FILE",
        check=read_profile,
    ),
    "restore": Flag(
        "cost restores what is faster than recomputing it, always restores every hit",
        choices=("cost", "always"),
    ),
    "ttl": Flag(
        "remove blocks that nobody used for so long from host memory and disk (default: never)",
        "SECONDS",
        check=_between(0, float("inf"), "seconds, or 0 for never"),
    ),
    "schedule": Flag(
        "ready-first admits requests whose state is in memory before those that wait for it",
        choices=("off", "ready-first"),
    ),
    "overflow": Flag(
        "what happens to a prompt longer than the context window: off is SGLang's own answer, "
        "recompute keeps its head and its end, reembed also moves what is stored of them",
        choices=("off", "recompute", "reembed"),
    ),
    "overflow_keep_first": Flag(
        "tokens at the start of a prompt that are never cut, at least a block",
        "TOKENS",
        check=_between(0, float("inf"), "0 or more tokens"),
        need=_OVERFLOW,
    ),
    "overflow_drop": Flag(
        "share of the window that one cut drops",
        "SHARE",
        check=_between(0.05, 0.95, "a share from 0.05 to 0.95"),
        need=_OVERFLOW,
    ),
    "overflow_reserve": Flag(
        "tokens of the window that a cut leaves free for the answer, at least",
        "TOKENS",
        check=_between(1, float("inf"), "1 or more tokens"),
        need=_OVERFLOW,
    ),
    "exact": Flag(
        "restore only what comes back bit by bit: KV form, and what a check at start proves"
    ),
    "open_routes": Flag(
        "let everybody whom the server answers use /hc/* (default: only with --admin-api-key)"
    ),
    "audit": Flag(
        "share of the restored blocks that an idle server computes again and compares; 0 is off",
        "SHARE",
        check=_between(0, 1, "a share from 0 (off) to 1"),
    ),
    "offload_gb": Flag(
        "weights of decoder layers that lie in host memory and come to the device ahead of their "
        "layer; auto: those that do not fit beside --max-total-tokens",
        "GIB|auto",
        check=check_size,
    ),
    "throughput": Flag(
        "keep the state of running requests in host memory too, some of it as hidden states",
        "auto|SPEC",
        check=ThroughputSpec.parse,
        need=_OFFLOAD,
    ),
}
"""Every option once, in the order of `--help`; the types and defaults are `HcConfig`'s."""


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--hc-{name.replace('_', '-')}"


def host_bytes(config: HcConfig, processes: int = 1) -> int:
    """Size in bytes of the host tier of one of so many scheduler processes."""
    if config.host_size_gb is not None:
        return int(config.host_size_gb * GIB) // processes
    return min(int(available_memory() * HOST_SHARE) // processes, HOST_MOST_GIB * GIB)
