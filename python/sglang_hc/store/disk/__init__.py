"""The disk tier's store. Format: docs/disk-format.md. Start reading at `store.py`."""

from sglang_hc.store.block import Block
from sglang_hc.store.disk.directory import DirectoryError, DirectorySpec
from sglang_hc.store.disk.format import StoredModel
from sglang_hc.store.disk.maintenance import Upkeep
from sglang_hc.store.disk.store import DiskStore
from sglang_hc.store.outcome import Outcome

__all__ = [
    "Block",
    "DirectoryError",
    "DirectorySpec",
    "DiskStore",
    "Outcome",
    "StoredModel",
    "Upkeep",
]
