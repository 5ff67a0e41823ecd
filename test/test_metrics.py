"""The tiers' numbers as Prometheus metrics."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from sglang_hc.metrics import COUNTS, FAMILIES, HISTOGRAMS, LEVELS, PERIOD_S, Exporter
from sglang_hc.policy.restore_plan import Reason

ROOT = Path(__file__).resolve().parents[1]
MANUAL = (ROOT / "docs" / "operating.md").read_text().split("\n## Metrics\n")[1]
OWN, _ = MANUAL.split("\n### SGLang's own families\n")
LABELS = {"model_name": "m", "tp_rank": 0}
SEEN = {"model_name": "m", "tp_rank": "0"}

WRITER = """
from sglang_hc.metrics import Exporter
exporter = Exporter({"model_name": "m"})
exporter.publish({"host_blocks": 9}, {"restored_tokens": 5})
exporter.publish({"host_blocks": 4}, {"restored_tokens": 8})
"""


def test_what_never_counted_shows_as_zero() -> None:
    registry = CollectorRegistry()
    Exporter(LABELS, registry)
    for name in COUNTS:
        assert registry.get_sample_value(f"sglang_hc_{name}_total", SEEN) == 0


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from(["host_blocks", "host_free_slots"]), st.integers(0)),
            st.dictionaries(st.sampled_from(["kept_tokens", "disk_read_corrupt"]), st.integers(1)),
        )
    )
)
def test_metrics_follow_levels_and_counts(
    steps: list[tuple[dict[str, int], dict[str, int]]],
) -> None:
    registry = CollectorRegistry()
    exporter = Exporter(LABELS, registry)
    levels: dict[str, int] = {}
    counts: dict[str, int] = {}
    for changed, added in steps:
        levels |= changed
        counts |= {name: counts.get(name, 0) + more for name, more in added.items()}
        exporter.publish(levels, counts)
    for name, value in levels.items():
        assert registry.get_sample_value(f"sglang_hc_{name}", SEEN) == float(value)
    for name, value in counts.items():
        found = registry.get_sample_value(f"sglang_hc_{name}_total", SEEN)
        assert found is not None and abs(found - value) <= 1e-9 * value


def test_a_count_of_a_family_is_one_metric_with_a_label() -> None:
    registry = CollectorRegistry()
    exporter = Exporter(LABELS, registry)
    for count in (5, 8):
        exporter.publish({}, {"prompt_tokens_disk": count, "prompt_tokens_computed": 2})
    found = {
        source: registry.get_sample_value(
            "sglang_hc_prompt_tokens_total", {**SEEN, "source": source}
        )
        for source in FAMILIES["prompt_tokens"].values
    }
    wanted = {"device": 0, "host": 0, "disk": 8, "remote": 0, "computed": 2, "aborted": 0}
    assert found == wanted


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_what_is_timed_shows_from_the_start_and_is_summed(name: str) -> None:
    registry = CollectorRegistry()
    exporter = Exporter(LABELS, registry)
    (label, values, _), buckets = HISTOGRAMS[name]
    for value in values or ("",):
        seen = {**SEEN, label: value} if label else SEEN
        assert registry.get_sample_value(f"sglang_hc_{name}_count", seen) == 0
        exporter.observe(name, buckets[3], value)
        below = registry.get_sample_value(f"sglang_hc_{name}_bucket", {**seen, "le": "+Inf"})
        assert below == registry.get_sample_value(f"sglang_hc_{name}_count", seen) == 1
        assert registry.get_sample_value(f"sglang_hc_{name}_sum", seen) == buckets[3]


def test_updates_are_rare_however_often_the_scheduler_asks() -> None:
    exporter = Exporter(LABELS, CollectorRegistry())
    asked = [step * PERIOD_S / 10 for step in range(100)]
    assert sum(exporter.due(now) for now in asked) == 10


def test_another_process_reads_them_from_the_folder(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "python"),
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
    }
    subprocess.run([sys.executable, "-c", WRITER], env=environment, check=True)
    from prometheus_client import multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]
    assert registry.get_sample_value("sglang_hc_host_blocks", {"model_name": "m"}) == 4
    assert registry.get_sample_value("sglang_hc_restored_tokens_total", {"model_name": "m"}) == 8


def test_every_counter_of_the_source_shows_as_zero_from_the_start() -> None:
    """Those with a reason in their name cannot: they appear when they first count."""
    counted = re.compile(r"""count(?:er)?s\["([a-z_]+)"\] \+=""")
    source = "".join(path.read_text() for path in (ROOT / "python").rglob("*.py"))
    found = set(counted.findall(source))
    assert {"restored_tokens", "hole", "remote_hangs"} <= found
    known = {f"{name}_{value}" for name, one in FAMILIES.items() for value in one.values}
    assert found <= {*COUNTS, *known}, (
        "describe them in sglang_hc.metrics.COUNTS and docs/operating.md"
    )


def test_the_manual_has_every_metric_and_no_other() -> None:
    rows = [line.split("|")[2:4] for line in OWN.splitlines() if line.startswith("|")]
    for column, known in enumerate((LEVELS, COUNTS)):
        named = [name for row in rows for name in re.findall(r"`(\w+)`", row[column])]
        assert sorted(named) == sorted(known)
    with_labels = re.findall(r"^- `sglang_hc_(\w+?)(?:_total)?`", OWN, re.M)
    assert sorted(with_labels) == sorted([*FAMILIES, *HISTOGRAMS])


def test_the_manual_explains_every_reason() -> None:
    planner = (ROOT / "docs" / "planner.md").read_text()
    assert all(f"`{reason.value}`" in MANUAL + planner for reason in Reason)
