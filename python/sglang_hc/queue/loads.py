"""One record for each block in motion, and one for each request that has some.

A block is asked for (`tree/promotions.py`), is here when it is in host memory, and may then be
written to device slots of its own until its request is loaded. A block of the tree is pinned while
it is copied there. Of another one the bytes may lose their place in host memory meanwhile, so what
was written counts when it is proven to have been copied before. A lost block will not come, or lost
its place.

Fetching before a request's turn (`prefetch.py`), meeting in the middle (`meeting.py`) and restoring
ahead of a request's pass (`srt/tree/ahead.py`) are policies over these. Belongs to the scheduler
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.promotions import Promotion


@dataclass(eq=False, slots=True)
class BlockLoad:
    """One block of a request between a lower tier and the device. promotion: brings it to host
    memory; None for one that was there. rows: its (BLOCK_TOKENS,) int64 device slots, and node:
    what is written to them; None without. proven: its bytes were copied from their place."""

    promotion: Promotion | None = None
    node: BlockNode | None = None
    rows: Any = None
    proven: bool = False

    @property
    def is_lost(self) -> bool:
        return not self.proven and self.promotion is not None and self.promotion.lost

    @property
    def is_here(self) -> bool:
        """In host memory, or further."""
        return self.proven or self.promotion is None or self.promotion.is_good

    def write_to(self, rows: Any, node: BlockNode, *, proven: bool) -> None:
        """It is about to be written to these device slots."""
        self.rows, self.node, self.proven = rows, node, proven

    def take_rows(self) -> Any:
        """Its device slots, which are the caller's from now on; None without."""
        rows, self.rows, self.node, self.proven = self.rows, None, None, False
        return rows


@dataclass(eq=False, slots=True)
class Load:
    """What is in motion for one request, by the numbers of its blocks. todo: blocks of the host
    tier that are to be restored while it waits; None until that was looked up. is_closed: nothing
    more is restored while it waits."""

    blocks: dict[int, BlockLoad] = field(default_factory=dict)
    todo: Sequence[tuple[int, BlockNode]] | None = None
    is_closed: bool = False

    @property
    def block_ids(self) -> set[bytes]:
        """Blocks that have device slots, or are to have some."""
        have = [block.node for block in self.blocks.values() if block.node is not None]
        return {node.block_id for node in (*have, *(node for _, node in self.todo or ()))}

    @property
    def restored(self) -> list[int]:
        """Blocks that have device slots."""
        return [number for number, block in self.blocks.items() if block.rows is not None]
