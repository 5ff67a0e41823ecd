"""SGLang's store of files as a class of the user's: a remote store that keeps what it is given."""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile


class Files(HiCacheFile):  # type: ignore[misc]
    def __init__(self, config: Any, options: Any) -> None:
        folder = config.extra_config["dir"]
        os.makedirs(folder, exist_ok=True)
        super().__init__(config, folder)
