"""Chats that come back after the KV pool has forgotten them."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from benchmark.harness import documents, experiment, metrics, options
from benchmark.harness.driver import Pace
from benchmark.harness.experiment import Show
from benchmark.harness.options import Setup
from benchmark.harness.points import Point
from benchmark.harness.workload import (
    ChatSpec,
    Distribution,
    clipped,
    is_timed,
    synthetic_chat,
    with_arrivals,
    with_think,
)
from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.workloads.reading import Timing, read_trace
from sglang_hc.tools.workloads.sessions import Workload
from sglang_hc.tools.workloads.traces import TraceError

_DEFAULTS = {
    "sessions": 64,
    "turns": "5",
    "input_len": "512",
    "output_len": "64",
    "think": "0",
    "system_len": 0,
    "rates": None,
    "repeat": 3,
    "servers": "turns",
    "host_size_gb": 4.0,
    "max_len": 1 << 20,
}
_QUICK = {
    "arms": "stock,hicache,kv,hidden,auto",
    "sessions": 5,
    "turns": "3",
    "system_len": 704,
    "input_len": "64",
    "output_len": "12",
    "max_total_tokens": 1536,
    "host_size_gb": 1.0,
    "repeat": 1,
    "servers": "together",
    "server_args": "--dtype float32",
    "round_barrier": True,
    "max_parallel": 1,
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    options.configure(parser, "out/multi-turn")
    chat = parser.add_argument_group(
        "chat",
        "distributions: a number, uniform:LOW:HIGH, exponential:MEAN, poisson:MEAN, "
        "lognormal:MEAN:SIGMA[:MAX], zipf:ALPHA:MAX",
    )
    chat.add_argument("--sessions", type=int, help="conversations (default 64)")
    chat.add_argument("--turns", help="turns of a session (default 5)")
    chat.add_argument("--input-len", help="new tokens of a turn (default 512)")
    chat.add_argument("--output-len", help="tokens of a reply (default 64)")
    chat.add_argument("--think", help="seconds between a reply and the next turn (default 0)")
    chat.add_argument("--system-len", type=int, help="tokens of the system prompt (default 0)")
    chat.add_argument(
        "--system-shared", action="store_true", help="one system prompt for all sessions"
    )
    chat.add_argument(
        "--dataset",
        metavar="[documents:]FILE",
        help="instead of made conversations: a trace (a server's --hc-trace, Mooncake or Bailian "
        "JSONL, BurstGPT CSV, ShareGPT JSON), or documents and questions about them",
    )
    chat.add_argument("--max-len", type=int, help="drop requests of more tokens, and what follows")
    pace = parser.add_argument_group("pace")
    pace.add_argument("--rates", help="sweep of session arrivals per second, e.g. 0.5,1,2,inf")
    pace.add_argument("--arrival", choices=("poisson", "uniform"), default="poisson")
    pace.add_argument(
        "--concurrency", help="sweep of concurrent users instead of rates, e.g. 1,2,4,8"
    )
    pace.add_argument("--max-parallel", type=int, help="sessions in flight at once")
    pace.add_argument(
        "--round-barrier",
        action="store_true",
        default=None,
        help="turn n+1 of any session waits for turn n of all",
    )
    pace.add_argument("--time-scale", type=float, default=1.0, help="stretch all times by this")


def run(args: argparse.Namespace, show: Show | None = None) -> int:
    """Run the benchmark. Returns the exit status. `show`: see experiment.execute."""
    options.apply_preset(args, _DEFAULTS, _QUICK)
    _check(args)
    setup = options.prepare(args)
    words = "concurrent users" if args.concurrency else "session arrivals per second"
    points = _points(args, setup)
    extra = {"sweep": words}
    return experiment.execute("multi-turn", setup, points, metrics.by_turn, extra=extra, show=show)


def _check(args: argparse.Namespace) -> None:
    for name in ("sessions", "max_parallel", "max_len"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
    if not args.time_scale > 0:
        raise UsageError("--time-scale must be positive")
    if args.system_len < 0:
        raise UsageError("--system-len must not be negative")
    if args.rates and args.concurrency:
        raise UsageError("--rates and --concurrency are two sweeps; give one of them")


def _points(args: argparse.Namespace, setup: Setup) -> list[Point]:
    pace = Pace(args.max_parallel, bool(args.round_barrier), args.time_scale)
    workloads = _Workloads(args, setup)
    if workloads.timed:
        if args.rates or args.concurrency:
            raise UsageError("--dataset brings its own arrival times: leave out the sweep")
        return [Point("trace", None, workloads.of(0, args.sessions, None), pace)]
    if args.concurrency:
        return [
            Point(f"users={count:g}", count, workloads.of(index, int(count), float("inf")), pace)
            for index, count in enumerate(_numbers(args.concurrency, "--concurrency"))
        ]
    points = []
    for index, rate in enumerate(_numbers(args.rates or "inf", "--rates")):
        finite = None if rate == float("inf") else rate
        made = workloads.of(index, args.sessions, rate)
        points.append(Point(f"rate={rate:g}", finite, made, pace, finite))
    return points


def _numbers(text: str, option: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} {text!r}: give numbers with commas between them") from None
    if not all(value > 0 for value in values) or len(set(values)) != len(values):
        raise UsageError(f"{option} {text!r}: give different positive numbers")
    if option == "--concurrency" and not all(value.is_integer() for value in values):
        raise UsageError(f"{option} {text!r}: give whole numbers")
    return values


class _Workloads:
    """Of one benchmark: made here, or from a file that is read once."""

    def __init__(self, args: argparse.Namespace, setup: Setup) -> None:
        self._args = args
        self._setup = setup
        self._think = Distribution.parse(args.think, "--think")
        self._file: Workload | None = None
        if args.dataset:
            self._file = clipped(read_dataset(args.dataset, setup, self._most()), args.max_len)
        else:
            self._spec = ChatSpec(
                sessions=args.sessions,
                turns=Distribution.parse(args.turns, "--turns"),
                input_len=Distribution.parse(args.input_len, "--input-len"),
                output_len=Distribution.parse(args.output_len, "--output-len"),
                think=self._think,
                system_len=args.system_len,
                system_shared=args.system_shared,
            )

    @property
    def timed(self) -> bool:
        return self._file is not None and is_timed(self._file)

    def _most(self) -> int:
        if not self._args.concurrency:
            return int(self._args.sessions)
        return int(max(_numbers(self._args.concurrency, "--concurrency")))

    def of(self, index: int, sessions: int, rate: float | None) -> Callable[[int], Workload]:
        """A function from the repeat to the workload of one point."""
        return functools.cache(lambda repeat: self._make(index, sessions, rate, repeat))

    def _make(self, index: int, sessions: int, rate: float | None, repeat: int) -> Workload:
        seed = [self._args.seed, index, repeat]
        if self._file is None:
            spec = dataclasses.replace(self._spec, sessions=sessions)
            made = clipped(synthetic_chat(spec, seed), self._args.max_len)
        else:
            made = dataclasses.replace(self._file, sessions=self._file.sessions[:sessions])
            if rate is not None:
                made = with_think(made, self._think, [*seed, 1])
        if rate is not None:
            made = with_arrivals(made, self._args.arrival, rate, [*seed, 2])
        return self._setup.vocabulary.spoken(made, seed)


def read_dataset(text: str, setup: Setup, limit: int) -> Workload:
    """The first `limit` sessions of what --dataset names. Raises UsageError."""
    kind, colon, name = text.partition(":")
    about_documents = bool(colon) and kind == "documents"
    path = Path(name if about_documents else text)
    try:
        if about_documents:
            sessions = documents.read(path, setup.tokenizer(), limit)
            return Workload(f"conversations about documents {path.name}", sessions)
        encode = lambda said: setup.tokenizer().encode(said)  # noqa: E731
        read = read_trace(path, Timing(), encode, limit)
    except OSError as error:
        raise UsageError(f"--dataset {text}: {error.strerror}") from None
    except TraceError as error:
        raise UsageError(f"--dataset {error}") from None
    # Where a trace has no times, --rates says when its sessions arrive.
    if is_timed(read):
        return read
    at_once = tuple(dataclasses.replace(s, arrival=0.0) for s in read.sessions)
    return dataclasses.replace(read, sessions=at_once)
