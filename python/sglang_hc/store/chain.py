"""Two holders of blocks behind one `BlockIo`: disks of this machine, and a store beyond them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockDone, BlockIo, Change, count_write
from sglang_hc.store.outcome import GOOD
from sglang_hc.tree.forgetting import Forgetting


class Chain:
    """Finds a block in either holder and reads it from the nearer one; writes to both.

    A slot is given back when both are through with it. Belongs to one thread, as BlockIo says. Both
    count in the same place.
    """

    def __init__(self, near: BlockIo, far: BlockIo) -> None:
        self._near, self._far = near, far
        self._twice: dict[int, BlockDone | None] = {}
        """By ticket, of writes that both holders want: how the first to end has ended, if any."""
        self.counts, self.capacity = near.counts, near.capacity
        self.name = f"{near.name}+{far.name}"
        self.tiers = *near.tiers, *far.tiers

    def contains(self, block_ids: Sequence[bytes]) -> int:
        """The path may change between the holders, and back."""
        found = 0
        while found < len(block_ids):
            found += self._near.contains(block_ids[found:])
            more = self._far.contains(block_ids[found:])
            if not more:
                break
            found += more
        return found

    def sources(self, block_ids: Sequence[bytes]) -> list[SourceTier]:
        nearer = self._near.contains
        return [
            (self._near if nearer((block_id,)) else self._far).sources((block_id,))[0]
            for block_id in block_ids
        ]

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        unknown = block_ids[self.contains(block_ids) :]
        return self._near.ask(unknown) or self._far.ask(unknown)

    def wants(self, block_id: bytes, *, had: bool = False) -> bool:
        return self._near.wants(block_id, had=had) or self._far.wants(block_id, had=had)

    def news(self, *, anew: bool = False) -> list[Change]:
        return self._near.news(anew=anew) + self._far.news(anew=anew)

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> None:
        wanting = [one for one in (self._near, self._far) if one.wants(block.block_id)]
        if len(wanting) == 2:
            self._twice[ticket] = None
        for holder in wanting or [self._near]:
            holder.write(ticket, block, slot, deadline)

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        holder = self._near if self._near.contains((block_id,)) else self._far
        holder.read(ticket, block_id, slot, deadline)

    def poll(self) -> list[BlockDone]:
        """Of a write to both holders one answer is passed on when both have ended, as until then
        the slot is in use: the disk's if it failed, so that it is tried again, else the last. The
        other is counted here."""
        done = []
        for answer in (*self._near.poll(), *self._far.poll()):
            last = answer
            if answer.ticket in self._twice:
                first = self._twice.pop(answer.ticket)
                if first is None:
                    self._twice[answer.ticket] = answer
                    continue
                if first.tier == SourceTier.DISK.value and first.outcome not in GOOD:
                    first, last = last, first
                count_write(self.counts, first)
            done.append(last)
        return done

    def touch(self, block_ids: Sequence[bytes]) -> None:
        self._near.touch(block_ids)
        self._far.touch(block_ids)

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        self._near.expect(uses)
        self._far.expect(uses)

    def erase(self, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]) -> None:
        self._near.erase(ticket, what, block_ids)
        self._far.erase(ticket, what, block_ids)

    def levels(self) -> dict[str, int]:
        return {**self._near.levels(), **self._far.levels()}

    def close(self) -> None:
        """One after the other: what hangs in both takes the patience of both."""
        self._near.close()
        self._far.close()
