"""Workers of `sglang-hc capacity` end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from support.waiting import HANGS_S, is_over, until

SEARCH = """
import os, time
from sglang_hc.tools.cli.workers import workers

def work(_):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(1000)

with workers() as pool:
    list(pool.map(work, range(9)))
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_search(kind: signal.Signals) -> None:
    """An interrupt reaches all, as from a terminal; a kill reaches the search alone."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", SEARCH]
    with subprocess.Popen(
        words, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as search:  # fmt: skip
        assert search.stdout is not None
        running: list[int] = []
        try:
            running += [int(search.stdout.readline()) for _ in range(2)]
            (os.killpg if kind is signal.SIGINT else os.kill)(search.pid, kind)
            assert search.wait(HANGS_S)
            until(lambda: all(map(is_over, running)))
        finally:
            for pid in (search.pid, *running):
                if not is_over(pid):
                    os.kill(pid, signal.SIGKILL)
