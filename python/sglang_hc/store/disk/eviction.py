"""Making room on a directory: new slabs, old blocks out, slabs from one model to another.

Blocks that no waiting request needs are evicted first, the least recently used before others. When
every block is needed, the one that is needed last goes first (AttentionStore section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from heapq import nlargest

from sglang_hc.store.disk.catalog import Catalog
from sglang_hc.store.disk.directory import Directory
from sglang_hc.store.disk.index_file import Place, Resident

_BATCH_SHARE = 64
_PAGE = 256
_MOST_PAGES = 64


class Evictor:
    """Frees slots of one model's size.

    watermarks: (high, low), shares of the slots a directory can have; `trim` evicts down to `low`
    once more than `high` are taken, so that writers find free slots without waiting.
    """

    def __init__(self, blocks: Catalog, watermarks: tuple[float, float]) -> None:
        self._blocks = blocks
        self._slot_bytes = blocks.model.slot_format.slot_bytes
        self._uses: dict[bytes, float] = {}
        self._high, self._low = watermarks
        self._newest: dict[Directory, dict[int, int]] = {}

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        """When blocks are needed next, see `DiskStore.expect`. Any thread, one at a time."""
        for block_id, use in uses.items():
            if use is None:
                self._uses.pop(block_id, None)
            else:
                self._uses[block_id] = use

    def slot(
        self, directory: Directory, behind: Place | None = None, more: int = 0
    ) -> Place | None:
        """A leased free slot, as of `SlabSet.allocate`; None when nothing can go. Raises OSError,
        DirectoryFailed."""
        take = partial(directory.slabs.allocate, self._slot_bytes, behind, more)
        slot = take()
        while slot is None:
            with directory.making_room:
                slot = take()  # another thread made room
                if slot is None and not self._make_room(directory):
                    return None
            slot = slot or take()
        return slot

    def prepare(self, directory: Directory) -> None:
        """Let a directory grow ahead of need. Raises OSError, DirectoryFailed."""
        with directory.guarded():
            directory.slabs.prepare(self._slot_bytes)

    def trim(self, directory: Directory) -> int:
        """Evict down to the low watermark if the high one is passed, nothing that is needed.
        Returns blocks evicted. Raises DirectoryFailed."""
        used, there = directory.slabs.usage(self._slot_bytes)
        there += directory.slabs.growable_slots(self._slot_bytes)
        if not there or used <= self._high * there:
            return 0
        with directory.making_room:
            return self._evict(directory, used - int(self._low * there), needed=False)

    def expire(self, directory: Directory, before: float) -> int:
        """Remove every block last used before that time (seconds since 1970). Returns how many.
        Raises DirectoryFailed."""
        count = 0
        while True:
            with directory.guarded():
                old = directory.index.oldest(_PAGE, before=int(before * 1e6))
            if not old or not self._remove(directory, old):
                break
            count += len(old)
        self._blocks.counted.add("expired_blocks", count)
        return count

    def _make_room(self, directory: Directory) -> bool:
        with directory.guarded():
            if directory.slabs.grow(self._slot_bytes):
                return True
            if self._take_foreign_slab(directory) and directory.slabs.grow(self._slot_bytes):
                return True
        if self._blocks.retry_removals(directory):
            return True
        _, there = directory.slabs.usage(self._slot_bytes)
        return self._evict(directory, max(1, there // _BATCH_SHARE), needed=True) > 0

    def _take_foreign_slab(self, directory: Directory) -> bool:
        """Drop the longest unused slabs of other slot sizes until one of ours fits in their place.
        False when none is left that is older than all we have here."""
        size = self._slot_bytes
        foreign = [number for number, other in directory.slabs.sizes().items() if other != size]
        if not foreign:
            return False
        self._blocks.flush_touches(directory)
        if directory not in self._newest:  # nobody uses them while this model is served
            self._newest[directory] = directory.index.newest_access()
        newest = self._newest[directory]
        oldest = directory.index.oldest(1, slot_bytes=size)
        for number in sorted(foreign, key=lambda number: newest.get(number, 0)):
            if oldest and newest.get(number, 0) >= oldest[0].accessed:
                return False
            if self._blocks.drop_slab(directory, number) and directory.slabs.growable_slots(size):
                return True
        return False

    def _evict(self, directory: Directory, wanted: int, *, needed: bool) -> int:
        """Evict until `wanted` slots of this directory are free again. Returns blocks evicted.

        needed: evict blocks that waiting requests need too, if there are no others.
        """
        self._blocks.flush_touches(directory)
        behind: Resident | None = None
        evicted = 0
        last: list[tuple[float, Resident]] = []
        for _ in range(_MOST_PAGES):
            with directory.guarded():
                page = directory.index.oldest(_PAGE, behind, slot_bytes=self._slot_bytes)
            if not page:
                break
            behind = page[-1]
            uses = [(self._uses.get(resident.block_id), resident) for resident in page]
            victims = [resident for use, resident in uses if use is None][: wanted - evicted]
            evicted += self._remove(directory, victims)
            if evicted >= wanted:
                break
            last += [(use, resident) for use, resident in uses if use is not None]
            last = nlargest(wanted - evicted, last, key=_use)
        if needed and evicted < wanted:
            victims = [resident for _, resident in last[: wanted - evicted]]
            evicted += self._remove(directory, victims)
        self._blocks.counted.add("evicted_blocks", evicted)
        return evicted

    def _remove(self, directory: Directory, residents: Sequence[Resident]) -> int:
        by_model: dict[bytes, list[bytes]] = {}
        for resident in residents:
            by_model.setdefault(resident.fingerprint, []).append(resident.block_id)
        count = self._blocks.remove(by_model.pop(self._blocks.model.fingerprint, ()), [directory])
        for fingerprint, block_ids in by_model.items():
            count += self._blocks.remove_rows(directory, fingerprint, block_ids)
        return count


def _use(item: tuple[float, Resident]) -> float:
    return item[0]
