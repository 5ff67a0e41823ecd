"""A store behind `BlockIo`: remembers what it was told of the store.

    contains   answers from what is known
    ask        what is not known is looked up
    read       fetches a block; what comes proves whether the store really has it
    write      stores a block; beyond a bound a save is dropped

A store that raises, hangs, or hands out bytes that are not the block is a miss and a counter. One
that keeps failing is left alone for a while, unless it does so by itself; the log says so. Decides
by the answers and the clock alone, so several ranks that get the same answers at the same time
decide alike.
"""

from __future__ import annotations

import enum
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import WRITE_QUEUE, BlockDone, Change, LocalBlockIo
from sglang_hc.store.circuit_breaker import CircuitBreaker
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.forgetting import Forgetting

logger = logging.getLogger(__name__)

SAVE_QUEUE = 64
"""Blocks that may wait to be written to a remote store, each call of which may take long."""

LOOKUP_QUEUE = 256
"""Questions that may be open; beyond it a block counts as absent."""

LOOKUP_S = 2.0
"""Longest that a request may wait for the answer to a question; as a rule a round trip."""

MOST_REMEMBERED = 1 << 18


class Presence(enum.Enum):
    """What was found out about a block. The value is for how many seconds it is believed."""

    PRESENT = 60.0
    """May be stale: somebody else decides what leaves the store. A wrong yes costs one read."""
    ABSENT = 2.0
    """Asked again soon: another server may have stored the block meanwhile."""
    USELESS = 600.0
    """It is there and cannot be served. Stores keep the first bytes of a key, so that saving the
    block again would not heal it."""


_NOTHING = (None, 0.0)


