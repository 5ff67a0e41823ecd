"""How long does a history take to come back: recomputed, as KV, as hidden states, as planned?

    python benchmark/restore/run.py --shape llama-2-7b [--out FILE]
    python benchmark/restore/run.py --shape llama-2-7b --rehearse      # two layers, on a CPU

Arms, taken in turns: `recompute`; `kv` and `hidden` alone from host memory; `mix`, the layer plan
and the restore plan that the policies choose from what was measured here; `mix early`, the same
with the read buffer full, as after a wait in the queue; with --disk the loads once more, read from
that directory into host memory first, as a prefetch does. Beside each arm stands the bound: its
bytes over the copy bandwidth or its operations over the GEMM rate, whichever is more, both measured
in this process. A time runs from an idle device to the last layer's K/V in the pool.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ceilings import bound, copy_bandwidth, gemm_rate
from engine import ROOT, Engine, Stored
from from_disk import OnDisk
from measured import cost_model
from settings import REHEARSAL, SHAPES, make_shape

from sglang_hc.bench import machine
from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.auto_plan import NEW_TOKENS, auto_plan
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.model_shape import ModelShape
from sglang_hc.policy.restore_plan import Span
from sglang_hc.transfer.queue_view import Waiting
from sglang_hc.transfer.read_buffer import ReadBuffer, frames_for
from sglang_hc.transfer.restore_choice import RestoreChoice
from sglang_hc.tree.identity import pack_tokens

HISTORIES = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (256, 512, 1024)}
SINGLE = ("recompute", "kv", "hidden")
READ_BUFFER = 512 << 20
GOALS = {"llama-2-7b": {"kv": 2.1, "recompute": 4.4}}
"""HCache, Table 1 and Fig. 8 for the multi-head shape; for the others: never slower."""
OF_BOUND = 0.9


@dataclass(frozen=True)
class Arm:
    """`run` brings `history` tokens back; `plan` says what of it is recomputed, hidden and KV.

    before: what has happened already when a request is admitted; not timed.
    """

    history: int
    source: str
    name: str
    plan: LayerPlan
    run: Callable[[], object]
    before: Callable[[], object] = lambda: None


class Early:
    """A read buffer that has had all the time it needs."""

    def __init__(self, engine: Engine, stored: Stored) -> None:
        self._engine, self._stored = engine, stored
        frames = frames_for(READ_BUFFER, stored.layout, engine.device, engine.lane)
        self.buffer = ReadBuffer(stored.layout, stored.host, stored.pool, engine.lane, frames)

    def fill(self, history: int) -> None:
        self.buffer.clear()
        waiting = Waiting(None, pack_tokens(self._stored.tokens[:history]), 0)
        copied = -1
        while copied != self.buffer.counters["early_layer_tokens"]:
            copied = self.buffer.counters["early_layer_tokens"]
            self.buffer.look(["waiting"], lambda rid: waiting)
        self._engine.wait()
        self.buffer.poll()


def arms_of(
    engine: Engine, stored: dict[str, Stored], cost: CostModel, histories: Sequence[int],
    disks: dict[str, OnDisk],
) -> list[Arm]:  # fmt: skip
    layers, mix = engine.layers, stored["mix"]
    early = Early(engine, mix)
    arms = []
    for n in histories:
        choice = RestoreChoice(cost, mix.layout.plan, can_recompute=True, counters=Counter())
        chosen = choice.choose([Span(SourceTier.HOST, n)], context=0, new=NEW_TOKENS)
        again = chosen.recompute if chosen.tokens else layers
        rate = choice.kv_per_hidden(n)
        plan = mix.layout.plan
        hidden = max(0, plan.recompute + plan.hidden - again)
        run = LayerPlan(again, hidden, layers - again - hidden)
        arms += [
            Arm(n, "-", "recompute", LayerPlan(layers, 0, 0), _restore(stored["kv"], n, layers)),
            Arm(n, "host", "kv", LayerPlan(0, 0, layers), _restore(stored["kv"], n)),
            Arm(n, "host", "hidden", LayerPlan(0, layers, 0), _restore(stored["hidden"], n)),
            Arm(n, "host", "mix", run, _restore(mix, n, again, rate=rate)),
            Arm(
                n, "host", "mix early", run, _restore(mix, n, again, early.buffer, rate),
                lambda n=n: early.fill(n),
            ),
        ]  # fmt: skip
        for name, disk in disks.items():
            load = _restore(stored[name], n, again if name == "mix" else 0, rate=rate)
            arms.append(
                Arm(
                    n, "disk", name, arms[-2].plan if name == "mix" else stored[name].layout.plan,
                    lambda load=load, disk=disk, n=n: (disk.read(-(-n // BLOCK_TOKENS)), load()),
                )
            )  # fmt: skip
    return arms


def _restore(
    stored: Stored, history: int, recompute: int = 0, early: ReadBuffer | None = None,
    rate: float = 0.0,
) -> Callable[[], None]:  # fmt: skip
    return lambda: stored.restore(history, recompute, early=early, kv_per_hidden=rate)


def measure(engine: Engine, model: ModelShape, args: argparse.Namespace) -> dict[str, Any]:
    bandwidth, rate = copy_bandwidth(engine), gemm_rate(engine)
    layers, longest = engine.layers, max(args.histories)
    scattered = args.slots == "scattered"
    stored = {
        name: Stored(engine, plan, longest, scattered)
        for name, plan in (("kv", LayerPlan(0, 0, layers)), ("hidden", LayerPlan(0, layers, 0)))
    }
    cost = cost_model(engine, stored["kv"], stored["hidden"], args.histories)
    planned = auto_plan(
        cost, engine.shape, (SourceTier.HOST,), allow_hidden=True, allow_recompute=True
    )
    plan = planned.plan
    # A plan that stores nothing has nothing to bring back; what is planned then is recomputation.
    keeps = plan if plan.recompute < layers else LayerPlan(0, 0, layers)
    stored["mix"] = Stored(engine, keeps, longest, scattered)
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        disks = {}
        if args.disk:
            disks = {name: OnDisk(stored[name], f"{folder}/{name}") for name in ("kv", "mix")}
        arms = arms_of(engine, stored, cost, args.histories, disks)
        times: list[list[float]] = [[] for _ in arms]
        for turn in range(args.rounds + 1):  # the first pays for memory and for choosing kernels
            for arm, taken in zip(arms, times, strict=True):
                arm.before()
                seconds = engine.seconds(arm.run)
                if turn:
                    taken.append(seconds)
        for disk in disks.values():
            disk.close()
    rows = []
    for arm, taken in zip(arms, times, strict=True):
        least = bound(engine, model, arm.plan, arm.history, bandwidth, rate)
        median = statistics.median(taken)
        rows.append(
            {
                "history": arm.history,
                "source": arm.source,
                "arm": arm.name,
                "runs_as": str(arm.plan),
                "seconds": median,
                "all_seconds": taken,
                "bound_seconds": least,
                "of_bound": least / median,
            }
        )
    return {
        "copy_bytes_per_second": bandwidth,
        "gemm_operations_per_second": rate,
        "layer_plan": str(plan),
        "explanation": planned.explanation,
        "cost_model": json.loads(cost.to_json()),
        "complaints": list(cost.complaints()),
        "rows": rows,
    }


def goal_lines(result: dict[str, Any], shape: str) -> list[str]:
    """One line per goal and history: met, or missed."""
    table = {(row["history"], row["arm"]): row for row in result["rows"] if row["source"] != "disk"}
    lines = []
    for history in sorted({history for history, _ in table}):
        mix = table[history, "mix"]
        best = min(SINGLE, key=lambda arm: table[history, arm]["seconds"])
        goals = GOALS.get(shape, {}) | {best: GOALS.get(shape, {}).get(best, 1.0)}
        for rival, wanted in goals.items():
            ratio = table[history, rival]["seconds"] / mix["seconds"]
            verdict = "met" if ratio >= wanted else "MISSED"
            lines.append(f"{verdict}: {history} tokens, {ratio:.2f} times {rival}, goal {wanted:g}")
        verdict = "met" if mix["of_bound"] >= OF_BOUND else "MISSED"
        share = f"{mix['of_bound']:.2f} of its bound, goal {OF_BOUND:g}"
        lines.append(f"{verdict}: {history} tokens, {share}")
    return lines


def table(result: dict[str, Any]) -> list[str]:
    lines = ["history source arm         ms  of bound  runs as"]
    lines += [
        f"{row['history']:7} {row['source']:6} {row['arm']:9} {1e3 * row['seconds']:8.2f}"
        f"  {row['of_bound']:8.2f}  {row['runs_as']}"
        for row in result["rows"]
    ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--histories", type=_numbers, help="tokens, e.g. 1024,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", metavar="DIR", help="a source on disk too")
    parser.add_argument("--slots", choices=("scattered", "adjacent"), default="scattered")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--server-args", default="", help="further SGLang flags")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="where shapes go")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--rehearse", action="store_true", help="two layers, for a CPU")
    args = parser.parse_args()
    args.histories = args.histories or HISTORIES["cpu" if args.rehearse else "cuda"]
    flags = f"--load-format dummy --dtype {args.dtype} {args.server_args}"
    if args.rehearse:
        flags += f" {REHEARSAL}"
    folder = make_shape(args.shape, args.models)
    engine = Engine(folder, max(args.histories), shlex.split(flags))
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = engine.layers
    result = {
        "experiment": "restore",
        "command": shlex.join(["python", "benchmark/restore/run.py", *sys.argv[1:]]),
        "machine": machine.describe(),
        "settings": {
            "shape": args.shape,
            "layers": engine.layers,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "slots": args.slots,
            "rounds": args.rounds,
            "attention_backend": engine.runner.server_args.attention_backend,
        },
        **measure(engine, ModelShape.from_config(config), args),
    }
    title = "Goals on a GPU (this was a rehearsal)" if args.rehearse else "Goals"
    print("\n".join([*table(result), "", title, *goal_lines(result, args.shape)]))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
