"""What the dashboard and the alert rules of `deploy/` ask Prometheus for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from support.scraped import samples

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "sglang-hc.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"

ON_FAILURE = {
    "sglang_hc_disk_read_io_error_total",
    "sglang_hc_disk_write_io_error_total",
    "sglang_hc_disk_read_damaged_total",
}
"""Counts by reason: there when they first count."""

OF_REMOTE = {"sglang_hc_remote_usable", "sglang_hc_remote_blocks"}
"""Levels that a server without a remote store has not, the latter one for a directory alone."""

OF_DISK = {"sglang_hc_disk_blocks", "sglang_hc_disk_directories"}
"""Those that a server without --hc-disk has not."""

WORD = re.compile(r"\b(?:up|sglang(?::|_hc_)[a-z0-9_]+)\b")
BY_PATTERN = re.compile(r'__name__=~"([^"]+)"')


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]


def queries() -> list[str]:
    """Of all panels, Grafana's variables replaced by what it would put in their place."""
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [query.replace("$__rate_interval", "1m").replace("$instance", ".*") for query in found]


def names_in(query: str) -> set[str]:
    """Metrics that are named in a query, by their whole names."""
    return set(WORD.findall(re.sub(r'"[^"]*"', '""', query)))


def patterns_in(query: str) -> list[str]:
    return BY_PATTERN.findall(query)


def named(queries: Iterable[str]) -> set[str]:
    return {name for query in queries for name in names_in(query)} - {"up"}


def missing(page: str) -> set[str]:
    """Metrics and patterns of names that are asked for and that a /metrics page has not."""
    asked = [*queries(), *(rule["expr"] for rule in rules())]
    there = {name for name, _, _ in samples(page)}
    return {name for name in named(asked) if name not in there} | set(_unmatched(asked, there))


def _unmatched(asked: Iterable[str], there: set[str]) -> Iterator[str]:
    for query in asked:
        for pattern in patterns_in(query):
            if not any(re.fullmatch(pattern, name) for name in there):
                yield pattern
