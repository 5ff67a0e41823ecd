"""Where blocks go below the host tier: submit reads and writes of whole slots, poll what is done.

`BlockIo` is what whoever owns the slots sees: a store of which is known what it has
(`known_blocks.py`), or a chain of two. `LocalBlockIo` is a store as one process has it: directories
(`disk/threads.py`), a remote store (`remote/store.py`), and what several ranks make of either
(`ranks/block_io.py`). An operation that fails is answered, never raised.
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
"""Blocks that may wait to be written to directories; a write beyond it is dropped."""


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
    `time.monotonic`; None where that is not known. blocks: how many were erased, or are there.
    by_name: only blocks were erased that were named to the store, which may have more of the same
    namespaces.
    """

    ticket: int
    outcome: Outcome
    tier: str
    at: float | None = None
    blocks: int = 0
    by_name: bool = False


def count_write(counts: Counter[str], done: BlockDone) -> None:
    """Count what became of a write."""
    if done.outcome is Outcome.OK:
        counts[f"{done.tier}_saved_blocks"] += 1
    elif done.outcome is Outcome.DROPPED and done.tier == SourceTier.DISK.value:
        counts["disk_save_dropped"] += 1
    elif done.outcome is not Outcome.DUPLICATE:
        counts[f"{done.tier}_write_{done.outcome.value}"] += 1


class Change(NamedTuple):
    """Whether a tier has a block now."""

    tier: SourceTier
    block_id: bytes
    here: bool


class _Moves(Protocol):
    """What both interfaces have. All methods belong to one thread and none waits, except `close`.

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

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        """Fetch a block into a slot and verify it."""

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> None:
        """Store a block from its slot. Answered DROPPED where too many wait."""

    def poll(self) -> list[BlockDone]:
        """Answers since the last call, in the order in which they came."""

    def touch(self, block_ids: Sequence[bytes]) -> None:
        """A prefix path was used, wherever it was served from; identities in path order. Blocks
        that are not here are ignored."""

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        """When waiting requests will use blocks, as far as that has changed: a rank, smaller is
        sooner, or None for no more. A hint for eviction; it may be late or lost."""

    def erase(self, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]) -> None:
        """Erase the blocks of some namespaces, or everything for None. block_ids: those of these
        that the caller knows, for a store that knows blocks by name alone. None of them may be
        waiting to be written. Each tier answers: OK where what was there can never be found again;
        after another answer something may be left."""

    def levels(self) -> dict[str, int]:
        """Numbers that go up and down, by the name under which they are shown."""

    def close(self) -> None:
        """Finish what was submitted and give everything back."""


class BlockIo(_Moves, Protocol):
    """Holds blocks below the host tier."""

    @property
    def tiers(self) -> tuple[SourceTier, ...]:
        """Those that answer when something is erased."""

    def sources(self, block_ids: Sequence[bytes]) -> list[SourceTier]:
        """From which tier each of these would be read now."""

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        """Find out about the identities after those that `contains` counts. True while an answer
        is on its way, soon enough for a request to wait for it."""

    def wants(self, block_id: bytes, *, had: bool = False) -> bool:
        """Whether a write of this block would add anything, as far as known now. had: it was here
        once, which counts where the store does not say by itself what it has."""

    def news(self, *, anew: bool = False) -> list[Change]:
        """Blocks that came or left since the last call, as far as known now. anew: all that are
        here instead. Nothing is noted before the first call; for one caller."""


class LocalBlockIo(_Moves, Protocol):
    """A store as one process has it. `contains` counts what it has a record of.

    tier: what it is to the server. has_record: its record names all that is there, but for what
    others have just stored; else it has none. rests: it leaves alone what keeps failing.
    """

    tier: SourceTier
    has_record: bool
    rests: bool

    @property
    def is_shared(self) -> bool:
        """Whether others may have stored what is not known here, so that asking has a point."""

    @property
    def hangs(self) -> bool:
        """A call of this process has not come back in time, and nothing is asked of the store until
        it does. For people; decisions go by the answers."""

    def look_up(self, ticket: int, block_ids: Sequence[bytes], deadline: float) -> None:
        """Ask how many of the first identities are there without a gap: `blocks` of the answer."""

    def changes(self, *, anew: bool = False) -> Mapping[bytes, bool]:
        """Identities that came into the record or left it by themselves since the last call, and
        whether they are there now. The first call, and one `anew`, names all that are there;
        nothing is noted before the first. For one caller."""
