"""How long does a history take to come back: recomputed, as KV, as hidden states, as planned?

    python -m benchmark.restore.run --shape llama-2-7b [--cells FILE]
    python -m benchmark.restore.run --shape llama-2-7b --rehearse      # tiny, on a CPU

Arms, taken in turns: `recompute`; `kv` and `hidden` alone from host memory; `mix`, the layer plan
and the restore plan that the policies choose from what the server measured at its start; with
--disk the loads once more, read from that directory into host memory first, as a prefetch does.
Beside each arm stands the bound: its bytes over the copy bandwidth or its operations over the GEMM
rate, whichever is more, both measured in this process. A time runs from an idle device to the last
layer's K/V in the pool. With --cells each history is kept as soon as it is measured, and not
measured again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmark import ROOT
from benchmark.gpu.settings import CONTEXT, SHAPES, make_shape, rehearsal
from benchmark.harness.cells import CellFile
from benchmark.restore.ceilings import bound, copy_bandwidth, gemm_rate
from benchmark.restore.engine import Engine, Stored
from benchmark.restore.from_disk import OnDisk
from benchmark.restore.goals import restore_lines
from sglang_hc import profile_file
from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.layer_plan import NEW_TOKENS, auto_plan
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.tools.model_shape import ModelShape

HISTORIES = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (128, 256)}
SLOTS = ("adjacent", "scattered")
ON_DISK = ("kv", "mix")


@dataclass(frozen=True)
class Arm:
    """`run` brings a history back; `plan` says what of it is recomputed, hidden and KV."""

    source: str
    name: str
    plan: LayerPlan
    run: Callable[[], object]


class Measurement:
    """Everything of one shape: what is stored, the plan, and the cells."""

    def __init__(self, engine: Engine, model: ModelShape, args: argparse.Namespace) -> None:
        self.engine, self.model, self.args = engine, model, args
        self.bandwidth, self.rate = copy_bandwidth(engine), gemm_rate(engine)
        self.planned = auto_plan(
            engine.cost, engine.shape, (SourceTier.HOST,), allow_hidden=True,
            allow_recompute=engine.recomputer is not None,
        )  # fmt: skip
        self._stack = ExitStack()
        self._stored: dict[str, Stored] = {}
        self._disks: dict[str, OnDisk] = {}

    def __enter__(self) -> Measurement:
        folder = self.args.disk and self._stack.enter_context(
            tempfile.TemporaryDirectory(dir=self.args.disk)
        )
        layers, longest = self.engine.layers, max(self.args.histories)
        plan = self.planned.plan
        # A plan that stores nothing has nothing to bring back; recomputation is planned then.
        keeps = plan if plan.recompute < layers else LayerPlan(0, 0, layers)
        plans = {"kv": LayerPlan(0, 0, layers), "hidden": LayerPlan(0, layers, 0), "mix": keeps}
        for name, kept in plans.items():
            disk = f"{folder}/{name}" if folder and name in ON_DISK else None
            stored = Stored(self.engine, kept, longest, disk)
            self._stored[name] = self._stack.enter_context(closing(stored))
            if disk is not None:
                self._disks[name] = OnDisk(stored, stored.history("adjacent"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def facts(self) -> dict[str, Any]:
        """What all rows of this shape share."""
        cost = self.engine.cost
        return {
            "copy_bytes_per_second": self.bandwidth,
            "gemm_operations_per_second": self.rate,
            "layer_plan": str(self.planned.plan),
            "explanation": self.planned.explanation,
            "beside_the_compute_stream": self.engine.side_stream is not None,
            "cost_model": json.loads(profile_file.encode(cost)),
        }

    def arms(self, slots: str, n: int) -> list[Arm]:
        """What brings `n` tokens back; with a disk, recomputation and what comes from there."""
        layers, stored, mix = self.engine.layers, self._stored, self._stored["mix"]
        can = self.engine.recomputer is not None
        choice = RestorePlanner(self.engine.cost, mix.layout.plan, can, Counter())
        chosen = choice.choose(n, context=0, new=NEW_TOKENS)
        again = chosen.recompute_layers if chosen.tokens or not can else layers
        rate, plan = choice.kv_per_hidden(n), mix.layout.plan
        hidden = max(0, plan.recompute + plan.hidden - again)
        run = LayerPlan(again, hidden, layers - again - hidden)

        def load(name: str, recompute: int = 0) -> None:
            stored[name].restore(n, slots, recompute, rate if name == "mix" else 0.0)

        arms = []
        if can:
            whole = LayerPlan(layers, 0, 0)
            arms.append(Arm("-", "recompute", whole, lambda: load("kv", layers)))
        if self._disks:
            for name, at in (("kv", 0), ("mix", again)):
                done = stored[name].layout.plan if name == "kv" else run
                arms.append(Arm("disk", name, done, partial(self._read, name, slots, n, at)))
            return arms
        return [
            *arms,
            Arm("host", "kv", LayerPlan(0, 0, layers), lambda: load("kv")),
            Arm("host", "hidden", LayerPlan(0, layers, 0), lambda: load("hidden")),
            Arm("host", "mix", run, lambda: load("mix", again)),
        ]

    def _read(self, name: str, slots: str, n: int, recompute: int) -> None:
        stored = self._stored[name]
        self._disks[name].read(stored.history(slots), -(-n // BLOCK_TOKENS))
        stored.restore(n, slots, recompute)

    def row(self, arm: Arm, slots: str, n: int, taken: list[float]) -> dict[str, Any]:
        least = bound(self.engine, self.model, arm.plan, n, self.bandwidth, self.rate)
        median = statistics.median(taken)
        return {
            "shape": self.args.shape,
            "layers": self.engine.layers,
            "dtype": self.engine.shape.dtype,
            "attention_backend": self.engine.runner.server_args.attention_backend,
            "slots": slots,
            "history": n,
            "source": arm.source,
            "arm": arm.name,
            "runs_as": str(arm.plan),
            "seconds": median,
            "all_seconds": taken,
            "bound_seconds": least,
            "of_bound": least / median,
        }


def key(args: argparse.Namespace, slots: str, history: int, source: str, arm: str) -> str:
    tiny = "tiny " if args.rehearse else ""
    return f"restore/{tiny}{args.shape}/{slots}/{history}/{source}/{arm}"


def measure(part: Measurement, slots: str, history: int, file: CellFile) -> list[dict[str, Any]]:
    """Times the arms of one history in turns, keeps and returns their rows. One that fails is kept
    as a failure and left out from then on."""
    began = time.monotonic()

    def name(arm: Arm) -> str:
        return key(part.args, slots, history, arm.source, arm.name)

    arms = [arm for arm in part.arms(slots, history) if not file.has(name(arm))]
    times: dict[str, list[float]] = {name(arm): [] for arm in arms}
    for turn in range(part.args.rounds + 1):  # the first pays for memory and for choosing kernels
        for arm in list(arms):
            seconds = timed(part.engine, arm, file, name(arm))
            if seconds is None:
                arms.remove(arm)
            elif turn:
                times[name(arm)].append(seconds)
    rows = [part.row(arm, slots, history, times[name(arm)]) for arm in arms]
    for arm, row in zip(arms, rows, strict=True):
        file.add(name(arm), row, time.monotonic() - began)
        print(
            f"{slots:9} {history:6} {arm.source:5} {arm.name:10} {1e3 * row['seconds']:9.2f} ms"
            f" {row['of_bound']:6.2f} of bound, {row['runs_as']}",
            flush=True,
        )
    return rows


def timed(engine: Engine, arm: Arm, file: CellFile, name: str) -> float | None:
    """Seconds of one run; None when it failed, which is kept."""
    try:
        return engine.seconds(arm.run)
    except Exception as error:
        file.failed(name, f"{type(error).__name__}: {error}", traceback.format_exc(), 0.0)
        print(f"{name} failed: {error}", flush=True)
        return None


def main() -> int:
    args = arguments()
    file = CellFile(args.cells, "restore")
    source, arms = ("disk", ON_DISK) if args.disk else ("host", ("kv", "hidden", "mix"))
    places = [(slots, history) for slots in args.slots for history in args.histories]
    todo = [p for p in places if not all(file.has(key(args, *p, source, arm)) for arm in arms)]
    if not todo:
        print(f"nothing left to measure: {args.cells} holds every row")
        return 0
    flags = f"--load-format dummy --dtype {args.dtype} {args.server_args}"
    if args.rehearse:
        flags += f" {rehearsal(args.shape)}"
    folder = make_shape(args.shape, args.models)
    engine = Engine(folder, max(args.histories), shlex.split(flags))
    config = engine.runner.model_config.hf_config.to_dict()
    rows: list[dict[str, Any]] = []
    with Measurement(engine, ModelShape.from_config(config), args) as part:
        file.add(key(args, "facts", max(args.histories), source, "-"), part.facts(), 0.0)
        for slots, history in todo:
            rows += measure(part, slots, history, file)
    title = "Goals on a GPU (this was a rehearsal)" if args.rehearse else "Goals"
    print("\n".join(["", title, *restore_lines(rows, args.shape)]))
    return 0 if all(file.has(key(args, *p, source, arm)) for p in todo for arm in arms) else 1


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--histories", type=_numbers, help="tokens, e.g. 1024,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", metavar="DIR", help="from a directory instead of host memory")
    parser.add_argument("--slots", type=_slots, default=SLOTS, help="adjacent, scattered or both")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--server-args", default="", help="further SGLang flags")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="where shapes go")
    parser.add_argument("--cells", type=Path, help="keep every row in this file, and go on with it")
    parser.add_argument("--rehearse", action="store_true", help="a shrunk shape, for a CPU")
    args = parser.parse_args(words)
    args.histories = args.histories or HISTORIES["cpu" if args.rehearse else "cuda"]
    if max(args.histories) > CONTEXT:
        parser.error(f"--histories {max(args.histories)}: the shapes have {CONTEXT} positions")
    return args


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _slots(text: str) -> tuple[str, ...]:
    words = tuple(text.split(","))
    if not set(words) <= set(SLOTS):
        raise argparse.ArgumentTypeError(f"{text}: give {','.join(SLOTS)} or one of them")
    return words


if __name__ == "__main__":
    sys.exit(main())
