"""Blocks in a remote store: a `BlockIo` that remembers what it was told of the store.

    contains   answers from what is known
    ask        what is not known is looked up
    read       fetches a block; what comes proves whether the store really has it
    write      stores a block; beyond a bound a save is dropped

A store that raises, hangs, or hands out bytes that are not the block is a miss and a counter. One
that keeps failing is left alone for a while; the log says so. Decides by the answers and the clock
alone, so several ranks that get the same answers at the same time decide alike.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.circuit_breaker import CircuitBreaker
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.remote.presence_cache import Presence, PresenceCache
from sglang_hc.store.remote.store import TIER, Found, StoreIo
from sglang_hc.tree.forgetting import Forgetting

logger = logging.getLogger(__name__)

SAVE_QUEUE = 64
"""Blocks that may wait to be stored; a write beyond it is dropped."""

LOOKUP_QUEUE = 256
"""Questions that may be open; beyond it a block counts as absent."""

LOOKUP_S = 2.0
"""Longest that a request may wait for the answer to a question; as a rule a round trip."""

CLEAR_S = 60.0

_AFTER = {
    Outcome.MISSING: Presence.ABSENT,
    Outcome.TIMED_OUT: Presence.ABSENT,
    Outcome.DAMAGED: Presence.USELESS,
    Outcome.IO_ERROR: Presence.USELESS,
    Outcome.STUCK: Presence.ABSENT,
}
"""What a failed read says about the block."""


class RemoteBlocks:
    """See the module, and `BlockIo` for the contract. Belongs to the scheduler thread."""

    capacity = 0

    def __init__(
        self, store: StoreIo, counts: Counter[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """counts: gets the questions and the pauses. clock: the one that deadlines are on."""
        self.counts = counts
        self._store = store
        self._clock = clock
        self._presence = PresenceCache(clock)
        self._tickets = itertools.count()
        self._questions: dict[int, Sequence[bytes]] = {}
        """Identities by ticket."""
        self._erasures: dict[int, tuple[int, Sequence[bytes] | None]] = {}
        """By the ticket of the question: the caller's, and the blocks, None for all."""
        self._asked: set[bytes] = set()
        self._reads: dict[int, bytes] = {}
        self._writes: dict[int, bytes] = {}
        self._answers: list[BlockDone] = []
        self._cleared = True
        self._reading, self._saving = CircuitBreaker(clock), CircuitBreaker(clock)

    @property
    def name(self) -> str:
        """The back end's, for people."""
        return self._store.name

    # -- BlockIo ---------------------------------------------------------------------------------

    def contains(self, block_ids: Sequence[bytes]) -> int:
        return self._presence.leading(block_ids) if self._readable else 0

    def sources(self, block_ids: Sequence[bytes]) -> list[SourceTier]:
        return [SourceTier.REMOTE] * len(block_ids)

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        """As in BlockIo; an answer is on its way for at most LOOKUP_S."""
        if not self._readable:
            return False
        found = self._presence.leading(block_ids)
        if found == len(block_ids):
            return False
        first = block_ids[found]
        if self._presence.state(first) is None and first not in self._asked:
            self._look_up(block_ids[found:])
        return first in self._asked

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        if self._readable:
            self._reads[ticket] = block_id
            self._store.read(ticket, block_id, slot, deadline)
        else:
            self._at_once(ticket, Outcome.MISSING)

    def wants(self, block_id: bytes) -> bool:
        return self._presence.state(block_id) not in (Presence.PRESENT, Presence.USELESS)

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> bool:
        """As in BlockIo, but never refused: a write that would wait too long is answered DROPPED,
        so that the reason is counted."""
        if not self.wants(block.block_id):
            self._at_once(ticket, Outcome.DUPLICATE)
        elif len(self._writes) >= SAVE_QUEUE or not self._saving.allows():
            self._at_once(ticket, Outcome.DROPPED)
        else:
            self._writes[ticket] = block.block_id
            self._store.write(ticket, block, slot, deadline)
        return True

    def poll(self) -> list[BlockDone]:
        for found in self._store.found():
            self._answered(found)
        done, self._answers = self._answers, []
        for answer in self._store.poll():
            self._note(answer)
            done.append(answer)
        return done

    def touch(self, block_ids: Sequence[bytes]) -> None:
        """What leaves the store is the store's own business."""

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        """As `touch`."""

    def erase(self, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]) -> int:
        """None empties the store, of everybody's blocks, as SGLang's own tiers do. Nothing is
        looked up until that is through; if it fails, until a restart. Else the named blocks go: the
        store knows no namespaces."""
        self._cleared = self._cleared and what is not None
        wanted = None if what is None else block_ids
        question = next(self._tickets)
        self._erasures[question] = ticket, wanted
        self._store.erase(question, wanted, self._clock() + CLEAR_S)
        return 1

    def levels(self) -> dict[str, int]:
        """Whether the store is asked at present."""
        usable = self._readable and self._saving.allows() and not self._store.hangs
        return {"remote_usable": int(usable)}

    def close(self) -> None:
        self._store.close()

    # -- inner parts -----------------------------------------------------------------------------

    @property
    def _readable(self) -> bool:
        return self._cleared and self._reading.allows()

    def _at_once(self, ticket: int, outcome: Outcome) -> None:
        """Answer what the store is not asked for; it must not wait behind what it is asked for."""
        self._answers.append(BlockDone(ticket, outcome, TIER))

    def _look_up(self, block_ids: Sequence[bytes]) -> None:
        if len(self._questions) >= LOOKUP_QUEUE:
            self.counts["remote_lookup_dropped"] += 1
            self._presence.note(block_ids[0], Presence.ABSENT)
            return
        ticket = next(self._tickets)
        self._asked.update(block_ids)
        self._questions[ticket] = block_ids
        self._store.look_up(ticket, block_ids, self._clock() + LOOKUP_S)
        self.counts["remote_lookups"] += 1

    def _answered(self, found: Found) -> None:
        if found.ticket in self._erasures:
            self._end_erasure(found)
            return
        block_ids = self._questions.pop(found.ticket)
        good = found.outcome is Outcome.OK
        self._asked.difference_update(block_ids)
        self._judge(self._reading, found.outcome, "lookups and reads")
        if not good:
            self.counts[f"remote_lookup_{found.outcome.value}"] += 1
        count = found.leading if good else 0
        for block_id in block_ids[:count]:
            self._presence.note(block_id, Presence.PRESENT)
        for block_id in block_ids[count : count + 1]:
            self._presence.note(block_id, Presence.ABSENT)

    def _end_erasure(self, found: Found) -> None:
        ticket, block_ids = self._erasures.pop(found.ticket)
        good = found.outcome is Outcome.OK
        if block_ids is None:
            self._presence.clear()
            self._cleared = good
        elif good:
            for block_id in block_ids:
                self._presence.note(block_id, Presence.ABSENT)
        self._answers.append(
            BlockDone(ticket, found.outcome, TIER, None, found.leading if good else 0)
        )

    def _note(self, done: BlockDone) -> None:
        """What the end of a read or a write says about the block and the store."""
        written = self._writes.pop(done.ticket, None)
        if written is None:
            block_id = self._reads.pop(done.ticket)
            if done.outcome is not Outcome.OK:
                self._presence.note(block_id, _AFTER[done.outcome])
            self._judge(self._reading, done.outcome, "lookups and reads")
        else:
            if done.outcome is Outcome.OK:
                self._presence.note(written, Presence.PRESENT)
            self._judge(self._saving, done.outcome, "saves")

    def _judge(self, breaker: CircuitBreaker, outcome: Outcome, what: str) -> None:
        """Note what an answer says about the store's health; make a pause when it keeps failing."""
        if outcome in (Outcome.OK, Outcome.MISSING):
            breaker.succeeded()
        elif outcome in (Outcome.IO_ERROR, Outcome.TIMED_OUT) and breaker.failed():
            self.counts["remote_pauses"] += 1
            logger.warning(
                "sglang-hc: the remote store (%s) keeps failing; %s are off for a while",
                self.name,
                what,
            )
