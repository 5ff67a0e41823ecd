"""Questions about documents that were read before.

Shapes are the averages of HCache's Table 1 (L-Eval). The skew sweep is that of its Fig. 15:
documents arrive by Zipf popularity, so that a growing share is still on the device.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmark.harness import experiment, metrics, options
from benchmark.harness.driver import Pace
from benchmark.harness.options import Setup
from benchmark.harness.points import Point
from benchmark.harness.workload import zipf_weights
from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.workloads.l_eval import TASKS, ContextTask
from sglang_hc.tools.workloads.sessions import FreshIds, Session, Span, Turn, Workload

MIXED = "mixed"

_DEFAULTS = {
    "tasks": "assistant,gsm100,quality,mixed",
    "zipf": "0,0.5,1.0,1.5,2.0",
    "contexts": 8,
    "requests": 64,
    "scale": 1.0,
    "repeat": 3,
    "servers": "turns",
    "host_size_gb": 16.0,
}
_QUICK = {
    "arms": "stock,hicache,kv,hidden,auto",
    "tasks": "gsm100,mixed",
    "zipf": "0,1.0,2.0",
    "contexts": 5,
    "requests": 16,
    "scale": 0.08,
    "max_total_tokens": 1536,
    "host_size_gb": 1.0,
    "repeat": 1,
    "servers": "together",
    "server_args": "--dtype float32",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    options.configure(parser, "out/long-context")
    work = parser.add_argument_group("work")
    work.add_argument(
        "--tasks", help=f"of {', '.join(TASKS)}, {MIXED}; empty for the skew sweep alone"
    )
    work.add_argument("--zipf", help="skews of the sweep, e.g. 0,1,2; empty for the tasks alone")
    work.add_argument("--contexts", type=int, help="documents of every point (default 8)")
    work.add_argument("--requests", type=int, help="questions of every skew (default 64)")
    work.add_argument("--scale", type=float, help="shrink all lengths, e.g. 0.125 on a CPU")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark. Returns the exit status."""
    options.apply_preset(args, _DEFAULTS, _QUICK)
    for name in ("contexts", "requests", "scale"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name} must be positive")
    tasks = _words(args.tasks)
    unknown = [task for task in tasks if task not in TASKS and task != MIXED]
    if unknown:
        raise UsageError(f"--tasks {unknown[0]!r}: give {', '.join(TASKS)} or {MIXED}")
    skews = _skews(args.zipf)
    if not tasks and not skews:
        raise UsageError("--tasks and --zipf are both empty: nothing is left to run")
    setup = options.prepare(args)
    points = _points(setup, tasks, skews)
    note = {"sweep": "Zipf skew of document popularity", "lengths": "task averages, constant"}
    return experiment.execute("long-context", setup, points, metrics.by_label, extra=note)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _skews(text: str) -> list[float]:
    try:
        skews = [float(word) for word in _words(text)]
    except ValueError:
        raise UsageError(f"--zipf {text!r}: give numbers with commas between them") from None
    if any(not 0 <= skew < float("inf") for skew in skews):
        raise UsageError(f"--zipf {text!r}: give numbers from 0 up")
    return skews


def _points(setup: Setup, tasks: Sequence[str], skews: Sequence[float]) -> list[Point]:
    args = setup.args
    one_by_one = Pace(max_parallel=1)

    def point(index: int, name: str, value: float | None, task: str, skew: float | None) -> Point:
        @functools.cache
        def workload(repeat: int) -> Workload:
            documents = Documents(args.contexts, args.scale)
            if skew is None:
                made = documents.once_each(task)
            else:
                chance = np.random.default_rng([args.seed, repeat]).random(args.requests)
                made = documents.by_zipf(skew, chance)
            return setup.vocabulary.spoken(made, [args.seed, index, repeat])

        return Point(name, value, workload, one_by_one)

    made = [point(index, task, None, task, None) for index, task in enumerate(tasks)]
    return made + [
        point(len(tasks) + index, f"zipf={skew:g}", skew, MIXED, skew)
        for index, skew in enumerate(skews)
    ]


class Documents:
    """Makes workloads of one session: every document once, unmeasured, then measured questions."""

    def __init__(self, contexts: int, scale: float) -> None:
        self._contexts = contexts
        self._scale = scale
        self._fresh = FreshIds()

    def once_each(self, task: str) -> Workload:
        """Every document is asked about once, in the order in which they were read."""
        documents = self._read(task)
        asked = [self._question(document, task) for document in documents]
        source = f"{task}: {self._contexts} documents, one question each, lengths x {self._scale:g}"
        return self._workload(source, documents, asked)

    def by_zipf(self, skew: float, chance: npt.NDArray[np.float64]) -> Workload:
        """Questions about documents of all tasks, one for every number of `chance` in [0, 1).

        Skews that share `chance` differ by popularity alone, not by luck.
        """
        documents = self._read(MIXED)
        ends = np.cumsum(zipf_weights(len(documents), skew))
        drawn = np.minimum(np.searchsorted(ends, chance, side="right"), len(documents) - 1)
        asked = [self._question(documents[i], f"zipf={skew:g}") for i in drawn.tolist()]
        source = (
            f"{len(chance)} questions about {self._contexts} documents, Zipf {skew:g}, "
            f"lengths x {self._scale:g}"
        )
        return self._workload(source, documents, asked)

    def _read(self, task: str) -> list[tuple[ContextTask, Span]]:
        names = list(TASKS)
        shapes = [
            TASKS[task if task != MIXED else names[i % len(names)]] for i in range(self._contexts)
        ]
        return [(shape, self._span(shape.context)) for shape in shapes]

    def _question(self, document: tuple[ContextTask, Span], label: str) -> Turn:
        shape, context = document
        said = (context, self._span(shape.question))
        return Turn(said, self._span(shape.answer), label=label)

    def _span(self, tokens: float) -> Span:
        return self._fresh.span(max(1, round(tokens * self._scale)))

    def _workload(
        self, source: str, documents: Sequence[tuple[ContextTask, Span]], asked: list[Turn]
    ) -> Workload:
        read = [
            Turn((context,), Span(0, 1), label="reading", measured=False)
            for _, context in documents
        ]
        return Workload(source, (Session(0.0, (*read, *asked), whole=True),))
