"""What to buy, as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

COLUMNS = {
    "form": "form",
    "layer_plan": "layers",
    "dram_gb": "DRAM GB",
    "ssd_gb": "SSD GB",
    "p50": "p50 s",
    "p90": "p90 s",
    "p99": "p99 s",
    "restored_share": "restored",
    "cost_per_million_tokens": "cost of 1M tokens",
    "meets": "meets the target",
}


def write_report(answer: dict[str, Any], path: Path) -> None:
    """The rows as a table and as two plots. Raises OSError."""
    rows = answer["rows"]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS.values())
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(row[key])}</td>" for key in COLUMNS) + "</tr>" for row in rows
    )
    prices, sample = answer["prices"], "<br>".join(map(html.escape, answer["sample"]))
    path.write_text(
        "<!doctype html><meta charset='utf-8'><title>What to buy</title>"
        "<style>body{font-family:sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}"
        "</style>"
        f"<h1>{html.escape(answer['says'])}</h1>"
        f"<p>90 % of the first tokens within {answer['target_ttft_p90']:g} s. "
        f"{html.escape(prices['currency'])}: {html.escape(prices['source'])}</p>"
        f"<table><tr>{head}</tr>{body}</table><p>{sample}</p>"
        f"<img src='data:image/png;base64,{_plots(answer)}' alt='TTFT and cost of each row'>",
        encoding="utf-8",
    )


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))


def _plots(answer: dict[str, Any]) -> str:
    """TTFT of each row with the target, and its cost; a PNG in base64."""
    from sglang_hc.tools.simulator.plots import subplots

    rows, target = answer["rows"], answer["target_ttft_p90"]
    figure, (left, right) = subplots(2)
    names = [f"{row['form']}\n{row['dram_gb']:.3g} + {row['ssd_gb']:.3g} GB" for row in rows]
    for which in ("p50", "p90", "p99"):
        left.plot(names, [row[which] for row in rows], marker="o", label=which)
    left.axhline(target, linestyle="--", color="gray", label="target of p90")
    left.set_yscale("log")
    left.set_ylabel("seconds to first token")
    left.legend()
    right.bar(names, [row["cost_per_million_tokens"] for row in rows])
    right.set_ylabel(f"{answer['prices']['currency']} for a million tokens")
    for axis in (left, right):
        axis.tick_params(axis="x", labelsize=6)
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, dpi=120)
    return base64.b64encode(image.getvalue()).decode()
