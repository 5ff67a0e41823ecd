"""CI runs the README's command, and nothing of its own environment changes what that does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ci_runs_the_command_of_the_readme_in_a_clean_environment(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "make $*"\nenv\n')
    make.chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/h", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "/p", "TMPDIR": str(tmp_path), "PIP_FIND_LINKS": "/a /b", "UV_INDEX_URL": "u",
        "SGLANG_HC_ENABLE": "1",
    }  # fmt: skip
    run = subprocess.run(
        [ROOT / ".ci" / "run"], env=env, capture_output=True, text=True, check=True, cwd="/"
    )
    command, *lines = run.stdout.splitlines()
    assert command == "make test"
    assert "`make test` runs every check" in (ROOT / "README.md").read_text()
    names = {line.partition("=")[0] for line in lines} - {"PWD", "SHLVL", "_", "OLDPWD"}
    assert names == {"PATH", "HOME", "PIP_FIND_LINKS", "UV_INDEX_URL"}
    assert "PIP_FIND_LINKS=/a /b" in lines
