"""Where blocks go below the host tier: submit reads and writes of whole slots, poll what is done.

One narrow interface, so that a disk, a remote store and a chain of both look the same to whoever
owns the slots. An operation that fails is answered, never raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block import Block
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.forgetting import Forgetting

WRITE_QUEUE = 256
"""Blocks that may wait to be written, shared by the directories; a write beyond it is refused."""


class SlotWrite(NamedTuple):
    """See `BlockIo.write`."""

    ticket: int
    block: Block
    slot: int
    deadline: float


class SlotRead(NamedTuple):
    """See `BlockIo.read`."""

    ticket: int
    block_id: bytes
    slot: int
    deadline: float


class BlockDone(NamedTuple):
    """Answer to one operation, under the ticket that its caller gave it.

    tier: which tier served, took or erased, `disk` or `remote`. at: when it was done, on
    `time.monotonic`; None where that is not known. blocks: how many were erased.
    """

    ticket: int
    outcome: Outcome
    tier: str
    at: float | None = None
    blocks: int = 0


def count_write(counts: Counter[str], done: BlockDone) -> None:
    """Count what became of a write."""
    if done.outcome is Outcome.OK:
        counts[f"{done.tier}_saved_blocks"] += 1
    elif done.outcome is Outcome.DROPPED and done.tier == SourceTier.DISK.value:
        counts["disk_save_dropped"] += 1
    elif done.outcome is not Outcome.DUPLICATE:
        counts[f"{done.tier}_write_{done.outcome.value}"] += 1


class BlockIo(Protocol):
    """Holds blocks below the host tier. All methods belong to one thread and none waits, except
    `close`.

    The caller names each operation with a ticket, a number that no other operation under way has;
    the answer carries the same ticket, whatever stands between the caller and the store.

    A slot given to `read` or `write` belongs to the operation until its answer was polled: nobody
    else writes it, and after the answer nothing here touches it any more. Deadlines are on
    `time.monotonic`; an operation not begun by then is answered TIMED_OUT.
    """

    @property
    def counts(self) -> Counter[str]:
        """Where this and its owner count what happens; handed in by whoever built it."""

    @property
    def name(self) -> str:
        """For people: shown with every hit as the storage back end."""

    @property
    def capacity(self) -> int:
        """Blocks that fit; 0 when that is not known."""

    def contains(self, block_ids: Sequence[bytes]) -> int:
        """How many of the first identities are here without a gap, as far as known now. In
        microseconds. A yes is no promise."""

    def sources(self, block_ids: Sequence[bytes]) -> list[SourceTier]:
        """From which tier each of these would be read now."""

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        """Find out about the identities after those that `contains` counts. True while an answer
        is on its way, soon enough for a request to wait for it."""

    def wants(self, block_id: bytes) -> bool:
        """Whether a write of this block would add anything, as far as known now."""

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> bool:
        """Store a block from its slot. False when it is refused because the queue is full; then
        there is no answer."""

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        """Fetch a block into a slot and verify it."""

    def poll(self) -> list[BlockDone]:
        """Answers since the last call, in the order in which they came."""

    def touch(self, block_ids: Sequence[bytes]) -> None:
        """A prefix path was used, wherever it was served from; identities in path order. Blocks
        that are not here are ignored."""

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        """When waiting requests will use blocks, as far as that has changed: a rank, smaller is
        sooner, or None for no more. A hint for eviction; it may be late or lost."""

    def erase(self, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]) -> int:
        """Erase the blocks of some namespaces, or everything for None. block_ids: those of these
        that the caller knows, for a store that knows blocks by name alone. Where namespaces are
        named, no block of theirs may be waiting to be written. Answered OK by each tier for which
        what was there can never be found again; returns how many answers come. After an answer
        that is not OK something may be left."""

    def levels(self) -> dict[str, int]:
        """Numbers that go up and down, by the name under which they are shown."""

    def close(self) -> None:
        """Finish what was submitted and give everything back."""


class OwnDisk(BlockIo, Protocol):
    """What a rank has below its host tier, if it is nobody else's."""

    def changes(self) -> Mapping[bytes, bool]:
        """Identities that came or left by themselves since the last call, and whether they are
        there now. The first call names all that are there; nothing is noted before it."""
