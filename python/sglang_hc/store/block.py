"""What names a block, wherever it is stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """What names a block.

    block_id, parent_id: 16 bytes each (tree.identity). namespace: label for people, not identity.
    position: blocks before this one in its prefix. tokens: packed token ids, at most 256 bytes.
    """

    block_id: bytes
    parent_id: bytes
    namespace: str
    position: int
    tokens: bytes
