"""One engine after the other, each in a process of its own: `MODULE --case JSON` answers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmark.harness import processes
from benchmark.harness.cells import CellFile

MARK = "RESULT "


def run_case(module: str, case: dict[str, Any], timeout: float = 900) -> Any:
    """What `module --case CASE` answers. Raises RuntimeError with the end of its output."""
    done = subprocess.run(
        processes.tied([sys.executable, "-m", module, "--case", json.dumps(case)]),
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not answers:
        raise RuntimeError(f"{module} {case} failed:\n{done.stderr[-3000:]}")
    return json.loads(answers[-1].removeprefix(MARK))


def kept_case(
    file: CellFile, key: str, module: str, case: dict[str, Any],
    values: Callable[[Any], dict[str, Any]],
) -> Any:  # fmt: skip
    """As `run_case`, and kept under a key. values: what is kept of an answer. None when the engine
    failed, which is said."""
    began = time.monotonic()
    try:
        found = run_case(module, case)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        file.failed(key, "the engine failed", str(error), time.monotonic() - began)
        print(f"{key} failed: {error}", flush=True)
        return None
    file.add(key, values(found), time.monotonic() - began)
    return found


def answer(result: Any) -> None:
    print(MARK + json.dumps(result), flush=True)
