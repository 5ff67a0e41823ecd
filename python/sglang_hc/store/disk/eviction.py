"""Making room on a directory: new slabs, old blocks out, slabs from one model to another.

Blocks that no waiting request needs are evicted first, the least recently used before others. When
every block is needed, the one that is needed last goes first (AttentionStore section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from heapq import nlargest

from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.index_file import Place, Row

HIGH, LOW = 0.95, 0.90
"""Shares of the slots that a directory can have."""

_BATCH_SHARE = 64
_PAGE = 256
_MOST_PAGES = 64


class Evictor:
    """Frees slots of the size that a directory's model needs. Its methods raise IndexDamaged.

    uses: when waiting requests will use blocks, see `DiskStore.expect`; changed by its owner.
    """

    def __init__(self, directory: Directory, uses: Mapping[bytes, float]) -> None:
        self._directory = directory
        self._slot_bytes = directory.model.slot_bytes
        self._uses = uses

    def slot(self, behind: Place | None = None, more: int = 0) -> Place | None:
        """A leased free slot, as of `SlabSet.allocate`; None when nothing can go. Raises OSError
        and IndexFull too."""
        directory = self._directory
        take = partial(directory.slabs.allocate, self._slot_bytes, behind, more)
        slot = take()
        while slot is None:
            with directory.making_room:
                slot = take()  # another thread made room
                if slot is None and not self._make_room():
                    return None
            slot = slot or take()
        return slot

    def trim(self) -> None:
        """If more than HIGH of the slots are taken, evict down to LOW, nothing that is needed: so
        writers find free slots without waiting."""
        directory = self._directory
        used, there = directory.slabs.usage(self._slot_bytes)
        there += directory.slabs.growable_slots(self._slot_bytes)
        if used > HIGH * there:
            with directory.making_room:
                self._evict(used - int(LOW * there), needed=False)

    def expire(self, before: float) -> None:
        """Remove every block last used before that time (seconds since 1970)."""
        directory = self._directory
        removed = 1
        while removed:
            with directory.guarded():
                old = directory.index.oldest(_PAGE, before=int(before * 1e6))
            removed = directory.remove_rows(old)
            directory.count("expired_blocks", removed)

    def _make_room(self) -> bool:
        directory = self._directory
        with directory.guarded():
            if directory.slabs.grow(self._slot_bytes):
                return True
            if self._take_foreign_slab() and directory.slabs.grow(self._slot_bytes):
                return True
        if directory.retry_removals():
            return True
        _, there = directory.slabs.usage(self._slot_bytes)
        return self._evict(max(1, there // _BATCH_SHARE), needed=True) > 0

    @cached_property
    def _newest_access(self) -> dict[int, int]:
        """Of each slab. Read once: nobody uses another model's slabs while this one is served."""
        return self._directory.index.newest_access()

    def _take_foreign_slab(self) -> bool:
        """Drop the longest unused slabs of other slot sizes until one of ours fits in their place.
        False when none is left that is older than all we have here."""
        directory, size = self._directory, self._slot_bytes
        foreign = [number for number, other in directory.slabs.sizes().items() if other != size]
        if not foreign:
            return False
        directory.flush_touches()
        oldest = directory.index.oldest(1, slot_bytes=size)
        for accessed, number in sorted((self._newest_access.get(n, 0), n) for n in foreign):
            if oldest and accessed >= oldest[0].accessed:
                return False
            if directory.drop_slab(number) and directory.slabs.growable_slots(size):
                return True
        return False

    def _evict(self, wanted: int, *, needed: bool) -> int:
        """Evict until `wanted` slots are free again. Returns blocks evicted; none while the index
        refuses, because that frees nothing.

        needed: evict blocks that waiting requests need too, if there are no others.
        """
        directory = self._directory
        if directory.is_owed_removals:
            return 0
        directory.flush_touches()
        behind: Row | None = None
        evicted = 0
        last: list[Row] = []
        for _ in range(_MOST_PAGES):
            with directory.guarded():
                page = directory.index.oldest(_PAGE, behind, slot_bytes=self._slot_bytes)
            if not page:
                break
            behind = page[-1]
            victims = [row for row in page if row.block_id not in self._uses]
            evicted += directory.remove_rows(victims[: wanted - evicted])
            if evicted >= wanted or directory.is_owed_removals:
                break
            last += [row for row in page if row.block_id in self._uses]
            last = nlargest(wanted - evicted, last, key=self._use)
        if needed and evicted < wanted and not directory.is_owed_removals:
            evicted += directory.remove_rows(last[: wanted - evicted])
        directory.count("evicted_blocks", evicted)
        return evicted

    def _use(self, row: Row) -> float:
        return self._uses.get(row.block_id, 0.0)
