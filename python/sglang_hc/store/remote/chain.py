"""Two holders of blocks behind one `BlockIo`: a disk of this machine, and a store beyond it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sglang_hc.store.block_io import BlockDone, BlockIo, count_write
from sglang_hc.store.disk import Block
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.remote.backend import Frames, RemoteBackend
from sglang_hc.store.remote.blocks import RemoteBlocks


@dataclass(eq=False)
class _Link:
    """One holder, and which of the chain's operations its tickets belong to."""

    io: BlockIo
    reads: dict[int, int] = field(default_factory=dict)
    writes: dict[int, _Write] = field(default_factory=dict)


@dataclass(eq=False)
class _Write:
    """A block on its way to one or both holders."""

    ticket: int
    open: int = 0


class Chain:
    """Finds a block in either holder and reads it from the nearer one; writes to both.

    A slot is given back when both are through with it. Belongs to one thread, as BlockIo says.
    """

    def __init__(self, near: BlockIo, far: BlockIo) -> None:
        self._near, self._far = _Link(near), _Link(far)
        self._tickets = itertools.count(1)
        self._counters: Counter[str] = Counter()

    @property
    def name(self) -> str:
        return f"{self._near.io.name}+{self._far.io.name}"

    @property
    def capacity(self) -> int:
        return self._near.io.capacity

    def contains(self, block_ids: Sequence[bytes]) -> int:
        """The path may change between the holders, and back."""
        found = 0
        while found < len(block_ids):
            found += self._near.io.contains(block_ids[found:])
            more = self._far.io.contains(block_ids[found:])
            if not more:
                break
            found += more
        return found

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        return self._far.io.ask(block_ids[self.contains(block_ids) :])

    def wants(self, block_id: bytes) -> bool:
        return self._near.io.wants(block_id) or self._far.io.wants(block_id)

    def write(self, block: Block, slot: int, deadline: float) -> int | None:
        write = _Write(next(self._tickets))
        for link in (self._near, self._far):
            if not link.io.wants(block.block_id):
                continue
            ticket = link.io.write(block, slot, deadline)
            if ticket is None:
                self._counters["disk_save_dropped"] += 1
            else:
                link.writes[ticket] = write
                write.open += 1
        return write.ticket if write.open else None

    def read(self, block_id: bytes, slot: int, deadline: float) -> int:
        link = self._near if self._near.io.contains((block_id,)) else self._far
        ticket = next(self._tickets)
        link.reads[link.io.read(block_id, slot, deadline)] = ticket
        return ticket

    def flush(self) -> None:
        self._near.io.flush()
        self._far.io.flush()

    def poll(self) -> list[BlockDone]:
        done = []
        for link in (self._near, self._far):
            for answer in link.io.poll():
                ticket = link.reads.pop(answer.ticket, None)
                if ticket is None:
                    write = link.writes.pop(answer.ticket)
                    write.open -= 1
                    if write.open:  # of the other holder's answer, the owner of the slot learns
                        count_write(self._counters, answer)
                        continue
                    ticket = write.ticket
                done.append(answer._replace(ticket=ticket))
        return done

    def touch(self, block_ids: Sequence[bytes]) -> None:
        self._near.io.touch(block_ids)
        self._far.io.touch(block_ids)

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        self._near.io.expect(uses)
        self._far.io.expect(uses)

    def clear(self) -> None:
        self._near.io.clear()
        self._far.io.clear()

    def levels(self) -> dict[str, int]:
        return {**self._near.io.levels(), **self._far.io.levels()}

    def counts(self) -> Counter[str]:
        return self._counters + self._near.io.counts() + self._far.io.counts()

    def close(self) -> None:
        self._near.io.close()
        self._far.io.close()


def behind(
    near: BlockIo | None, backend: RemoteBackend, frames: Frames, pool: HostPool, fingerprint: bytes
) -> BlockIo:
    """A remote store behind the holder of blocks that is there already, if any."""
    far = RemoteBlocks(backend, frames, pool, fingerprint)
    return far if near is None else Chain(near, far)
