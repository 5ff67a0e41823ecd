"""What reading layer by layer from disk gains over whole blocks, by the cost model.

    python -m benchmark.restore.streaming_gain [--measured RESULT] [--out FILE]

Nothing is measured here. For data sheets of GPUs with one, two and four SSDs, and for a machine
that from_source.py has measured (its RESULT), the time to the first token is computed of

    meeting   the front is computed and the end read in whole blocks, restored as they come or
              when all are here
    server    what the server does: the last blocks are read layer by layer where that is faster
    streamed  all layers are read in order, so that the forward pass follows them; the best number
              of first layers is recomputed meanwhile

and of the bound: the largest of what disk, link and compute have to do for the best head of the
tokens to compute and the best number of layers to recompute of the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark.gpu.settings import SHAPES
from sglang_hc import profile_file
from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.cost_model import CostModel, SourceTier, TierCopy
from sglang_hc.policy.fit import Fit
from sglang_hc.policy.layer_plan import auto_plan
from sglang_hc.policy.makespan import LayerTimes, work_and_chain
from sglang_hc.policy.meeting import History, Span, best_split, from_below
from sglang_hc.policy.restore_plan import plan_restore
from sglang_hc.tools.bench import cells
from sglang_hc.tools.datasheet import datasheet_costs, load_hardware
from sglang_hc.tools.model_shape import ModelShape

NEW = 64
HISTORIES = (1024, 4096, 16384)
SSD_GBPS = 6.9
SSDS = (1, 2, 4)
LINKS = {"A100-40G": 26.0, "H200": 50.0}
"""GPU, and GB/s of its link as it is reached."""

DISK, HOST = SourceTier.DISK, SourceTier.HOST


class Case:
    """One history on a disk, `NEW` tokens behind it."""

    def __init__(self, cost: CostModel, plan: LayerPlan, history: int) -> None:
        self.cost, self.plan, self.history = cost, plan, history
        self.layers = plan.num_layers
        self.new = self.layers * cost.prefill_layer(NEW, history)

    def seconds(self) -> dict[str, float]:
        cost, plan, history = self.cost, self.plan, self.history
        host = plan_restore(cost, plan, history, context=0, new=NEW)
        met = History(0, [Span(DISK, history)], 0, NEW)
        heads = range(0, history + 1, BLOCK_TOKENS)
        return {
            "recompute": self.layers * cost.prefill_layer(history + NEW, 0),
            "serial": cost.copy_stored(DISK, plan, history) + host.as_stored_seconds,
            "meeting": best_split(cost, plan, met).seconds,
            "server": best_split(cost, plan, from_below(DISK, history, NEW)).seconds,
            "streamed": min(map(self.streamed, range(plan.recompute, self.layers))),
            "bound": min(self.bound(h, r) for h in heads for r in range(self.layers)),
        }

    def streamed(self, first: int) -> float:
        """Layers before `first` are recomputed; disk, link and compute pass the others on."""
        cost, plan = self.cost, self.plan
        disk, host = self._copies(DISK), self._copies(HOST)
        hidden, kv = self._loaded(first)
        project = cost.project_kv(self.history) if hidden else 0.0
        if cost.overlap:
            copy_hidden, copy_kv = (max(ways) for ways in zip(disk, host, strict=True))
            start = min(disk[0], host[0]) if hidden else min(disk[1], host[1])
        else:  # the thread that computes also copies from host memory: as a projection does
            copy_hidden, copy_kv, start = *disk, 0.0
            project += host[0] if hidden else 0.0
            if kv:
                assert not plan.hidden, "on a CPU only single forms are computed"
                hidden, kv, copy_hidden, project = kv, 0, disk[1], host[1]
        times = LayerTimes(
            copy_hidden=copy_hidden,
            copy_kv=copy_kv,
            project=project,
            recompute=cost.prefill_layer(self.history, 0),
            new=cost.prefill_layer(NEW, self.history),
            start=start,
        )
        return max(work_and_chain(times, first, hidden, kv))

    def bound(self, head: int, first: int) -> float:
        """Disk, link and compute never wait for each other."""
        if head == self.history:
            return self.layers * self.cost.prefill_layer(self.history + NEW, 0)
        disk, link, compute = self._busy(head, max(first, self.plan.recompute))
        return max(disk, link, compute + self.new)

    def _busy(self, head: int, first: int) -> tuple[float, ...]:
        """Seconds of disk, link and compute when the first `head` tokens are computed and the
        others restored, layers before `first` by recomputing them. Where nothing overlaps the
        link's work is the compute's."""
        cost, rest = self.cost, self.history - head
        hidden, kv = self._loaded(first)
        disk, link = (
            hidden * copies[0] + kv * copies[1]
            for copies in (self._copies(DISK, rest), self._copies(HOST, rest))
        )
        compute = self.layers * cost.prefill_layer(head, 0)
        compute += first * cost.prefill_layer(rest, head)
        compute += hidden * cost.project_kv(rest) if hidden else 0.0
        return (disk, link, compute) if cost.overlap else (disk, 0.0, compute + link)

    def _loaded(self, first: int) -> tuple[int, int]:
        """Layers of each form from `first` on."""
        kv = min(self.plan.kv, self.layers - first)
        return self.layers - first - kv, kv

    def _copies(self, tier: SourceTier, tokens: int | None = None) -> tuple[float, float]:
        tokens = self.history if tokens is None else tokens
        hidden = self.cost.copy_hidden(tier, tokens) if self.plan.hidden else 0.0
        return hidden, self.cost.copy_kv(tier, tokens)


def of_data_sheets() -> Iterator[dict[str, Any]]:
    """The layer plan is the one that a server with this hardware would choose."""
    for gpu, link in LINKS.items():
        for name in ("llama-2-7b", "llama-3.1-8b"):
            config = {"model_type": "llama", **SHAPES[name].arguments}
            shape = ModelShape.from_config(config, "bfloat16")
            for ssds in SSDS:
                gbps = ssds * SSD_GBPS
                cost = datasheet_costs(load_hardware(gpu), shape, link * 1e9, gbps * 1e9)
                plan = auto_plan(
                    cost, shape.state_shape(), (HOST, DISK), allow_hidden=True, allow_recompute=True
                ).plan
                for history in HISTORIES:
                    yield row_of(f"{gpu}, {link:g} GB/s", name, gbps, Case(cost, plan, history))


def of_measured(path: Path) -> Iterator[dict[str, Any]]:
    """The cells of a benchmark, at the rates that it used."""
    result = json.loads(path.read_text())
    where = f"{result['machine']['cpu']}, one thread"
    for row in result["rows"]:
        if row["arm"] != "overlapped" or not row["source"].startswith("bucket"):
            continue
        counts = [int(part.partition(":")[2]) for part in row["form"].split(",")]
        plan = LayerPlan.parse(row["form"], sum(counts))
        cost = profile_file.decode(json.dumps(result["profiles"][row["form"]]), str(path))
        stored_layers = plan.hidden + plan.kv
        rate = row["source_gbps"] * 1e9
        per_token = row["token_bytes"] / stored_layers / rate
        copy = TierCopy(Fit(0.0, per_token), Fit(0.0, per_token) if cost.project else None)
        cost = replace(cost, copies={**cost.copies, DISK: copy})
        yield row_of(where, result["model"], row["source_gbps"], Case(cost, plan, row["history"]))


def row_of(machine: str, model: str, gbps: float, case: Case) -> dict[str, Any]:
    seconds = case.seconds()
    return {
        "machine": machine,
        "model": model,
        "plan": str(case.plan),
        "source_gbps": round(gbps, 4),
        "history": case.history,
        **{f"{arm}_ms": round(1e3 * value, 2) for arm, value in seconds.items()},
        "meeting_over_server": round(seconds["meeting"] / seconds["server"], 3),
        "server_over_bound": round(seconds["server"] / seconds["bound"], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measured", type=Path, help="a result of from_source.py")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = list(of_data_sheets())
    if options.measured is not None:
        rows += of_measured(options.measured)
    shown = ("recompute", "serial", "meeting", "server", "streamed", "bound")
    for row in rows:
        times = "  ".join(f"{arm} {row[f'{arm}_ms']:8.1f}" for arm in shown)
        print(
            f"{row['machine']:20} {row['model']:12} {row['plan']:22} "
            f"{row['source_gbps']:7.4g} GB/s {row['history']:5}  {times}  "
            f"{row['meeting_over_server']:.2f}"
        )
    if options.out is not None:
        told = {"command": cells.own_command(), "new_tokens": NEW, "rows": rows}
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
