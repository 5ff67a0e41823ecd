"""How many examples a property is tried with: all in `make test`, a part in `make test-fast`."""

from __future__ import annotations

import os

SHARE = float(os.environ.get("HC_EXAMPLES", "1"))


def examples(count: int) -> int:
    """So many of `count`, at least five."""
    return max(min(count, 5), round(count * SHARE))
