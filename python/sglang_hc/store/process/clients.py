"""The I/O process as an executor of scatters and as a holder of blocks.

Both keep working without the process. A thread of the scheduler process scatters then, and only the
disk tier is missing: no block is found on it, and none is written.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store import block_io
from sglang_hc.store.block_io import BlockDone, Erase, Layers, SlotRead, SlotWrite
from sglang_hc.store.disk import Block
from sglang_hc.store.executor import DRAIN_S, Completion, Operation, ThreadExecutor
from sglang_hc.store.host_memory import HostMemory
from sglang_hc.store.outcome import GOOD, Outcome
from sglang_hc.store.process import messages as wire
from sglang_hc.store.process.supervisor import IoSupervisor, State
from sglang_hc.tree.forgetting import Forgetting

SCATTER_DEADLINE_S = 10.0
"""A scatter only moves memory; the deadline is there to notice a process that hangs."""


class ProcessExecutor:
    """Executor whose operations run in the I/O process.

    They stay in order when a process is lost: the thread that stands in begins after the lost
    process's operations were given up, and a new process gets none before that thread is done.
    """

    def __init__(self, supervisor: IoSupervisor, memory: HostMemory) -> None:
        self.supervisor = supervisor
        self._memory = memory
        self._held: deque[tuple[int, Operation]] = deque()
        self._sent: dict[int, float] = {}
        self._stand_in: ThreadExecutor | None = None
        self._done: list[Completion] = []
        supervisor.clients.append(self)

    def submit(self, ticket: int, operation: Operation) -> None:
        self._held.append((ticket, operation))
        self._feed()

    def poll(self) -> list[Completion]:
        self.supervisor.poll()
        if self._stand_in is not None:
            self._done += self._stand_in.poll()
        self._feed()
        done, self._done = self._done, []
        return done

    def drain(self) -> list[Completion]:
        end = time.monotonic() + DRAIN_S
        done = self.poll()
        while (self._held or self._sent or self._stands_in) and time.monotonic() < end:
            time.sleep(0.0005)
            done += self.poll()
        return done

    def levels(self) -> dict[str, int]:
        return {"io_up": int(self.supervisor.state is State.UP)}

    def close(self) -> None:
        self.supervisor.close()
        if self._stand_in is not None:
            self._stand_in.close()

    def answered(self, answers: wire.Answers) -> None:
        for done in answers.scattered:
            if self._sent.pop(done.ticket, None) is not None:
                self._done.append(done)

    def up(self) -> None:
        self._feed()

    def lost(self) -> int:
        lost = list(self._sent)
        self._done += [Completion(ticket, False) for ticket in lost]
        self._sent.clear()
        self._feed()
        return len(lost)

    def will_not_end(self) -> int:
        """None of its code runs any more, and only code writes what is scattered."""
        return self.lost()

    def earliest_deadline(self) -> float:
        return min(self._sent.values(), default=float("inf"))

    @property
    def _stands_in(self) -> bool:
        return self._stand_in is not None and self._stand_in.under_way > 0

    def _feed(self) -> None:
        while self._held:
            ticket, operation = self._held[0]
            if self.supervisor.state is State.UP:
                if self._stands_in:
                    return
                self.supervisor.send(wire.Execute(ticket, operation))
                self._sent[ticket] = time.monotonic() + SCATTER_DEADLINE_S
            elif self._sent:
                return
            else:
                if self._stand_in is None:
                    memory = self._memory
                    self._stand_in = ThreadExecutor(memory.pool, memory.snapshots)
                self._stand_in.submit(ticket, operation)
            self._held.popleft()


class ProcessBlocks:
    """BlockIo whose store is in the I/O process; which blocks it has is mirrored here.

    The mirror outlives a lost process. A new one names its blocks again; a block that only the
    mirror knows costs one miss.
    """

    name = "disk"

    def __init__(self, supervisor: IoSupervisor) -> None:
        self._supervisor = supervisor
        self.counts = supervisor.counts
        self._known: dict[bytes, None] = {}
        """A dict and no set: the garbage collector visits every element of a set, but passes over a
        dict of plain bytes."""
        self._under_way: dict[int, SlotRead | SlotWrite | Erase] = {}
        self._writing = 0
        self._done: list[BlockDone] = []
        self._news: dict[bytes, bool] | None = None
        """See `changes`; None until somebody asks."""
        self._directories = 1
        """In use, as the process said last; one until it says so."""
        self._clearing: set[int] = set()
        """Tickets of those who erase everything: nothing is found meanwhile."""
        supervisor.clients.append(self)

    @property
    def capacity(self) -> int:
        return self._supervisor.capacity

    @property
    def _open(self) -> bool:
        return self._supervisor.state is State.UP and self._directories > 0 and not self._clearing

    def contains(self, block_ids: Sequence[bytes]) -> int:
        if not self._open:
            return 0
        return len(list(itertools.takewhile(self._known.__contains__, block_ids)))

    def sources(self, block_ids: Sequence[bytes]) -> list[SourceTier]:
        return [SourceTier.DISK] * len(block_ids)

    def changes(self) -> Mapping[bytes, bool]:
        news, self._news = self._news, {}
        return dict.fromkeys(self._known, True) if news is None else news

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        return False

    def wants(self, block_id: bytes) -> bool:
        return block_id not in self._known

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> bool:
        if not self._open or self._writing >= block_io.WRITE_QUEUE:
            return False
        self._send(SlotWrite(ticket, block, slot, deadline))
        self._writing += 1
        return True

    def read(
        self, ticket: int, block_id: bytes, slot: int, deadline: float, layers: Layers = None
    ) -> None:
        """As `OwnDisk.read`."""
        if self._open:
            self._send(SlotRead(ticket, block_id, slot, deadline, layers))
        else:
            self._done.append(BlockDone(ticket, Outcome.LOST, "disk"))

    def _send(self, operation: SlotRead | SlotWrite | Erase) -> None:
        self._supervisor.send(operation)
        self._under_way[operation.ticket] = operation

    def flush(self) -> None:
        self._supervisor.flush()

    def poll(self) -> list[BlockDone]:
        self._supervisor.poll()
        done, self._done = self._done, []
        return done

    def touch(self, block_ids: Sequence[bytes]) -> None:
        if self._open:
            self._supervisor.send(wire.Touch(list(block_ids)))

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        if self._supervisor.state is State.UP:  # closed or not: what is not told again is stale
            self._supervisor.send(wire.Expect(dict(uses)))

    def erase(self, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]) -> int:
        if self._supervisor.state is not State.UP:
            self._done.append(BlockDone(ticket, Outcome.LOST, "disk"))
            return 1
        if what is None:
            self._known = {}
            self._news = None if self._news is None else {}
            self._clearing.add(ticket)
        self._send(Erase(ticket, what))
        return 1

    def levels(self) -> dict[str, int]:
        up = self._supervisor.state is State.UP
        directories = self._directories if up else 0
        return {"disk_blocks": len(self._known), "disk_directories": directories}

    def close(self) -> None:
        self._supervisor.close()

    def answered(self, answers: wire.Answers) -> None:
        for done in answers.blocks:
            if done.ticket in self._under_way:
                self._end(done)
        for block_id, here in answers.changes.items():
            if not here:
                self._known.pop(block_id, None)
            elif not self._clearing:
                self._known[block_id] = None
        if self._news is not None:
            self._news.update(answers.changes)
        self._directories = answers.directories
        self.counts.update(answers.counts)

    def up(self) -> None:
        self._directories = 1

    def lost(self) -> int:
        lost = list(self._under_way)
        for ticket in lost:
            self._end(BlockDone(ticket, Outcome.LOST, "disk"))
        return len(lost)

    def will_not_end(self) -> int:
        """A read that the system goes on with still writes to its slot, which stays in use. A write
        takes what it finds in its slot by then, and no code makes that a block. What was to be
        erased may be left."""
        lost = [ticket for ticket, one in self._under_way.items() if not isinstance(one, SlotRead)]
        for ticket in lost:
            self._end(BlockDone(ticket, Outcome.LOST, "disk"))
        return len(lost)

    def earliest_deadline(self) -> float:
        deadlines = [operation.deadline for operation in self._under_way.values()]
        return min(deadlines, default=float("inf"))

    def _end(self, done: BlockDone) -> None:
        operation = self._under_way.pop(done.ticket)
        if isinstance(operation, Erase):
            self._clearing.discard(done.ticket)
            self._done.append(done)
            return
        self._writing -= isinstance(operation, SlotWrite)
        name = operation.block_id if isinstance(operation, SlotRead) else operation.block.block_id
        if done.outcome in GOOD:
            if not self._clearing:
                self._known[name] = None
                if self._news is not None:
                    self._news.pop(name, None)  # it left before it was written
        elif done.outcome is Outcome.MISSING:
            self._known.pop(name, None)
        self._done.append(done)
