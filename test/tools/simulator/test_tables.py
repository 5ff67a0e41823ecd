"""The published tables are those of the committed results."""

from benchmark import ROOT
from benchmark.simulator import tables


def test_the_page_shows_what_the_results_say():
    page = (ROOT / "benchmark" / "simulator" / "README.md").read_text()
    assert page.count("<!-- table: ") == len(tables.TABLES)
    assert tables.render(page) == page


def test_learned_pauses_close_half_of_the_distance_and_cost_no_point_without_pattern():
    runs = tables.load("pauses")
    for name, dram in {(run["load"], run["dram"]) for run in runs}:
        here = [run for run in runs if (run["load"], run["dram"]) == (name, dram)]
        hits = {run["arm"]: run["hit_rate"] for run in here}
        assert hits["learned"] > hits["queue"] - 0.01
        if name == "agents":
            assert 2 * hits["learned"] >= hits["queue"] + hits["belady"]
            pinned = [rate for arm, rate in hits.items() if arm.startswith("pin")]
            assert hits["learned"] > max(pinned, default=0.0)
