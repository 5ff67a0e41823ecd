"""What is compared: one arm is one way to serve the same model."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmark.harness import machine
from sglang_hc.tools.cli.main import UsageError

HC_MODULE = "sglang_hc.launch_server"
SGLANG_MODULE = "sglang.launch_server"
WITHOUT_US = {"SGLANG_PLUGINS": "none"}
"""Environment of SGLang as it comes: this package, which is installed beside it, is not loaded."""
DEFAULTS = "sglang-hc"
"""The arm that is this package as it comes: forms chosen by the server."""
SGLANGS_ATTENTION = "stock-attention"
"""Without a GPU every arm, `stock` too, has this package's attention, which costs less behind a
cached prefix than SGLang's (`srt.model.cpu_attention`). This arm is `stock` without it."""
SGLANGS_ATTENTION_ENV = "SGLANG_HC_SGLANGS_ATTENTION"
NAMED = ("stock", SGLANGS_ATTENTION, DEFAULTS, "hicache", "kv", "hidden", "auto")
HICACHE: dict[str, tuple[str, ...]] = {
    "hicache": (),
    "hicache-layer-first": ("--hicache-mem-layout", "layer_first"),
    "hicache-direct": ("--hicache-io-backend", "direct"),
}
"""SGLang's hierarchical cache: as it comes, and its other ways to copy."""

_GIB = 1 << 30
_HICACHE_SKIPPED = (
    "left out, SGLang's hierarchical cache pins host memory with CUDA and does not start "
    "without a GPU"
)


@dataclass(frozen=True)
class Arm:
    """A server of one kind. url: set when it runs already and is not ours to start or stop."""

    name: str
    module: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""

    @property
    def command(self) -> str:
        """What to type to get this server, without host and port."""
        if self.url:
            return self.url
        env = [f"{key}={value}" for key, value in self.env.items()]
        return shlex.join([*env, "python", "-m", self.module, *self.args])


@dataclass(frozen=True)
class ServerSettings:
    """What all arms of one benchmark share.

    max_total_tokens: size of the KV pool in tokens, None for SGLang's own choice. host_size_gb:
    host tier of the arms that have one. extra: further flags for every arm. per_arm: further
    flags by arm name.
    """

    model: str
    host_size_gb: float
    max_total_tokens: int | None = None
    extra: tuple[str, ...] = ()
    per_arm: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def make_arms(
    names: Sequence[str], settings: ServerSettings, gpu: bool | None = None
) -> tuple[list[Arm], list[str]]:
    """(arms, sentences about the ones left out).

    A name is one of NAMED or HICACHE, or an explicit layer plan with `+` between its parts, such as
    `hidden:8+kv:4`. Raises UsageError for other names, doubles, and flags for absent arms.
    """
    gpu = machine.has_gpu() if gpu is None else gpu
    doubles = {name for name in names if names.count(name) > 1}
    if doubles:
        raise UsageError(f"--arms: {', '.join(sorted(doubles))} is named twice; name each arm once")
    unknown = [name for name in settings.per_arm if name not in names]
    if unknown:
        raise UsageError(
            f"--arm-args {unknown[0]}: no such arm in --arms {','.join(names)}; add it there"
        )
    arms, skipped = [], []
    for name in names:
        if name in HICACHE and not gpu:
            skipped.append(f"{name}: {_HICACHE_SKIPPED}")
        elif name == SGLANGS_ATTENTION and gpu:
            skipped.append(f"{name}: left out, with a GPU it is stock")
        else:
            arms.append(_arm(name, settings, gpu))
    if not arms:
        raise UsageError(f"--arms {','.join(names)}: nothing is left to run; {skipped[0]}")
    return arms, skipped


def _arm(name: str, settings: ServerSettings, gpu: bool) -> Arm:
    plain = name in HICACHE or (name == "stock" and gpu)
    own = _own_flags(name, settings, gpu)
    args = ["--model-path", settings.model, "--enable-cache-report", *own]
    if settings.max_total_tokens:
        args += ["--max-total-tokens", str(settings.max_total_tokens)]
    if not gpu:
        # An idle scheduler spins on a core otherwise, at the cost of the arm being measured.
        args.append("--sleep-on-idle")
    args += [*settings.extra, *settings.per_arm.get(name, ())]
    if plain:
        return Arm(name, SGLANG_MODULE, tuple(args), WITHOUT_US)
    env = {SGLANGS_ATTENTION_ENV: "1"} if name == SGLANGS_ATTENTION else {}
    return Arm(name, HC_MODULE, tuple(args), env)


def _own_flags(name: str, settings: ServerSettings, gpu: bool) -> list[str]:
    size = f"{settings.host_size_gb:g}"
    if name in ("stock", SGLANGS_ATTENTION):
        # Without a GPU plain SGLang needs the flags that our launcher chooses.
        return [] if gpu else ["--hc-disable"]
    if name in HICACHE:
        # Whole decimal GB there, GiB here: rounding up never gives HiCache less memory.
        whole_gb = str(math.ceil(settings.host_size_gb * _GIB / 10**9))
        return [
            *("--enable-hierarchical-cache", "--hicache-size", whole_gb),
            *("--hicache-write-policy", "write_through"),
            *HICACHE[name],
        ]
    if name == DEFAULTS:
        return ["--hc-host-size-gb", size]
    if name in NAMED or ":" in name:
        return ["--hc-forms", name.replace("+", ","), "--hc-host-size-gb", size]
    raise UsageError(
        f"--arms: {name!r} is no arm; give {', '.join(NAMED)} or a layer plan like hidden:8+kv:4"
    )


def external_arms(urls: Sequence[str]) -> list[Arm]:
    """Arms of `URL` or `NAME=URL`, which run already. Raises UsageError."""
    arms = []
    for number, text in enumerate(urls):
        name, equals, url = text.partition("=")
        if not equals or "://" in name:
            name, url = ("server" if len(urls) == 1 else f"server{number}"), text
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url {text!r}: give http://HOST:PORT or NAME=http://HOST:PORT")
        arms.append(Arm(name, url=url))
    names = [arm.name for arm in arms]
    if len(set(names)) != len(names):
        raise UsageError("--base-url: give every server its own NAME=URL")
    return arms


def parse_arm_args(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`ARM=FLAGS` words to flags by arm. Raises UsageError."""
    chosen: dict[str, tuple[str, ...]] = {}
    for word in words:
        name, equals, flags = word.partition("=")
        if not equals or not name:
            raise UsageError(f"--arm-args {word!r}: give ARM=FLAGS, e.g. hicache='--page-size 64'")
        chosen[name] = chosen.get(name, ()) + tuple(shlex.split(flags))
    return chosen
