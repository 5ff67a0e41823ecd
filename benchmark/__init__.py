"""The benchmarks, each a module to run in the root of the tree: `python -m benchmark.restore.run`.

They use the package and the tests' engine (`test/support`) of their own tree, installed or not.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

sys.path[:0] = [str(ROOT / "python"), str(ROOT / "test")]
