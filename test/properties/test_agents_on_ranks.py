"""Retention and learned pauses on ranks that are processes of their own: all decide alike.

Each rank evicts by its own copy of both. What a process has of its own, and what the ranks of a
server therefore do not share, differs here: the order of its sets and its clocks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from support.examples import examples


def ranks(first: int, stop: int, count: int = 2) -> list[list[dict[str, object]]]:
    """What so many ranks print for the same seeds."""
    command = [sys.executable, "-m", "support.agent_ranks", str(first), str(stop)]
    path = os.pathsep.join(one for one in sys.path if one)
    running = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(1 + number)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    found = [[json.loads(line) for line in one.communicate()[0].splitlines()] for one in running]
    assert all(one.returncode == 0 for one in running)
    return found


def check(first: int, stop: int) -> None:
    one, *others = ranks(first, stop)
    assert len(one) == stop - first
    assert all(other == one for other in others)
    seen: Counter[str] = Counter()
    for run in one:
        seen.update({name: value for name, value in run.items() if name != "digest"})
    happened = "back", "evicted", "retained", "demoted", "owned"
    assert all(seen[name] > 0 for name in happened), seen


def test_ranks_retain_and_learn_alike() -> None:
    check(0, examples(15))


@pytest.mark.slow
def test_ranks_retain_and_learn_alike_in_many_runs() -> None:
    check(1000, 1500)
