"""An I/O process whose disk delivers so many bytes a second to each reader as RATE says, and none
while there is a file with the name in MARK."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.disk_store import Faults, FaultyBackend

RATE = "SLOW_DISK_BYTES_PER_SECOND"
MARK = "SLOW_DISK_HANGS_WHILE"


def hang_while(mark: str, bytes_per_second: float = float("inf")) -> Faults:
    """Calls to the disk do not come back while this file is there."""

    def wait(path: str) -> None:
        while mark and os.path.exists(mark):
            time.sleep(0.01)

    return Faults(wait, on_write=wait, on_sync=wait, bytes_per_second=bytes_per_second)


def start_slowly(bytes_per_second: float, mark: str = "") -> None:
    """I/O processes that this process starts from now on are such ones."""
    from sglang_hc.store.process import link

    def start(words: list[str], env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join([str(Path(__file__).parents[1]), env["PYTHONPATH"]])
        command = [words[0], "-m", __name__, *words[3:]]
        return subprocess.Popen(command, env=env | {"PYTHONPATH": paths}, **options)

    os.environ |= {RATE: str(bytes_per_second), MARK: mark}
    link.subprocess = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE)


if __name__ == "__main__":
    from sglang_hc.store.disk import DiskStore
    from sglang_hc.store.process import worker

    backend = FaultyBackend(hang_while(os.environ[MARK], float(os.environ[RATE])))
    opened = DiskStore.open
    DiskStore.open = lambda *args, **options: opened(*args, backend=backend, **options)
    worker.main()
