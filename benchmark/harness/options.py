"""Flags that every benchmark shares, and what they become."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmark import ROOT
from benchmark.harness import arms as arms_module
from benchmark.harness.arms import Arm, ServerSettings
from benchmark.harness.kept import KeptRuns
from benchmark.harness.metrics import Groups
from benchmark.harness.suite import SuiteSettings
from benchmark.harness.tokens import Tokenizer, load_tokenizer, load_vocabulary
from benchmark.harness.workload import Vocabulary, warm_up
from sglang_hc.tools.cli.main import UsageError

_WARM_UP = [2**31 - 1]
"""Seed of its content, which is in no other workload."""

DEFAULT_ARMS = "stock,hicache,kv,hidden,auto"


def configure(parser: argparse.ArgumentParser, output: str) -> None:
    """Add the shared flags. `output`: default folder of the results."""
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--base-url",
        action="append",
        metavar="[NAME=]URL",
        help="a running server; repeat to compare several (no --arms are started then)",
    )
    servers.add_argument(
        "--arms",
        help=f"servers to start and stop, first one is the reference: {DEFAULT_ARMS} (all by "
        "default), sglang-hc (its own defaults), hicache-layer-first, hicache-direct, or a layer "
        "plan with + between its parts, such as hidden:8+kv:4",
    )
    servers.add_argument("--model", help="model folder (--model-path of the servers)")
    servers.add_argument("--max-total-tokens", type=_positive, help="KV pool size in tokens")
    servers.add_argument("--host-size-gb", type=float, help="host tier in GiB (default 4 or 16)")
    servers.add_argument("--server-args", help="further flags for every arm, one quoted word")
    servers.add_argument(
        "--arm-args",
        action="append",
        default=[],
        metavar="ARM=FLAGS",
        help="further flags for one arm, e.g. hicache='--page-size 64'",
    )
    servers.add_argument(
        "--servers",
        choices=("turns", "together"),
        help="turns: one server at a time, restarted every repeat; together: all stay up and "
        "points alternate between them (needs the memory; one is busy at a time)",
    )
    client = parser.add_argument_group("client")
    client.add_argument("--tokenizer", help="tokenizer for text (default: --model)")
    client.add_argument(
        "--vocab-size", type=_positive, help="vocabulary size when --model is not at hand"
    )
    client.add_argument("--request-timeout", type=float, default=600.0, metavar="SECONDS")
    client.add_argument("--warmup", type=int, default=2, help="requests before the first point")
    client.add_argument(
        "--no-compare",
        action="store_true",
        help="do not compare outputs: requests that overlap are batched differently in every run, "
        "and rounding then parts even two runs of one server",
    )
    client.add_argument("--repeat", type=_positive, help="interleaved repeats of everything")
    client.add_argument("--seed", type=int, default=1)
    client.add_argument("--output", type=Path, default=Path(output), help="folder for results")
    client.add_argument(
        "--cells",
        type=Path,
        metavar="FILE",
        help="append every run to FILE as a line of JSON as soon as it is over, and do not run "
        "again what FILE holds",
    )
    client.add_argument(
        "--quick", action="store_true", help="small preset that ends in minutes on two CPU cores"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def apply_preset(
    args: argparse.Namespace, defaults: Mapping[str, Any], quick: Mapping[str, Any]
) -> None:
    """Fill flags the user did not give: from `quick` with --quick, else from `defaults`."""
    preset = {**defaults, **quick} if args.quick else defaults
    own = ("arms", "server_args") if args.base_url else ()  # flags of servers that we start
    for name, value in preset.items():
        if getattr(args, name) is None and name not in own:
            setattr(args, name, value)


@dataclasses.dataclass(frozen=True)
class Setup:
    """Arms and the client side, ready to run."""

    arms: list[Arm]
    skipped: list[str]
    vocabulary: Vocabulary
    tokenizer: Callable[[], Tokenizer]
    args: argparse.Namespace

    def kept(self, experiment: str, names: Groups) -> KeptRuns | None:
        """Where runs go as soon as they are over; None without --cells."""
        if self.args.cells is None:
            return None
        model = Path(self.args.model or "model").name
        return KeptRuns(self.args.cells, experiment, model, self.described(), names)

    def suite_settings(self, longest_prompt: int, kept: KeptRuns | None) -> SuiteSettings:
        """Settings of a run whose longest prompt has that many tokens."""
        args = self.args
        return SuiteSettings(
            repeat=args.repeat,
            together=args.servers == "together",
            output=args.output,
            warmup=self.vocabulary.spoken(warm_up(args.warmup, longest_prompt), _WARM_UP),
            timeout_s=args.request_timeout,
            kept=kept,
        )

    def described(self) -> dict[str, Any]:
        """The settings for the result file."""
        skip = ("run", "experiment", "output", "cells")
        return {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(self.args).items()
            if key not in skip and value is not None
        }


def prepare(args: argparse.Namespace) -> Setup:
    """Resolve the shared flags after the preset was applied. Raises UsageError."""
    if args.request_timeout <= 0:
        raise UsageError("--request-timeout must be positive")
    for name in ("warmup", "seed"):
        if getattr(args, name) < 0:
            raise UsageError(f"--{name} must not be negative")
    if args.host_size_gb <= 0:
        raise UsageError("--host-size-gb must be positive")
    if args.base_url:
        if args.arms or args.arm_args or args.server_args:
            raise UsageError(
                "--base-url asks running servers: leave out --arms, --arm-args and --server-args"
            )
        arms = arms_module.external_arms(args.base_url)
        skipped: list[str] = []
        model = args.model or _model_of(arms[0].url)
    else:
        model = args.model or demo_model(args.quick)
        args.model = model
        if not Path(model).is_dir():
            raise UsageError(f"--model {model}: no such folder; give the folder of the model")
        arms, skipped = arms_module.make_arms(
            (args.arms or DEFAULT_ARMS).split(","), _server_settings(args)
        )
    _make_output(args.output)
    vocabulary = Vocabulary(args.vocab_size) if args.vocab_size else load_vocabulary(model)
    return Setup(
        arms,
        skipped,
        vocabulary,
        functools.cache(lambda: load_tokenizer(args.tokenizer or model)),
        args,
    )


def _server_settings(args: argparse.Namespace) -> ServerSettings:
    return ServerSettings(
        model=args.model,
        host_size_gb=args.host_size_gb,
        max_total_tokens=args.max_total_tokens,
        extra=tuple(shlex.split(args.server_args or "")),
        per_arm=arms_module.parse_arm_args(args.arm_args),
    )


def _make_output(folder: Path) -> None:
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: cannot be made ({error.strerror})") from None


def _model_of(url: str) -> str:
    """Model path that a running SGLang tells, else its served name. Raises UsageError."""
    models = _get(url, "/v1/models").get("data") or [{}]
    found = _get(url, "/get_model_info").get("model_path") or models[0].get("id")
    if not found:
        raise UsageError(f"--base-url {url}: the server does not tell its model; give --model")
    return str(found)


def server_info(url: str) -> dict[str, Any]:
    """What the running server of a --base-url says of itself. Raises UsageError."""
    return _get(url, "/server_info")


def _get(url: str, path: str) -> dict[str, Any]:
    """JSON object of a route; empty when the server lacks it. Raises UsageError."""
    try:
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=30) as reply:
            value = json.load(reply)
    except (urllib.error.HTTPError, ValueError):
        return {}
    except OSError as error:
        raise UsageError(f"--base-url {url}: no server answers ({error})") from None
    return value if isinstance(value, dict) else {}


def demo_model(allowed: bool) -> str:
    """Folder of the demo model, made when it is not there.

    Raises UsageError when `allowed` is False, or it cannot be made.
    """
    if not allowed:
        raise UsageError("--model is needed: give the folder of a model (or use --quick)")
    folder = ROOT / "models" / "demo"
    if not (folder / "config.json").exists():
        print("making models/demo ...", flush=True)
        script = str(ROOT / "scripts" / "make_tiny_models.py")
        command = [sys.executable, script, "--only", "demo", "--output", str(folder.parent)]
        done = subprocess.run(command, check=False)
        if done.returncode != 0:
            raise UsageError(f"{shlex.join(command)} failed with status {done.returncode}")
    return str(folder)
