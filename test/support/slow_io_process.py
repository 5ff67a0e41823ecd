"""An I/O process whose disk delivers so many bytes a second to each reader as RATE says."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RATE = "SLOW_DISK_BYTES_PER_SECOND"


def start_slowly(bytes_per_second: float) -> None:
    """I/O processes that this process starts from now on are such ones."""
    from sglang_hc.store.process import link

    def start(words: list[str], env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join([str(Path(__file__).parents[1]), env["PYTHONPATH"]])
        command = [words[0], "-m", __name__, *words[3:]]
        return subprocess.Popen(command, env=env | {"PYTHONPATH": paths}, **options)

    os.environ[RATE] = str(bytes_per_second)
    link.subprocess = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE)


if __name__ == "__main__":
    from sglang_hc.store.disk import DiskStore
    from sglang_hc.store.process import worker
    from support.disk_store import Faults, FaultyBackend

    backend = FaultyBackend(Faults(bytes_per_second=float(os.environ[RATE])))
    opened = DiskStore.open
    DiskStore.open = lambda *args, **options: opened(*args, backend=backend, **options)
    worker.main()
