"""How many examples a property is tried with: half of them in `make test`, a quarter in `make
test-fast`, twice as many by night."""

from __future__ import annotations

import os

SHARE = float(os.environ.get("HC_EXAMPLES", "1"))


def examples(count: int) -> int:
    """So many of `count`, at least five."""
    return max(min(count, 5), round(count * SHARE))