class PresenceCache:
    """Identities seen or missed lately, each for a while; the oldest are forgotten first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: OrderedDict[bytes, tuple[Presence, float]] = OrderedDict()

    def state(self, identity: bytes) -> Presence | None:
        """None: not known, or no longer."""
        found = self._found.get(identity)
        return None if found is None or self._clock() >= found[1] else found[0]

    def leading(self, identities: Sequence[bytes]) -> int:
        """How many of the first identities are known to be there."""
        now = self._clock()
        for index, identity in enumerate(identities):
            presence, until = self._found.get(identity, _NOTHING)
            if presence is not Presence.PRESENT or now >= until:
                return index
        return len(identities)

    def note(self, identity: bytes, presence: Presence) -> None:
        """Remember an answer in place of an earlier one; a useless block stays useless."""
        if self.state(identity) is Presence.USELESS:
            return
        self._found.pop(identity, None)
        self._found[identity] = presence, self._clock() + presence.value
        if len(self._found) > MOST_REMEMBERED:
            self._found.popitem(last=False)

    def clear(self) -> None:
        self._found.clear()


_AFTER = {
    Outcome.MISSING: Presence.ABSENT,
    Outcome.TIMED_OUT: Presence.ABSENT,
    Outcome.DAMAGED: Presence.USELESS,
    Outcome.IO_ERROR: Presence.USELESS,
    Outcome.STUCK: Presence.ABSENT,
}
"""What a failed read says about the block, where the store has no record of its own."""

_UNWELL = (Outcome.STUCK, Outcome.IO_ERROR, Outcome.TIMED_OUT)


class _Told:
    """Which blocks a store got, or did not have, by what was asked of it here. there: those that it
    should have, the newest of them; where it has a record, those since the last `news`."""

    def __init__(self) -> None:
        self.there: OrderedDict[bytes, None] = OrderedDict()
        self._changed: dict[bytes, None] = {}

    def came(self, block_id: bytes) -> None:
        self._changed[block_id] = self.there[block_id] = None
        self.there.move_to_end(block_id)
        if len(self.there) > MOST_REMEMBERED:
            self.gone([next(iter(self.there))])

    def gone(self, block_ids: Sequence[bytes]) -> None:
        for block_id in block_ids:
            if block_id in self.there:
                del self.there[block_id]
                self._changed[block_id] = None

    def take(self, *, anew: bool) -> list[bytes]:
        """What changed since the last call; all that are there, if `anew`."""
        changed, self._changed = self._changed, {}
        return list(self.there if anew else changed)


class KnownBlocks:
    """See the module, and `BlockIo` for the contract. Belongs to the scheduler thread. Tickets of
    its own questions are below zero, those of callers are not."""

    def __init__(self, store: LocalBlockIo, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: the one that deadlines are on."""
        self.counts, self.name, self.capacity = store.counts, store.name, store.capacity
        self.tiers = (store.tier,)
        self.touch, self.expect, self.close = store.touch, store.expect, store.close
        self._store = store
        self._clock = clock
        self._presence = PresenceCache(clock)
        self._tickets = itertools.count(-1, -1)
        self._questions: dict[int, Sequence[bytes]] = {}
        """Identities by ticket."""
        self._erasures: dict[int, Sequence[bytes] | None] = {}
        """By ticket, None for all blocks."""
        self._asked: set[bytes] = set()
        self._reads: dict[int, bytes] = {}
        self._writes: dict[int, bytes] = {}
        self._answers: list[BlockDone] = []
        self._told: _Told | None = None
        """None until somebody asks for news."""
        self._cleared = True
        self._reading, self._saving = CircuitBreaker(clock), CircuitBreaker(clock)
        self._most_writes = WRITE_QUEUE if store.has_record else SAVE_QUEUE

    # -- BlockIo ---------------------------------------------------------------------------------

    def contains(self, block_ids: Sequence[bytes]) -> int:
        return self._leading(block_ids) if self._readable else 0

    def sources(self, block_ids: Sequence[bytes]) -> list[SourceTier]:
        return [self._store.tier] * len(block_ids)

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        """As in BlockIo; an answer is on its way for at most LOOKUP_S."""
        if not (self._store.is_shared and self._readable):
            return False
        found = self._leading(block_ids)
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

    def wants(self, block_id: bytes, *, had: bool = False) -> bool:
        if self._leading((block_id,)) > 0:
            return False
        presence = self._presence.state(block_id)
        if had and not self._store.has_record:
            return presence is Presence.ABSENT
        return presence is not Presence.USELESS

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> None:
        if not self.wants(block.block_id):
            self._at_once(ticket, Outcome.DUPLICATE)
        elif len(self._writes) >= self._most_writes or not self._saving.allows():
            self._at_once(ticket, Outcome.DROPPED)
        else:
            self._writes[ticket] = block.block_id
            self._store.write(ticket, block, slot, deadline)

    def poll(self) -> list[BlockDone]:
        ended = self._store.poll()
        done, self._answers = self._answers, []
        for answer in ended:
            if answer.ticket in self._questions:
                self._answered(answer)
                continue
            if answer.ticket in self._erasures:
                done.append(self._end_erasure(answer))
            else:
                self._note(answer)
                done.append(answer)
        return done

    def erase(self, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]) -> None:
        """As in BlockIo. None empties a remote store of everybody's blocks, as SGLang's own tiers
        do: nothing is looked up until that is through; if it fails, until a restart."""
        if what is None:
            self._cleared = self._store.has_record
        self._erasures[ticket] = None if what is None else block_ids
        self._store.erase(ticket, what, block_ids)

    def levels(self) -> dict[str, int]:
        """With whether a remote store is asked at present."""
        found = self._store.levels()
        if self._store.tier is SourceTier.REMOTE:
            usable = self._readable and self._saving.allows() and not self._store.hangs
            found["remote_usable"] = int(usable)
        return found

    def news(self, *, anew: bool = False) -> list[Change]:
        """As in BlockIo. A store without a record has what was written here or read from it, until
        that is not found there."""
        told = self._told if self._told is not None else _Told()
        self._told, changed = told, dict.fromkeys(told.take(anew=anew), False)
        if self._store.has_record:
            found = dict(self._store.changes(anew=anew))
            found |= {name: self._store.contains((name,)) > 0 for name in changed}
            told.there.clear()
        else:
            found = {name: name in told.there for name in changed}
        return [Change(self._store.tier, block_id, here) for block_id, here in found.items()]

    # -- inner parts -----------------------------------------------------------------------------

    @property
    def _readable(self) -> bool:
        return self._cleared and self._reading.allows()

    def _leading(self, block_ids: Sequence[bytes]) -> int:
        """How many of the first identities are known to be there."""
        if self._store.has_record:
            return self._store.contains(block_ids)
        return self._presence.leading(block_ids)

    def _at_once(self, ticket: int, outcome: Outcome) -> None:
        """Answer what the store is not asked for; it must not wait behind what it is asked for."""
        self._answers.append(BlockDone(ticket, outcome, self._store.tier.value))

    def _look_up(self, block_ids: Sequence[bytes]) -> None:
        tier = self._store.tier.value
        if len(self._questions) >= LOOKUP_QUEUE:
            self.counts[f"{tier}_lookup_dropped"] += 1
            self._presence.note(block_ids[0], Presence.ABSENT)
            return
        ticket = next(self._tickets)
        self._asked.update(block_ids)
        self._questions[ticket] = block_ids
        self._store.look_up(ticket, block_ids, self._clock() + LOOKUP_S)
        self.counts[f"{tier}_lookups"] += 1

    def _answered(self, done: BlockDone) -> None:
        block_ids = self._questions.pop(done.ticket)
        good = done.outcome is Outcome.OK
        self._asked.difference_update(block_ids)
        self._judge(self._reading, done.outcome, "lookups and reads")
        if not good:
            self.counts[f"{done.tier}_lookup_{done.outcome.value}"] += 1
        count = done.blocks if good else 0
        if not self._store.has_record:
            for block_id in block_ids[:count]:
                self._presence.note(block_id, Presence.PRESENT)
        for block_id in block_ids[count : count + 1]:
            self._presence.note(block_id, Presence.ABSENT)

    def _end_erasure(self, done: BlockDone) -> BlockDone:
        """Note it. Returns what the caller is told."""
        block_ids = self._erasures.pop(done.ticket)
        good = done.outcome is Outcome.OK
        if block_ids is None:
            self._presence.clear()
            if self._told is not None:
                self._told.gone(list(self._told.there))
            self._cleared = good or self._store.has_record
        elif good and not self._store.has_record:
            for block_id in block_ids:
                self._presence.note(block_id, Presence.ABSENT)
            self._tell_gone(block_ids)
        by_name = block_ids is not None and not self._store.has_record
        return done._replace(by_name=by_name)

    def _note(self, done: BlockDone) -> None:
        """What the end of a read or a write says about the block and the store."""
        written = self._writes.pop(done.ticket, None)
        read = self._reads.pop(done.ticket, None)
        self._judge(
            self._reading if written is None else self._saving,
            done.outcome,
            "lookups and reads" if written is None else "saves",
        )
        moved = read if written is None else written
        if self._told is not None and moved is not None and done.outcome is Outcome.OK:
            self._told.came(moved)
        if self._store.has_record:
            return
        if written is not None and done.outcome is Outcome.OK:
            self._presence.note(written, Presence.PRESENT)
        elif read is not None and done.outcome is not Outcome.OK:
            self._presence.note(read, _AFTER[done.outcome])
            self._tell_gone([read])

    def _tell_gone(self, block_ids: Sequence[bytes]) -> None:
        if self._told is not None:
            self._told.gone(block_ids)

    def _judge(self, breaker: CircuitBreaker, outcome: Outcome, what: str) -> None:
        """Note what an answer says about the store's health; make a pause when it keeps failing."""
        if self._store.rests or outcome in (Outcome.DAMAGED, Outcome.DROPPED):
            return
        if outcome not in _UNWELL:
            breaker.succeeded()
        elif breaker.failed():
            self.counts[f"{self._store.tier.value}_pauses"] += 1
            logger.warning(
                "sglang-hc: the %s store (%s) keeps failing; %s are off for a while",
                self._store.tier.value,
                self.name,
                what,
            )
