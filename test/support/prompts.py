"""Prompts of tests, and flags of what keeps them below host memory."""

from __future__ import annotations

import json
import random


def prompt(seed: int | str, length: int) -> list[int]:
    """Token ids (length,), the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(3, 900) for _ in range(length)]


def on_disk(folder: object) -> tuple[str, ...]:
    return "--hc-disk", f"{folder}:1"


def in_store(folder: object) -> tuple[str, ...]:
    """A remote store of files."""
    return "--hc-remote", "file", "--hc-remote-config", json.dumps({"dir": str(folder)})
