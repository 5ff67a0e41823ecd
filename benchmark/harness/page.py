"""One self-contained HTML report."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.harness import machine, report

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px }
th, td { border: 1px solid #ccc; padding: .25rem .6rem; text-align: left }
th { background: #f2f2f2 } pre { background: #f6f6f6; padding: .7rem; overflow-x: auto }
img { max-width: 100%; border: 1px solid #eee; margin: .5rem 0 }
"""


def write(result: dict[str, Any], plots: Sequence[Path], path: Path) -> None:
    """Write the report with its plots inside."""
    title = f"sglang-hc: {result['experiment']}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(result['created'])}; {html.escape(machine.one_line(result['machine']))}",
        *(f"<p><b>{html.escape(line)}</b></p>" for line in report.headline(result)),
        *(f"<p>{html.escape(line)}</p>" for line in result["skipped"]),
        *(
            f"<p><i>{html.escape(turn['question'])}</i><br>{html.escape(turn['answer'])}</p>"
            for turn in result["conversation"]
        ),
        "<h2>Where the tier does not pay</h2>",
        bullets(report.loss_lines(result)),
        *(image(plot) for plot in plots),
    ]
    for table in report.tables(result):
        body += [f"<h2>{html.escape(table.title)}</h2>", html_table(table)]
    body += [
        "<h2>What varied</h2>",
        bullets(report.varied_lines(result)),
        "<h2>Work</h2>",
        bullets([_work(point) for point in result["points"]]),
        "<h2>Commands</h2>",
        f"<pre>{html.escape(_commands(result))}</pre>",
        "<h2>Settings</h2>",
        bullets([f"{key}: {value}" for key, value in result["settings"].items()]),
    ]
    path.write_text(document(title, body), encoding="utf-8")


def document(title: str, body: Sequence[str]) -> str:
    """A whole page around pieces of HTML. title: plain text."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _commands(result: dict[str, Any]) -> str:
    lines = [result["command"], ""]
    lines += [f"# {arm['name']}\n{arm['command']}" for arm in result["arms"]]
    return "\n".join(lines)


def _work(point: dict[str, Any]) -> str:
    notes = "".join(f"; {note}" for note in point["notes"])
    return f"{point['name']}: {point['trace']}, {point['requests']} requests{notes}"


def bullets(lines: Sequence[str]) -> str:
    """HTML list of plain text."""
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def html_table(table: report.Table) -> str:
    """HTML of a table without its title."""
    head = "".join(f"<th>{html.escape(word)}</th>" for word in table.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(word)}</td>" for word in row) + "</tr>"
        for row in table.rows
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def image(path: Path) -> str:
    """HTML of a PNG file, the picture inside."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}"></p>'
