"""A paper's figures as tables that are modelled, not measured: printed, and kept for the pages."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmark.harness import machine
from benchmark.harness.cells import rounded
from benchmark.harness.report import Table


def table(name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(name, tuple(columns), tuple(map(tuple, rows)))


def json_option(words: Sequence[str] | None, about: str | None) -> Path | None:
    """The file that the command line asks for, beside what is printed."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables here, too")
    path: Path | None = parser.parse_args(words).json
    return path


def publish(experiment: str, tables: Sequence[Table], path: Path | None) -> None:
    """Print the tables, and write them to a file as a result of `experiment`."""
    print("Modelled: nothing here was measured.")
    for one in tables:
        print("", one.markdown(), sep="\n")
    if path:
        found = {one.title: {"columns": one.head, "rows": one.rows} for one in tables}
        result = {**machine.about(experiment), "tables": found}
        path.write_text(json.dumps(rounded(result), indent=1) + "\n")
