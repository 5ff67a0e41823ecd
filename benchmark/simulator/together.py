"""Several restorations in one pass: first come, each for itself, or what ends their batch first.

    python -m benchmark.simulator.together --out benchmark/results/simulator-together.json

Modelled. The first table is of one batch (`policy.batch`), the second of a simulated server past
its capacity cliff, where each pass has restorations of several conversations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmark.cliff import in_midst
from benchmark.harness import machine
from benchmark.harness.cells import rounded
from benchmark.harness.workload import ChatSpec, Distribution, synthetic_chat
from sglang_hc.forms import LayerPlan
from sglang_hc.policy.batch import Load, Way, batch_ends, first_come, shared
from sglang_hc.policy.cost_model import CostModel
from sglang_hc.policy.restore_plan import plan_restore
from sglang_hc.tools.simulator import costs
from sglang_hc.tools.simulator.engine import Serving
from sglang_hc.tools.simulator.models import load_model
from sglang_hc.tools.simulator.run import Setup, simulate

MODELS = {"llama-13b": (1024, 4096), "llama-70b": (4096,)}
"""Histories in tokens: 13B has K and V of all heads, 70B grouped queries on four GPUs."""

AT_ONCE = (2, 4, 8)
REST = 64
USERS, TURNS, SYSTEM, INPUT, OUTPUT = 64, 6, 3072, 128, 64
POOL_SHARE = 4
"""The pool holds so much less than all conversations."""

Policy = Callable[[CostModel, LayerPlan, Sequence[Load], Sequence[tuple[int, int]]], Way]


def alone(
    cost: CostModel, stored: LayerPlan, loads: Sequence[Load], new: Sequence[tuple[int, int]]
) -> Way:
    """Each as if it had link and compute for itself."""
    return tuple(load.recompute for load in loads)


POLICIES: dict[str, Policy] = {"first come": first_come, "each alone": alone, "together": shared}


def batches(name: str) -> list[list[str]]:
    """Milliseconds of a batch of equal restorations, by policy."""
    model = load_model(name)
    cost, stored = costs.ATTENTIONSTORE_MACHINE.costs(model), model.layout.plan
    rows = []
    for tokens in MODELS[name]:
        plan = plan_restore(cost, stored, tokens, context=0, new=REST)
        for count in AT_ONCE:
            loads = [Load(tokens, 0, plan.recompute_layers)] * count
            new = [(REST, tokens)] * count
            ways = [policy(cost, stored, loads, new) for policy in POLICIES.values()]
            ends = batch_ends(cost, stored, loads, new, [*ways, (stored.recompute,) * count])
            rows.append([name, f"{tokens:,}", str(count), *(f"{1e3 * end:.1f}" for end in ends)])
    return rows


def served(name: str) -> list[list[str]]:
    """A server whose pool holds a quarter of the conversations, by policy."""
    model, tokens = load_model(name), SYSTEM + TURNS * (INPUT + OUTPUT)

    def fixed(value: float) -> Distribution:
        return Distribution("constant", (value,))

    spec = ChatSpec(USERS, fixed(TURNS), fixed(INPUT), fixed(OUTPUT), fixed(0), SYSTEM)
    setup = Setup(
        workload=in_midst(synthetic_chat(spec, [1]), USERS),
        model=model,
        dram=1e12,
        disk=0.0,
        kv_tokens=USERS * tokens // POOL_SHARE,
        serving=Serving(max_batch=USERS),
    )
    rows = []
    for policy, choose in POLICIES.items():
        with patch.object(costs, "shared", choose):
            found = simulate(setup).measures.as_json()
        values = (found["output_tokens_per_second"], found["ttft_p50"], found["ttft_p90"])
        rows.append([name, policy, *(f"{value:.2f}" for value in values)])
    return rows


def measure() -> dict[str, Any]:
    """The result with its tables."""
    head = ("model", "tokens", "at once", *POLICIES, "all loaded")
    return {
        **machine.about("together"),
        "tables": {
            "batch": {"columns": head, "rows": [row for name in MODELS for row in batches(name)]},
            "server": {
                "columns": ["model", "policy", "tokens/s", "TTFT p50, s", "TTFT p90, s"],
                "rows": [row for name in MODELS for row in served(name)],
            },
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="result as JSON (default: printed)")
    args = parser.parse_args()
    text = json.dumps(rounded(measure()), indent=1) + "\n"
    if args.out is None:
        print(text)
    else:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
