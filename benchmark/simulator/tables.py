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
    "22": {"llama-13b": 17.6, "llama-65b": 41.5, "llama-70b": 18.1, "falcon-40b": 18.4},
    "24": {"llama-13b": 3.4, "llama-65b": 1.7, "llama-70b": 7.7, "falcon-40b": 19.1},
}
"""Percent, or points lost, by figure of AttentionStore and model."""


def with_falcon(paper: dict[str, float]) -> dict[str, float]:
    """The paper does not say which window Falcon had, so it was run with two."""
    return {**paper, "falcon-40b, 4K": paper["falcon-40b"]}


def shares(run: dict[str, Any]) -> list[str]:
    return [percent(run["turn_hit_rate"]), percent(run["hit_rate"])]


def models() -> str:
    """Figures 13, 22 and 24. Cells: what the paper says, what we find."""
    kept, lost, tiers = figures("models"), figures("truncation"), figures("tiers")
    figure_13, figure_22, figure_24 = (with_falcon(PAPER[name]) for name in ("13", "22", "24"))
    rows: Rows = []
    for name, said in figure_13.items():
        best = find(kept, model=name)
        points = percent(best["hit_rate"] - find(lost, model=name, arm="recompute")["hit_rate"])
        above = percent(find(tiers, model=name, tiers="hbm+dram")["hit_rate"])
        rows.append(
            [
                name,
                f"{said:g}, {percent(best['turn_hit_rate'])}",
                f"{figure_22[name]:g}, {points}",
                f"{figure_24[name]:g}, {above}",
            ]
        )
    head = ["model", "13: turns %", "22: points lost", "24: tokens % without SSD"]
    return table(head, rows)


def by_policy() -> Rows:
    paper = {(2_000, "queue"): "39.9", (2_000, "lru"): "12.9", (2_000, "fifo"): "9.5",
             (10_000, "lru"): "58", (10_000, "fifo"): "48"}  # fmt: skip
    runs = [run for run in load("policies") if (run["disk"], run["arm"]) in paper]
    return [
        [
            f"21: {run['arm']}, {run['disk'] / 1000:g} TB",
            paper[run["disk"], run["arm"]],
            *shares(run),
        ]
        for run in sorted(runs, key=lambda run: run["disk"])
    ]


def by_capacity() -> Rows:
    runs = load("capacity")
    rows: Rows = []
    for ratio, said in ((0.1, "51"), (0.25, "98")):
        here = [run for run in runs if run["ratio"] == ratio]
        spread = []
        for rate in ("returning_turn_hit_rate", "reusable_hit_rate"):
            found = [run[rate] for run in here]
            spread.append(f"{percent(min(found))} to {percent(max(found))}")
        rows.append([f"23: RCC/CCpUT {ratio:g}", said, *spread])
    return rows


def policies() -> str:
    rows = [*by_policy(), *by_capacity()]
    return table(["figure: LLaMA-13B", "paper %", "turns %", "tokens %"], rows)


def bound() -> str:
    closed = [run for run in load("policies") if run["disk"] == 2_000]
    runs = [{**run, "case": "attentionstore, 2 TB"} for run in closed] + load("bound")
    cases = {run["case"] for run in runs}

    def rates(case: str) -> list[float]:
        return [find(runs, case=case, arm=arm)["hit_rate"] for arm in ("lru", "queue", "belady")]

    rows = []
    for case in dict.fromkeys(run["case"] for run in runs):
        if case.endswith((", double", ", queued")):
            continue
        _, queue, belady = rates(f"{case}, queued") if f"{case}, queued" in cases else (0, 0, 0)
        gap = f"{100 * (belady - queue):.1f}" if f"{case}, queued" in cases else "-"
        rows.append([case, *map(percent, rates(case)), gap])
    return table(["load", "lru %", "queue %", "clairvoyant %", "gap with a queue"], rows)


ARMS = ("queue", "lru")
"""Policies that the table of assumptions compares."""


def sensitivity() -> str:
    runs = load("sensitivity")
    rows = [
        [variant, *(percent(find(runs, variant=variant, arm=arm)["hit_rate"]) for arm in ARMS)]
        for variant in dict.fromkeys(run["variant"] for run in runs)
    ]
    return table(["assumption", *ARMS], rows)


TABLES: dict[str, Callable[[], str]] = {
    made.__name__: made for made in (models, policies, bound, sensitivity)
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
        return int(made != page)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
