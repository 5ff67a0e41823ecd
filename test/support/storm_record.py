"""What storms have shown so far, in a file to which each run adds its seeds.

    {"kinds": {NAME: {"seeds": [[FIRST, END], ...], COUNT: ..., "wrong": [SEED, ...]}}, ...}

NAME is that of a model, `PLAIN` for those whose layers all have full attention. A seed that was
wrong is in none of the counts, and is run again by the next run that has it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmark.harness import machine
from support.storm_models import STATES
from support.storm_plans import pages_of

PLAIN = "all layers have full attention"
COLUMNS = {
    "engines": "engines", "requests": "requests", "aborted": "aborts",
    "retractions": "retractions", "evicted tokens": "tokens evicted",
    "restored tokens": "tokens restored", "disk tokens": "of these from disk",
    "shared tokens": "from a shared directory", "hc audited_blocks": "blocks audited",
}  # fmt: skip
"""Of the table, by the name of the count."""
STATE_COUNT = "hc restored_states"
COUNTS = (*COLUMNS, "hc evicted_blocks", STATE_COUNT, "near ties")
"""What is written of each kind, beside engines by their pages."""


def page_count(page: int) -> str:
    """Name of the count of engines with pages of so many rows."""
    return f"engines with a page of {page}"


class Record:
    """The file, which may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._machine = machine.describe()
        self._kinds: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._kinds = json.loads(path.read_text())["kinds"]

    def lacks(self, kind: str, seeds: Iterable[int]) -> list[int]:
        """Of these seeds those that are not in it."""
        known = set(_seeds(self._kinds.get(kind or PLAIN, {})))
        return [seed for seed in seeds if seed not in known]

    def storms(self, kind: str) -> int:
        """How many of a kind are in it."""
        return _row(self._kinds[kind or PLAIN])[0] if (kind or PLAIN) in self._kinds else 0

    def gaps(self, kind: str) -> list[str]:
        """Why the storms of a kind prove less than they are to: what never happened in them, and
        what was wrong. Each is a sentence."""
        name = kind or PLAIN
        own = self._kinds.get(name, {})
        needed = [*COLUMNS, *(page_count(page) for page in pages_of(kind))]
        needed += [STATE_COUNT] if kind in STATES.names else []
        found = [f"{name}: no {count}" for count in needed if not own.get(count)]
        return found + [f"{name}: seed {seed} was wrong" for seed in own.get("wrong", ())]

    def add(self, kind: str, seed: int, counts: Counter[str], is_wrong: bool) -> None:
        """One storm is over, a seed that `lacks` has named."""
        own = self._kinds.setdefault(kind or PLAIN, {"wrong": [], "seeds": []})
        others = set(own["wrong"]) - {seed}
        if is_wrong:
            others.add(seed)
        else:
            own["seeds"] = _ranges({*_seeds(own), seed})
        own["wrong"] = sorted(others)
        for name in (*COUNTS, *(page_count(page) for page in pages_of(kind))):
            own[name] = own.get(name, 0) + (0 if is_wrong else counts[name])
        self._write()

    def _write(self) -> None:
        rows = [[kind, *(f"{one:,}" for one in _row(own))] for kind, own in self._kinds.items()]
        table = {"columns": ["model", "storms", *COLUMNS.values(), "wrong"], "rows": rows}
        about = {
            "experiment": "storms",
            "command": "python -m support.storms --seeds 0:200 --kind NAME --record FILE",
            "machine": self._machine,
        }
        text = json.dumps({**about, "kinds": self._kinds, "tables": {"storms": table}}, indent=1)
        part = self._path.with_suffix(".part")
        part.write_text(text + "\n")
        part.rename(self._path)


def _row(own: Mapping[str, Any]) -> list[int]:
    wrong = len(own["wrong"])
    return [len(_seeds(own)) + wrong, *(own[name] for name in COLUMNS), wrong]


def _seeds(own: Mapping[str, Any]) -> list[int]:
    return [seed for first, end in own.get("seeds", ()) for seed in range(first, end)]


def _ranges(seeds: set[int]) -> list[list[int]]:
    """As [first, end) each."""
    found: list[list[int]] = []
    for seed in sorted(seeds):
        if found and found[-1][1] == seed:
            found[-1][1] = seed + 1
        else:
            found.append([seed, seed + 1])
    return found
