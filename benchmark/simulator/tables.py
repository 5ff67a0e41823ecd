"""Write the tables of README.md from the committed results.

    python -m benchmark.simulator.tables [--check]

--check changes nothing and exits with 1 if the page does not show what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmark.simulator.pairs import committed
from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.layer_plan import served_seconds
from sglang_hc.tools.datasheet import Rates, modelled_costs
from sglang_hc.tools.model_shape import ModelShape
from sglang_hc.tools.price_file import sample_prices
from sglang_hc.tools.simulator.calibration import JUDGED, calibrate
from sglang_hc.tools.workloads.agents import TOOLS

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
PAGE = HERE / "README.md"

Runs = list[dict[str, Any]]
Rows = list[list[str]]


def load(part: str) -> Runs:
    runs: Runs = json.loads((RESULTS / f"simulator-{part}.json").read_text())["runs"]
    return runs


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def find(runs: Runs, **wanted: Any) -> dict[str, Any]:
    (run,) = (r for r in runs if all(r[k] == v for k, v in wanted.items()))
    return run


def figures(part: str) -> Runs:
    """Runs of one figure, with those of Falcon at the other window."""
    wanted = {
        "models": ("models",),
        "tiers": ("hbm", "hbm+dram"),
        "truncation": ("recompute", "off"),
    }
    return load(part) + [run for run in load("falcon") if run["tiers"] in wanted[part]]


PAPER = {
    "13": {"llama-13b": 86.0, "llama-65b": 71.0, "llama-70b": 89.0, "falcon-40b": 90.0},
    "14": {"llama-13b": 85.0, "llama-65b": 61.0, "llama-70b": 87.0, "falcon-40b": 86.0},
    "15": {"llama-13b": 6.8, "llama-65b": 2.6, "llama-70b": 7.8, "falcon-40b": 7.2},
    "16": {"llama-13b": 4.0, "llama-65b": 1.9, "llama-70b": 3.3, "falcon-40b": 3.4},
    "17": {"llama-13b": 70.0, "llama-65b": 43.0, "llama-70b": 66.0, "falcon-40b": 68.0},
    "22": {"llama-13b": 17.6, "llama-65b": 41.5, "llama-70b": 18.1, "falcon-40b": 18.4},
    "24": {"llama-13b": 3.4, "llama-65b": 1.7, "llama-70b": 7.7, "falcon-40b": 19.1},
}
"""By figure of AttentionStore and model: percent, points lost (22), times faster (15, 16)."""


def with_falcon(paper: dict[str, float]) -> dict[str, float]:
    """The paper does not say which window Falcon had, so it was run with two."""
    return {**paper, "falcon-40b, 4K": paper["falcon-40b"]}


def shares(run: dict[str, Any]) -> list[str]:
    return [percent(run[key]) for key in ("turn_hit_rate", "hit_rate", "restored_share")]


def hit_and_restored(run: dict[str, Any]) -> str:
    return f"{percent(run['hit_rate'])} ({percent(run['restored_share'])})"


def models() -> str:
    """Figures 13, 22 and 24. Cells: what the paper says, what we find, and what was restored."""
    kept, lost, tiers = figures("models"), figures("truncation"), figures("tiers")
    figure_13, figure_22, figure_24 = (with_falcon(PAPER[name]) for name in ("13", "22", "24"))
    rows: Rows = []
    for name, said in figure_13.items():
        best = find(kept, model=name)
        points = percent(best["hit_rate"] - find(lost, model=name, arm="recompute")["hit_rate"])
        above = find(tiers, model=name, tiers="hbm+dram")
        turns, _, restored = shares(best)
        rows.append(
            [
                name,
                f"{said:g}, {turns} ({restored})",
                f"{figure_22[name]:g}, {points}",
                f"{figure_24[name]:g}, {hit_and_restored(above)}",
            ]
        )
    head = ["model", "13: turns %", "22: token points lost", "24: tokens % without SSD"]
    return table(head, rows)


def whole() -> str:
    """One experiment and an eighth of it."""
    rows = [
        [f"{run['sessions']:,}", *shares(run), f"{100 * run['prefill_share']:.2f}"]
        for run in load("whole")
    ]
    return table(["sessions", "turns %", "tokens %", "restored %", "prefill %"], rows)


def times_runs() -> Runs:
    """By model, arm and set of assumptions."""
    names = {
        "models": ("queue", "published"),
        "published none": ("none", "published"),
        "fitted queue": ("queue", "fitted"),
        "fitted none": ("none", "fitted"),
    }
    falcon = [run for run in load("falcon") if run["tiers"] in names]
    runs = [{**run, "arm": "queue", "set": "published"} for run in load("models")]
    runs += load("times")
    for run in falcon:
        arm, assumed = names[run["tiers"]]
        runs.append({**run, "arm": arm, "set": assumed})
    return runs


def gpu_seconds(run: dict[str, Any]) -> float:
    return float(run["prefill_seconds"] + run["decode_seconds"])


def times() -> str:
    """Figures 14 to 17. Cells: the paper, published assumptions, fitted ones."""
    runs, rows, prices = times_runs(), [], sample_prices()
    for name, gain in with_falcon(PAPER["16"]).items():
        cells: dict[str, list[str]] = {"14": [], "15": [], "16": [], "17": []}
        for assumed in ("published", "fitted"):
            kept = find(runs, model=name, arm="queue", set=assumed)
            none = find(runs, model=name, arm="none", set=assumed)
            faster = gpu_seconds(none) / gpu_seconds(kept)
            cells["14"].append(f"{none['service_ttft_mean'] / kept['service_ttft_mean']:.1f}")
            cells["15"].append(f"{none['prefill_seconds'] / kept['prefill_seconds']:.1f}")
            cells["16"].append(f"{faster:.2f}")
            gpus = 2 if name == "llama-13b" else 4
            cells["17"].append(percent(prices.saved(faster, gpus, 128e9, 10e12)))
        shorter = 1 / (1 - with_falcon(PAPER["14"])[name] / 100)
        said = [f"{shorter:.1f}", f"{with_falcon(PAPER['15'])[name]:g}", f"{gain:g}"]
        said.append(f"{with_falcon(PAPER['17'])[name]:g}")
        rows.append(
            [name, *(", ".join([s, *ours]) for s, ours in zip(said, cells.values(), strict=True))]
        )
    head = ["model", "14: TTFT", "15: prefill", "16: GPU time", "17: cost saved %"]
    return table(head, rows)


MISTRAL = {
    "model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "sliding_window": 4096, "torch_dtype": "float16",
}  # fmt: skip


def long() -> str:
    """Figure 25: 28K tokens through Mistral-7B and its window, by the rates of the paper."""
    shape = ModelShape.from_config(MISTRAL)
    cost = modelled_costs("figure 25", shape, Rates(185e12, 1.6e12, 26e9, None))
    recomputed = shape.num_layers * cost.prefill_layer(28_000, 0)
    plan = LayerPlan(0, 0, shape.num_layers)
    restored = served_seconds(cost, plan, SourceTier.HOST, 28_000 - 64, 64)
    rows = [
        ["recompute", "2.5", f"{recomputed:.2f}"],
        ["K and V from host memory", "0.12", f"{restored:.3f}"],
        ["prefill faster", "22", f"{recomputed / restored:.0f}"],
    ]
    return table(["figure 25: 28K tokens, Mistral-7B", "paper s", "ours s"], rows)


def by_policy() -> Rows:
    paper = {(2_000, "queue"): "39.9", (2_000, "lru"): "12.9", (2_000, "fifo"): "9.5",
             (10_000, "lru"): "58", (10_000, "fifo"): "48"}  # fmt: skip
    runs = [run for run in load("policies") if (run["disk"], run["arm"]) in paper]
    return [
        [
            f"21: {run['arm']}, {run['disk'] / 1000:g} TB",
            paper[run["disk"], run["arm"]],
            *shares(run),
            percent(run["reusable_hit_rate"]),
        ]
        for run in sorted(runs, key=lambda run: run["disk"])
    ]


def by_capacity() -> Rows:
    runs = load("capacity")
    rows: Rows = []
    for ratio, said in ((0.1, "51"), (0.25, "98")):
        here = [run for run in runs if run["ratio"] == ratio]
        spread = []
        for rate in ("turn_hit_rate", "hit_rate", "restored_share", "reusable_hit_rate"):
            found = [run[rate] for run in here]
            spread.append(f"{percent(min(found))} to {percent(max(found))}")
        rows.append([f"23: RCC/CCpUT {ratio:g}", said, *spread])
    return rows


def policies() -> str:
    rows = [*by_policy(), *by_capacity()]
    head = ["figure: LLaMA-13B", "paper %", "turns %", "tokens %", "restored %", "of reusable %"]
    return table(head, rows)


def rounds() -> str:
    """When the policy matters."""
    usual = [{**run, "case": "usual"} for run in load("policies")]
    runs = (
        load("rounds")
        + usual
        + [
            {**run, "case": "usual", "arm": "queue", "disk": 10_000}
            for run in load("models")
            if run["model"] == "llama-13b"
        ]
    )
    paper = {(10_000, "queue"): "86", (10_000, "lru"): "58", (10_000, "fifo"): "48",
             (2_000, "queue"): "39.9", (2_000, "lru"): "12.9", (2_000, "fifo"): "9.5"}  # fmt: skip
    cases = {
        "longer, 10 TB": ("longer", 10_000),
        "longer, 2 TB": ("longer", 2_000),
        "as usual, 10 TB": ("usual", 10_000),
        "interactive, 64 + 300 GB": ("interactive", 300),
    }
    rows = []
    for label, (case, disk) in cases.items():
        cells = []
        for arm in ("queue", "lru", "fifo"):
            run = find(runs, case=case, disk=disk, arm=arm)
            said = paper.get((disk, arm)) if case == "longer" else None
            ours = f"{percent(run['turn_hit_rate'])} ({percent(run['restored_share'])})"
            cells.append(f"{said}, {ours}" if said else ours)
        rows.append([label, *cells])
    return table(["conversations", "queue", "lru", "fifo"], rows)


def writes() -> str:
    runs, rows = load("writes"), []
    for name in dict.fromkeys(run["load"] for run in runs):
        found = [find(runs, load=name, arm=arm) for arm in ("all", "second-use", "5e12")]
        everything = found[0]["disk_written_gb"]
        cells = [
            f"{hit_and_restored(one)}, {percent(one['disk_written_gb'] / everything)}"
            for one in found
        ]
        rows.append([name, f"{everything:,.0f}", *cells])
    arms = ("all", "second-use", "5 TB a day")
    return table(("load", "GB written with all", *arms), rows)


def bound() -> str:
    closed = [run for run in load("policies") if run["disk"] == 2_000]
    runs = [{**run, "case": "attentionstore, 2 TB"} for run in closed] + load("bound")
    cases = {run["case"] for run in runs}

    def found(case: str) -> list[dict[str, Any]]:
        return [find(runs, case=case, arm=arm) for arm in ("lru", "queue", "belady")]

    rows = []
    for case in dict.fromkeys(run["case"] for run in runs):
        if case.endswith((", double", ", queued")):
            continue
        gap = "-"
        if f"{case}, queued" in cases:
            _, queue, belady = (run["hit_rate"] for run in found(f"{case}, queued"))
            gap = f"{100 * (belady - queue):.1f}"
        lru, queued, best = found(case)
        cells = [hit_and_restored(lru), hit_and_restored(queued), percent(best["hit_rate"])]
        rows.append([case, *cells, gap])
    return table(["load", "lru %", "queue %", "clairvoyant %", "gap with a queue"], rows)


def tools() -> str:
    """What the load of agents assumes of tools."""
    rows = [
        [name or "none: the user", f"{tool.seconds:g}", f"{tool.spread:g}",
         f"{100 * tool.lost:g}", f"{tool.tokens:g}"]
        for name, tool in TOOLS.items()
    ]  # fmt: skip
    return table(["tool", "median pause, s", "spread", "lost %", "tokens of its result"], rows)


def pauses() -> str:
    """Agents with tools. Cells: hit tokens, and in brackets restored ones."""
    runs, rows = load("pauses"), []
    for name, dram in dict.fromkeys((run["load"], run["dram"]) for run in runs):
        here = [run for run in runs if (run["load"], run["dram"]) == (name, dram)]
        hits = {run["arm"]: run["hit_rate"] for run in here}
        pins = [percent(rate) for arm, rate in hits.items() if arm.startswith("pin")]
        gained = hits["learned"] - hits["queue"]
        closed = gained / (hits["belady"] - hits["queue"])
        cells = [hit_and_restored(find(here, arm=arm)) for arm in ("queue", "learned")]
        cells += [percent(hits["belady"])]
        cells += [", ".join(pins) or "-", f"{100 * gained:+.1f}", f"{100 * closed:.0f} %"]
        rows.append([f"{name}, {dram:g} GB", *cells])
    head = ["load", "queue %", "learned %", "clairvoyant %", "pins of 3, 30, 300 s %"]
    return table([*head, "points gained", "of the distance"], rows)


ARMS = ("queue", "lru")
"""Policies that the table of assumptions compares."""


def sensitivity() -> str:
    runs = load("sensitivity")
    rows = [
        [variant, *(hit_and_restored(find(runs, variant=variant, arm=arm)) for arm in ARMS)]
        for variant in dict.fromkeys(run["variant"] for run in runs)
    ]
    return table(["assumption", *ARMS], rows)


def recorded() -> str:
    """Committed records beside the simulator: simulated, measured and their ratio."""
    rows: Rows = []
    for record in committed():
        found = calibrate(record, str(record.with_name("profile.json")))
        simulated, measured = found.simulated_throughput, found.measured_throughput
        first = [record.stem, f"{simulated:.2f}, {measured:.2f} ({found.throughput_ratio:.2f})"]
        for row in found.rows[1:]:
            cells = [
                f"{row.simulated[name]:.2f}, {row.measured[name]:.2f} ({row.ratios[name]:.2f})"
                for name in JUDGED
            ]
            rows.append([first[0], f"{row.turns}: {row.requests}", *cells, first[1]])
            first = ["", ""]
    return table(["server", "requests", "median TTFT, s", "p90 TTFT, s", "answered tokens/s"], rows)


TABLES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        models,
        whole,
        times,
        long,
        policies,
        rounds,
        writes,
        bound,
        tools,
        pauses,
        sensitivity,
        recorded,
    )
}


def render(page: str) -> str:
    """The page with every table between its markers made anew."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- table: {name} -->\n{TABLES[name]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if stale")
    args = parser.parse_args()
    page = PAGE.read_text()
    made = render(page)
    if args.check:
        if made != page:
            print(f"{PAGE}: tables are stale; run python -m benchmark.simulator.tables")
        return int(made != page)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
