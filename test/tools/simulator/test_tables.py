"""The published tables are those of the committed results."""

from benchmark import ROOT
from benchmark.simulator import tables


def test_the_page_shows_what_the_results_say():
    page = (ROOT / "benchmark" / "simulator" / "README.md").read_text()
    assert page.count("<!-- table: ") == len(tables.TABLES)
    assert tables.render(page) == page
