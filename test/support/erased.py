"""What tests of erasing look for in the files of a directory."""

from __future__ import annotations

from pathlib import Path

from sglang_hc.store.block import Block
from sglang_hc.store.disk import DiskStore
from support.disk_store import is_served


def traces(folder: Path, blocks: list[Block], label: str) -> list[str]:
    """Where token ids of these blocks, or the label, lie in the files of a directory."""
    needles = [block.tokens[:32] for block in blocks] + [label.encode()]
    found = []
    for path in filter(Path.is_file, (folder / "sglang-hc").rglob("*")):
        content = path.read_bytes()
        found += [f"{path.name}: {needle!r}" for needle in needles if needle in content]
    return found


def check_kept(store: DiskStore, blocks: list[Block]) -> None:
    assert all(is_served(store, block) for block in blocks)
