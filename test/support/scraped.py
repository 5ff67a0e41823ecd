"""What a /metrics page says."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families


def samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of each line."""
    for family in text_string_to_metric_families(page):
        for one in family.samples:
            yield one.name, dict(one.labels), one.value


def ours(page: str) -> dict[str, float]:
    """Our numbers by their names in /server_info."""
    found = {}
    for name, labels, value in samples(page):
        own = name.removeprefix("sglang_hc_")
        if own != name:
            source = labels.get("source")
            found[own if source is None else f"{own.removesuffix('_total')}_{source}"] = value
    return found
