"""All prompts distinct, so that the tier can only cost."""

from __future__ import annotations

import argparse
import functools

from benchmark.harness import experiment, metrics, options
from benchmark.harness.driver import Pace
from benchmark.harness.options import Setup
from benchmark.harness.points import Point
from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.workloads.sessions import FreshIds, Session, Span, Turn, Workload

_SHAPES = ("decode-heavy", "prefill-heavy")
_DEFAULTS = {
    "arms": "stock,kv,hidden,auto",
    "decode_heavy": "64:256",
    "prefill_heavy": "2048:8",
    "batches": "1,4,16",
    "requests": 16,
    "repeat": 3,
    "servers": "turns",
    "host_size_gb": 4.0,
}
_QUICK = {
    "arms": "stock,kv,hidden,auto",
    "decode_heavy": "16:48",
    "prefill_heavy": "512:2",
    "batches": "1,4",
    "requests": 2,
    "max_total_tokens": 4096,
    "host_size_gb": 1.0,
    "repeat": 3,
    "servers": "together",
    "server_args": "--dtype float32",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    options.configure(parser, "out/overhead")
    work = parser.add_argument_group("work")
    work.add_argument("--decode-heavy", metavar="IN:OUT", help="tokens (default 64:256)")
    work.add_argument("--prefill-heavy", metavar="IN:OUT", help="tokens (default 2048:8)")
    work.add_argument("--batches", help="requests in flight, e.g. 1,4,16")
    work.add_argument("--requests", type=int, help="requests of every place in the batch")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark. Returns the exit status."""
    options.apply_preset(args, _DEFAULTS, _QUICK)
    if args.requests < 1:
        raise UsageError("--requests must be at least 1")
    lengths = [
        _lengths(text, f"--{name}")
        for name, text in zip(_SHAPES, (args.decode_heavy, args.prefill_heavy), strict=True)
    ]
    batches = _batches(args.batches)
    setup = options.prepare(args)
    points = [
        _point(setup, index, f"{name} batch={batch}", batch, lengths[shape])
        for index, (shape, name, batch) in enumerate(
            (shape, name, batch) for shape, name in enumerate(_SHAPES) for batch in batches
        )
    ]
    return experiment.execute("overhead", setup, points, metrics.by_label)


def _lengths(text: str, option: str) -> tuple[int, int]:
    words = text.split(":")
    if len(words) != 2 or not all(word.isdigit() and int(word) > 0 for word in words):
        raise UsageError(f"{option} {text!r}: give IN:OUT in tokens, e.g. 64:256")
    return int(words[0]), int(words[1])


def _batches(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise UsageError(f"--batches {text!r}: give positive whole numbers, e.g. 1,4,16")
    return list(dict.fromkeys(int(word) for word in words))


def _point(setup: Setup, index: int, name: str, batch: int, lengths: tuple[int, int]) -> Point:
    prompt_len, output_len = lengths
    args = setup.args

    @functools.cache
    def workload(repeat: int) -> Workload:
        fresh = FreshIds()

        def request() -> Turn:
            return Turn((fresh.span(prompt_len),), Span(0, output_len), label="all")

        sessions = tuple(
            Session(0.0, tuple(request() for _ in range(args.requests)), whole=True)
            for _ in range(batch)
        )
        source = f"distinct prompts of {prompt_len} tokens, replies of {output_len}"
        return setup.vocabulary.spoken(Workload(source, sessions), [args.seed, index, repeat])

    return Point(name, None, workload, Pace())
