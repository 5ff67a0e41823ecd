"""Nobody reaches through the tiers, no test imports another or changes the import path, and no file
is long. Where imports go is checked by `make lint`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def reaches(source: str) -> list[str]:
    """Expressions that go through the tiers to a part of one of their parts."""
    chains = (
        ast.unparse(one) for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Attribute)
    )
    return [chain for chain in chains if re.search(r"(^|\.)_?tiers\.\w+\.\w+$", chain)]


def test_nobody_reaches_through_the_tiers() -> None:
    """Who needs a part of theirs is given it when it is made; else they have the operation."""
    assert reaches("self._tree.tiers.queue.meetings.of(1)") == ["self._tree.tiers.queue.meetings"]
    assert reaches("self._tiers.host.tree") and reaches("tiers.disk.poll()")
    assert not reaches("self.tiers.poll() and tiers.host and import_tiers.host.tree")
    files = (ROOT / "python/sglang_hc/srt").rglob("*.py")
    found = {file.name: reaches(file.read_text()) for file in files}
    assert {name: chains for name, chains in found.items() if chains} == {}


def test_no_test_edits_the_import_path() -> None:
    """What tests share lies in test/support, which pytest finds; a process gets PYTHONPATH."""
    edit = re.compile(r"sys\.path(\.(insert|append|extend)|\[[^]]*\]\s*=|\s*\+?=[^=])")
    assert edit.search("sys" + ".path[:0] = ['here']") and edit.search("sys" + ".path.insert(0, x)")
    files = (ROOT / "test").rglob("*.py")
    assert [file for file in files if edit.search(file.read_text())] == []


def test_benchmarks_import_nothing_of_the_tests_and_the_package_nothing_of_both() -> None:
    tests = re.compile(r"^\s*(?:from|import) (?:support|test)\b", re.M)
    both = re.compile(r"^\s*(?:from|import) (?:support|test|benchmark)\b", re.M)
    assert tests.search("    from support.core import Core") and both.search("import benchmark")
    for folder, found in (("benchmark", tests), ("python", both)):
        files = list((ROOT / folder).rglob("*.py"))
        assert len(files) > 50
        assert [file for file in files if found.search(file.read_text())] == []


def imported_tests(source: str) -> list[str]:
    """Modules that a test must not import: tests, and whatever lies beside it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module or ''}"]
            names += [f"{names[0]}.{alias.name}" for alias in node.names]
        found += [name for name in names if name.startswith(".") or re.search(r"\btest_", name)]
    return found


def test_no_test_imports_another() -> None:
    """What two tests need lies in test/support."""
    for line in (
        "from .test_a import B",
        "from . import b",
        "import e2e.test_a",
        "from a import test_b",
    ):
        assert imported_tests(line), line
    assert not imported_tests("from support.core import Core\nimport pytest")
    files = (ROOT / "test").rglob("*.py")
    assert {file.name: found for file in files if (found := imported_tests(file.read_text()))} == {}


def test_no_file_is_longer_than_400_lines() -> None:
    """CONTRIBUTING.md: a longer file holds more than one thing."""
    folders = ("python", "test", "benchmark", "scripts", "sgl-kernel-ext")
    lengths = {
        file: len(file.read_text().splitlines())
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
    }
    assert len(lengths) > 100, "the repository is read as a whole"
    assert [file for file, lines in lengths.items() if lines > 400] == []
