"""Runs tests on this device and keeps what they said as a cell.

    python -m benchmark.gpu.checked test/device/test_copy_stream.py --cells FILE

sgl-kernel-ext/test is told to run its kernels on the GPU, where there is one.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmark import ROOT
from benchmark.harness import machine
from benchmark.harness.cells import CellFile

NO_TESTS = 5
"""pytest's exit status when it found nothing to run."""


def main() -> int:
    """Returns pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", help="path below the root of the source tree")
    parser.add_argument("--cells", type=Path, required=True)
    args = parser.parse_args()
    file = CellFile(args.cells, "checked")
    key = f"checked/{args.tests}"
    if file.has(key):
        return 0
    began = time.monotonic()
    device = "cuda" if machine.has_gpu() else "cpu"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", args.tests],
        cwd=ROOT, env={**os.environ, "HC_KERNELS_DEVICE": device},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    print(done.stdout)
    seconds = time.monotonic() - began
    counts = {
        word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)
    }
    if done.returncode:
        reason = "no tests ran" if done.returncode == NO_TESTS else f"{counts}"
        file.failed(key, reason, done.stdout, seconds)
    else:
        file.add(key, {"tests": args.tests, "device": device, **counts}, seconds)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
