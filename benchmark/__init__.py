"""The benchmarks, each a module to run in the root of the tree: `python -m benchmark.restore.run`.

They use the package of their own tree, installed or not, and nothing of the tests.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT / "python"))
