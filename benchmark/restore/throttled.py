"""Does `auto` keep its promise on a CPU: from memory, and from sources of given speeds?

    python -m benchmark.restore.throttled --model MODEL [--out FILE]

Per source the machine is measured as a server does at its first start, `auto` chooses a layer plan,
and the restore plan what is done with one history. That restoration is timed against KV only,
hidden only and recomputation, interleaved, and the medians compared. The sources are host memory
and token buckets in front of it (benchmark/harness/throttled.py) whose rates follow from what was
measured: where hidden states balance with their projection, four times faster, four times slower.

The parts are the server's: restore passes over slots of a host pool, the adapter's projection, the
model's middle layer for prefill. Every layer of a pass goes to that one layer's scratch pool.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmark.harness import machine
from benchmark.harness.throttled import ThrottledCopyStream
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan
from sglang_hc.policy import copy_order
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.layer_plan import NEW_TOKENS, auto_plan
from sglang_hc.policy.restore_plan import Choice, plan_restore
from sglang_hc.restore.path import Restoration, RestorePath
from sglang_hc.restore.probe import Subject, probe
from sglang_hc.restore.restore_pass import RestorePass
from sglang_hc.restore.staging import StagingRing
from sglang_hc.store.host_pool import HostPool
from sglang_hc.tree.block_tree import BlockNode

TURN_S = 0.4


class OneLayer:
    """Every layer of a pass is written to the scratch pool's one layer."""

    def __init__(self, subject: Subject) -> None:
        self.sink = subject.sink

    def write_hidden(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self.sink.write_hidden(0, hidden, positions, slots)

    def write_kv(self, layer: int, parts: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        self.sink.write_kv(0, parts, slots)


class Restorer:
    """Runs restorations of `tokens` tokens under one plan, layers below `recompute` recomputed."""

    def __init__(
        self, subject: Subject, cost: CostModel, plan: LayerPlan, tokens: int, recompute: int
    ) -> None:
        self.subject, self.layers, self.tokens = subject, plan.num_layers, tokens
        self.recompute = recompute
        if recompute == plan.num_layers:
            return
        blocks = -(-tokens // BLOCK_TOKENS)
        layout = BlockLayout(plan, replace(subject.shape, num_layers=plan.num_layers))
        self.pool = HostPool(layout, blocks)
        self.pool.bytes[:] = 0
        nodes = [BlockNode(None, b"", b"", None) for _ in range(blocks)]
        for slot, node in enumerate(nodes):
            node.slot = slot
        slots = torch.arange(tokens)
        self.restoration = Restoration(tuple(nodes), 0, tokens, slots, recompute)
        self.kv_per_hidden = copy_order.kv_per_hidden(cost, tokens)

    def run(self) -> float:
        """Seconds of one restoration."""
        subject = self.subject
        begin = time.perf_counter()
        if self.recompute < self.layers:
            path = RestorePath(self.pool, OneLayer(subject), subject.staging)
            restore = RestorePass(path, [self.restoration], self.kv_per_hidden)
        for _ in range(self.recompute):
            subject.prefill(self.tokens, 0)
        for layer in range(self.recompute, self.layers):
            restore.wait(layer)
        return time.perf_counter() - begin


def measured(subject: Subject) -> CostModel:
    return probe(subject, "this benchmark")


def compare(subject: Subject, layers: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Measure, choose, then time the choice against the single forms."""
    cost = measured(subject)
    shape = replace(subject.shape, num_layers=layers)
    host = (SourceTier.HOST,)
    chosen = auto_plan(cost, shape, host, allow_hidden=True, allow_recompute=True)
    restore = plan_restore(cost, chosen.plan, tokens, context=0, new=NEW_TOKENS)
    refused = restore.choice is Choice.REFUSE
    plans = {
        "auto": (chosen.plan, layers if refused else restore.recompute_layers),
        "kv": (LayerPlan(0, 0, layers), 0),
        "hidden": (LayerPlan(0, layers, 0), 0),
        "recompute": (LayerPlan(layers, 0, 0), layers),
    }
    arms = {name: Restorer(subject, cost, plan, tokens, r) for name, (plan, r) in plans.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    # Short restorations are taken several times in their turn: on a shared machine few are noise.
    repeats = {name: max(1, round(TURN_S / arm.run())) for name, arm in arms.items()}
    for _ in range(rounds):
        for name, arm in arms.items():
            times[name] += [arm.run() for _ in range(repeats[name])]
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min(("kv", "hidden", "recompute"), key=medians.__getitem__)
    return {
        "layer_plan": str(chosen.plan),
        "decision": restore.choice.value,
        "recomputed_layers": plans["auto"][1],
        "explanation": chosen.explanation,
        "overlap": cost.overlap,
        "seconds": medians,
        "all_seconds": times,
        "best_single": best,
        "auto_over_best_single": medians["auto"] / medians[best],
    }


def sources(subject: Subject, tokens: int) -> dict[str, StagingRing]:
    """Frames behind host memory, and behind buckets around the rate at which hidden states arrive
    as they project."""
    cost = measured(subject)
    balance = subject.shape.hidden_bytes * 1024 / cost.project_kv(1024)
    rates = {"four times the balance": 4.0, "the balance": 1.0, "a quarter of it": 0.25}
    # As on a GPU: room for four layers of KV, which is what 256 MiB hold of a 7B model.
    frame = tokens * subject.shape.kv_bytes // 2
    found = {"host memory": subject.staging}
    for name, factor in rates.items():
        rate = factor * balance
        copies = ThrottledCopyStream(rate)
        found[f"{name}, {rate / 1e9:.3f} GB/s"] = StagingRing(8, frame, subject.device, copies)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/demo")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from sglang_hc.srt.model.scratch_layer import subject_of
    from sglang_hc.srt.ranks.start_group import StartGroup
    from sglang_hc.srt.start.calibrate_command import load_model

    loaded = load_model(options.model, ["--dtype", options.dtype])
    layers = loaded.runner.model_config.num_hidden_layers
    with torch.no_grad():
        alone = StartGroup.of_model()
        subject = subject_of(loaded.runner, loaded.layers, loaded.hidden, alone)
        result: dict[str, Any] = {}
        for name, staging in sources(subject, options.tokens).items():
            here = replace(subject, staging=staging)
            found = result[name] = compare(here, layers, options.tokens, options.rounds)
            millis = {arm: round(1e3 * s, 1) for arm, s in found["seconds"].items()}
            print(
                f"{name}: {found['layer_plan']}, {found['decision']}, {millis} ms, "
                f"auto {found['auto_over_best_single']:.2f} of the best single form"
            )
    report = {
        "command": machine.command(),
        "machine": machine.describe(),
        "threads": torch.get_num_threads(),
        "load_average_after": os.getloadavg()[0],
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "tokens": options.tokens,
        "sources": result,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
