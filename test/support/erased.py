"""What tests of erasing look for in the files of a directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sglang_hc.store.disk import Block, DiskStore
from sglang_hc.store.outcome import Outcome
from support.disk_store import data_of, read_bytes


def names(blocks: list[Block]) -> list[bytes]:
    return [block.block_id for block in blocks]


def traces(folder: Path, blocks: list[Block], label: str) -> list[str]:
    """Where token ids of these blocks, or the label, lie in the files of a directory."""
    needles = [block.tokens[:32] for block in blocks] + [label.encode()]
    found = []
    for path in filter(Path.is_file, (folder / "sglang-hc").rglob("*")):
        content = path.read_bytes()
        found += [f"{path.name}: {needle!r}" for needle in needles if needle in content]
    return found


def check_kept(store: DiskStore, blocks: list[Block]) -> None:
    for block in blocks:
        outcome, got = read_bytes(store, block.block_id)
        assert outcome is Outcome.OK and np.array_equal(got, data_of(block))
