"""SGLang's store of files as a class of the user's: a remote store that keeps what it is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile


class Files(HiCacheFile):  # type: ignore[misc]
    def __init__(self, config: Any, options: Any) -> None:
        super().__init__(config, config.extra_config["dir"])


def options_for(folder: str) -> dict[str, str]:
    """Of `--hc-remote dynamic`, for files in this folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = Files.__name__
    return {"backend_name": name, "module_path": __name__, "class_name": name, "dir": folder}


def in_files(folder: str) -> tuple[str, ...]:
    """The flags for it."""
    return "--hc-remote", "dynamic", "--hc-remote-config", json.dumps(options_for(folder))
