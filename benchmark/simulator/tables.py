"""Write the tables of README.md from the committed results.

    python benchmark/simulator/tables.py [--check]

--check changes nothing and exits with 1 if the page does not show what the results say.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
PAGE = HERE / "README.md"

Rows = list[dict[str, Any]]


def load(part: str) -> Rows:
    runs: Rows = json.loads((RESULTS / f"simulator-{part}.json").read_text())["runs"]
    return runs


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def find(rows: Rows, **wanted: Any) -> dict[str, Any]:
    (row,) = (r for r in rows if all(r[k] == v for k, v in wanted.items()))
    return row


def figures(part: str) -> Rows:
    """Runs of one figure, with those of Falcon at the other window."""
    wanted = {"models": ("models",), "tiers": ("hbm", "hbm+dram"), "truncation": ("truncation",)}
    return load(part) + [run for run in load("falcon") if run["tiers"] in wanted[part]]


def with_falcon(paper: dict[str, float]) -> dict[str, float]:
    return {**paper, "falcon-40b, 4K": paper["falcon-40b"]}


def models() -> str:
    paper = {"llama-13b": 86.0, "llama-65b": 71.0, "llama-70b": 89.0, "falcon-40b": 90.0}
    runs = figures("models")
    rows = []
    for name, said in with_falcon(paper).items():
        run = find(runs, model=name)
        rows.append(
            [
                name,
                f"{said:g}",
                percent(run["turn_hit_rate"]),
                f"{100 * run['turn_hit_rate'] - said:+.1f}",
                percent(run["hit_rate"]),
                percent(run["returning_turns"] / run["turns"]),
                percent(run["dram_share_of_hits"]),
            ]
        )
    return table(
        [
            "model",
            "paper %",
            "turns %",
            "off by (points)",
            "tokens %",
            "turns with anything to reuse %",
            "of hits in DRAM %",
        ],
        rows,
    )


def policies() -> str:
    paper = {
        (2_000, "queue"): "39.9 / -",
        (2_000, "lru"): "12.9 / 0.5",
        (2_000, "fifo"): "9.5 / 0.5",
        (10_000, "queue"): "86 / 99.6 of hits",
        (10_000, "lru"): "58 / 0.6",
        (10_000, "fifo"): "48 / 0.5",
    }
    queue = find(load("models"), model="llama-13b")
    runs = [*load("policies"), {**queue, "arm": "queue", "disk": 10_000}]
    rows = [
        [
            f"{run['disk'] / 1000:g} TB",
            run["arm"],
            paper.get((run["disk"], run["arm"]), ""),
            percent(run["turn_hit_rate"]),
            percent(run["hit_rate"]),
            percent(run["dram_share_of_hits"]),
        ]
        for run in sorted(runs, key=lambda r: r["disk"])
    ]
    return table(
        ["SSD", "policy", "paper: all / DRAM %", "turns %", "tokens %", "of hits in DRAM %"], rows
    )


def tiers() -> str:
    paper = {"llama-13b": 3.4, "llama-65b": 1.7, "llama-70b": 7.7, "falcon-40b": 19.1}
    runs = figures("tiers")
    rows = []
    for name, said in with_falcon(paper).items():
        cells = [name]
        for label, value in (("hbm", "nearly 0"), ("hbm+dram", str(said))):
            run = find(runs, model=name, tiers=label)
            cells += [value, f"{percent(run['turn_hit_rate'])} / {percent(run['hit_rate'])}"]
        rows.append(cells)
    return table(
        [
            "model",
            "HBM: paper %",
            "turns / tokens %",
            "HBM + DRAM: paper %",
            "turns / tokens %",
        ],
        rows,
    )


def truncation() -> str:
    paper = {"llama-13b": 17.6, "llama-65b": 41.5, "llama-70b": 18.1, "falcon-40b": 18.4}
    kept, lost = figures("models"), figures("truncation")
    rows = []
    for name, said in with_falcon(paper).items():
        with_it = find(kept, model=name)
        without = find(lost, model=name)
        rows.append(
            [
                name,
                str(said),
                f"{100 * (with_it['turn_hit_rate'] - without['turn_hit_rate']):.1f}",
                f"{100 * (with_it['hit_rate'] - without['hit_rate']):.1f}",
            ]
        )
    return table(["model", "paper: points lost", "turns: points lost", "tokens"], rows)


def capacity() -> str:
    paper = {0.1: "51", 0.25: "98"}
    runs = load("capacity")
    pauses = sorted({run["pause"] for run in runs})
    rows = []
    for ratio in sorted({run["ratio"] for run in runs}):
        cells = [f"{ratio:g}", paper.get(ratio, "")]
        for pause in pauses:
            run = find(runs, ratio=ratio, pause=pause)
            turns, tokens = run["returning_turn_hit_rate"], run["reusable_hit_rate"]
            cells.append(f"{percent(turns)} / {percent(tokens)}")
        rows.append(cells)
    heads = [f"pauses of {pause} s: turns / tokens %" for pause in pauses]
    return table(["RCC / CCpUT", "paper %", *heads], rows)


def smaller() -> str:
    paper = {
        ("llama-13b", "queue"): 86,
        ("llama-65b", "queue"): 71,
        ("llama-70b", "queue"): 89,
        ("falcon-40b", "queue"): 90,
        ("llama-13b", "lru"): 58,
        ("llama-13b", "fifo"): 48,
    }
    full = load("models") + [r for r in load("policies") if r["disk"] == 10_000]
    rows = []
    for (model, arm), said in paper.items():
        found = [r for r in full if r["model"] == model and r["policy"] == arm]
        less = find(load("smaller"), model=model, arm=arm)["turn_hit_rate"]
        ten = found[0]["turn_hit_rate"]
        off = f"{100 * less - said:+.1f}"
        rows.append([model, arm, str(said), percent(ten), percent(less), off])
    return table(
        ["model", "policy", "paper, 10 TB %", "10 TB: turns %", "6 TB: turns %", "off by (points)"],
        rows,
    )


def bound() -> str:
    closed = [r for r in load("policies") if r["disk"] == 2_000]
    runs = [{**r, "case": "attentionstore, 2 TB"} for r in closed] + load("bound")
    rows = []
    for case in dict.fromkeys(run["case"] for run in runs):
        rate = {arm: find(runs, case=case, arm=arm) for arm in ("queue", "lru", "belady")}
        share = {arm: run["hit_rate"] for arm, run in rate.items()}
        rows.append(
            [
                case,
                f"{rate['queue']['dram_gb']:g} / {rate['queue']['disk_gb']:g}",
                percent(share["lru"]),
                percent(share["queue"]),
                percent(share["belady"]),
                f"{100 * (share['belady'] - share['queue']):.1f}",
                percent(rate["queue"]["reusable_share"]),
            ]
        )
    return table(
        [
            "workload",
            "DRAM / SSD GB",
            "lru %",
            "queue %",
            "clairvoyant %",
            "gap (points)",
            "endless cache %",
        ],
        rows,
    )


def sensitivity() -> str:
    runs = load("sensitivity")
    rows = []
    for variant in dict.fromkeys(run["variant"] for run in runs):
        cells = [variant]
        for arm in ("queue", "lru"):
            run = find(runs, variant=variant, arm=arm)
            cells.append(f"{percent(run['turn_hit_rate'])} / {percent(run['hit_rate'])}")
        cells.append(percent(find(runs, variant=variant, arm="queue")["reusable_share"]))
        rows.append(cells)
    return table(
        ["assumption", "queue: turns / tokens %", "lru: turns / tokens %", "endless cache %"], rows
    )


TABLES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (models, policies, smaller, bound, capacity, tiers, sensitivity, truncation)
}


def render(page: str) -> str:
    """The page with every table between its markers made anew."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- table: {name} -->\n{TABLES[name]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


def main() -> int:
    page = PAGE.read_text()
    made = render(page)
    if "--check" in sys.argv[1:]:
        return int(made != page)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
