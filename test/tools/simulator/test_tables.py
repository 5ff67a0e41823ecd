"""The published tables are those of the committed results."""

import importlib.util
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "benchmark" / "simulator"


def test_the_page_shows_what_the_results_say():
    spec = importlib.util.spec_from_file_location("simulator_tables", FOLDER / "tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = (FOLDER / "README.md").read_text()
    assert page.count("<!-- table: ") == len(tables.TABLES)
    assert tables.render(page) == page
