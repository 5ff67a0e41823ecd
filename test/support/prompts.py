"""Prompts of tests, and flags of engines and of what keeps prompts below host memory."""

from __future__ import annotations

import json
import random


def prompt(seed: int | str, length: int) -> list[int]:
    """Token ids (length,), the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(3, 900) for _ in range(length)]


SMALL = ("--max-total-tokens", "640", "--dtype", "float32", "--hc-host-size-gb", "0.2")
"""Flags of an engine whose device is soon full, and its host memory is not. Where a flag is given
twice the last one counts."""

NO_PROCESSOR = ("--skip-tokenizer-init",)
"""Flags of an engine of a model with an encoder of images that gets none."""


def on_disk(folder: object) -> tuple[str, ...]:
    return "--hc-disk", f"{folder}:1"


def in_directory(folder: object) -> tuple[str, ...]:
    """A directory that servers share."""
    return "--hc-remote", "file", "--hc-remote-config", json.dumps({"dir": f"{folder}:1"})


def in_store(folder: object) -> tuple[str, ...]:
    """A remote store of files: `support.stored_files`."""
    return "--hc-remote", "dynamic", "--hc-remote-config", json.dumps(store_options(folder))


def store_options(folder: object) -> dict[str, str]:
    return {
        "backend_name": "Files", "module_path": "support.stored_files", "class_name": "Files",
        "dir": str(folder),
    }  # fmt: skip
