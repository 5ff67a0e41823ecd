"""Which of two blocks is used first: the one unused for longest, or the one used last?

The best eviction takes the block whose next use is furthest away (Belady's MIN). Least recently
used first supposes that this is the oldest. Over a loop that does not fit it is the youngest, and
LRU drops every block just before its turn. So when one of the two has to leave, both are watched
until one of them is used again; this is a duel. Where the old blocks win, the young ones leave.

Two guards restrict this to loops. The score is kept separately for each age of the old block,
because a block older than the loop is not used again. And the young leave only while LRU, by the
ages at which blocks are used again, would hit next to nothing of what it could.

Age is counted in blocks that came or were used: the same on every rank and in every replay.
"""

from __future__ import annotations

OPEN = 256
"""Duels under way at most."""

PATIENCE = 8
"""A duel is undecided after this many times the tier's blocks have come in."""

SAME_USE = 16
"""Two uses of a block count as one if fewer than 1/SAME_USE of the tier's blocks came in or were
used between them."""

WEIGHT = 1 / 16
"""Weight of one duel in the running score, which lies between -1 (the young wins) and 1."""

CLEAR = 0.25
"""Score above which the old are kept: 5 of 8 duels."""

LOOP = 1 / 3
"""The young leave only while LRU would hit less than this share of what a fixed part would."""

LEAST = 4
"""Blocks that must have been used again before the young may leave."""


def bucket_of(age: int) -> int:
    """Two buckets to a doubling: 0, 1, 2, 3, 4-5, 6-7, 8-11, ..."""
    if age < 2:
        return age
    octave = age.bit_length() - 2
    return 2 * octave + (age >> octave)


class SetDueling:
    """Duels of one tier's blocks. O(1) amortised per call; not thread-safe.

    clock: blocks that have come in or were used, once for uses close together. The caller keeps
    the clock of each block's last use.
    """

    def __init__(self) -> None:
        self.clock = 0
        self._scores: dict[int, float] = {}
        # Either one's identity -> (the other's, bucket, 1 for the old and -1 for the young, clock)
        self._open: dict[bytes, tuple[bytes, int, int, int]] = {}
        self._next = 0
        self._gaps: dict[bytes, int] = {}  # clock of the last use of blocks that were young
        self._recent = 0.0
        self._lru_hits = 0.0
        self._part_hits = 0.0

    def entered(self, block_id: bytes, blocks: int) -> None:
        """A block has come into a tier, which has `blocks` of them now."""
        self.clock += 1
        self._seen(block_id, blocks)

    def used(self, block_id: bytes, since: int, blocks: int) -> None:
        """A block of a tier of `blocks` is used; before, when the clock said `since`."""
        if (self.clock - since) * SAME_USE > blocks:
            self.clock += 1
        self._seen(block_id, blocks)

    def _seen(self, block_id: bytes, blocks: int) -> None:
        if block_id in self._gaps:
            age = self.clock - self._gaps[block_id]
            if age * SAME_USE > blocks:
                del self._gaps[block_id]
                self._used_again(age, blocks)
        if block_id in self._open:
            other, bucket, sign, began = self._open[block_id]
            if (self.clock - began) * SAME_USE >= blocks:
                del self._open[block_id], self._open[other]
                score = self._scores.get(bucket, 0.0)
                self._scores[bucket] = score + WEIGHT * (sign - score)

    def _used_again(self, age: int, blocks: int) -> None:
        """LRU hits a block if fewer than `blocks` were touched since; a part of a loop that stays
        is hit as often as it is large."""
        keep = 1 - WEIGHT
        self._recent = self._recent * keep + 1
        self._lru_hits = self._lru_hits * keep + (age < blocks)
        self._part_hits = self._part_hits * keep + min(1.0, blocks / age)

    @property
    def may_begin(self) -> bool:
        """The next duel may begin; `begin` does nothing before."""
        return self.clock >= self._next

    def begin(self, old: bytes, age: int, young: bytes, blocks: int) -> None:
        """One of these two is about to leave a tier of `blocks`; the old was used `age` ago."""
        if not self.may_begin or old == young or old in self._open or young in self._open:
            return
        while self._open:
            first = next(iter(self._open))
            other, _, _, began = self._open[first]
            if len(self._open) < 2 * OPEN and self.clock - began <= PATIENCE * blocks:
                break
            del self._open[first], self._open[other]
        self._next = self.clock + PATIENCE * blocks // OPEN
        if young not in self._gaps:
            self._gaps[young] = self.clock
            if len(self._gaps) > OPEN:
                del self._gaps[next(iter(self._gaps))]
        bucket = bucket_of(age)
        self._open[old] = young, bucket, 1, self.clock
        self._open[young] = old, bucket, -1, self.clock

    def old_wins(self, age: int) -> bool:
        """Whether a block used `age` ago is usually used before the youngest."""
        if self._recent < LEAST or self._lru_hits > LOOP * self._part_hits:
            return False
        return self.score(age) > CLEAR

    def score(self, age: int) -> float:
        """From -1, the young one was always used first, to 1, the old one was. 0: no duel yet."""
        return self._scores.get(bucket_of(age), 0.0)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the duels that are open are few, and pairs."""
        assert all(self._open[other][0] == one for one, (other, *_) in self._open.items())
        assert len(self._open) <= 2 * OPEN and len(self._gaps) <= OPEN
        assert all(-1 <= score <= 1 for score in self._scores.values())
