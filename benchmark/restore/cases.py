"""One engine after the other, each in a process of its own: `SCRIPT --case JSON` answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

from sglang_hc.tools.bench import processes

MARK = "RESULT "


def run_case(script: str, case: dict[str, Any], timeout: float = 900) -> Any:
    """What `script --case CASE` answers. Raises RuntimeError with the end of its output."""
    done = subprocess.run(
        processes.tied([sys.executable, script, "--case", json.dumps(case)]),
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not answers:
        raise RuntimeError(f"{Path(script).name} {case} failed:\n{done.stderr[-3000:]}")
    return json.loads(answers[-1].removeprefix(MARK))


def answer(result: Any) -> None:
    print(MARK + json.dumps(result), flush=True)
