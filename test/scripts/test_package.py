"""What is built of this tree runs from an environment that has SGLang and nothing of the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import sglang_hc
from support.deployed import fresh_environment, without_python

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "python")


def run(*words: str | Path, cwd: Path) -> str:
    """What a command prints; without what this process was told by its environment."""
    env = without_python()
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, tree: Path) -> Path:
    """The one archive of a kind, built as a package index would have it built."""
    call = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    run(sys.executable, "-c", call, cwd=tree)
    (found,) = (tree / "dist").iterdir()
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of a fresh environment, into which the wheel of an unpacked sdist was installed."""
    folder = tmp_path_factory.mktemp("package")
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tree / name)
    with tarfile.open(build("sdist", tree)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    wheel = build("wheel", unpacked)
    programs = fresh_environment(folder / "venv")
    run(programs / "pip", "install", "--no-index", "--no-deps", wheel, cwd=folder)
    return programs


def test_tools_and_server_of_the_wheel_run(installed: Path) -> None:
    where = "import sglang_hc; print(sglang_hc.__file__)"
    found = Path(run(installed / "python", "-c", where, cwd=installed).strip())
    assert found.is_relative_to(installed.parent)
    assert run(installed / "sglang-hc", "--version", cwd=installed) == (
        f"sglang-hc {sglang_hc.__version__}\n"
    )
    model = ROOT / "models" / "llama-gqa"
    plan = run(installed / "sglang-hc", "plan", "--model", model, "--gpu", "H100", cwd=installed)
    assert "bytes" in plan
    launcher = installed / "python", "-m", "sglang_hc.launch_server"
    flags = run(*launcher, "--hc-help", cwd=installed)
    assert "--hc-host-size-gb" in flags
    assert "--model-path" not in flags.partition("options:")[2]


def test_versions_are_one() -> None:
    line = f'version = "{sglang_hc.__version__}"'
    assert line in (ROOT / "pyproject.toml").read_text().splitlines()
