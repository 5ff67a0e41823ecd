"""Soft retention: blocks that somebody wants for a while leave host memory after those that nobody
wants. It is a rank and no pin: when there is nothing else, they leave.

What is wanted until T with weight W has the value `W * (time left) / (whole time)`, which falls in
LEVELS steps to nothing at T. Eviction reads `value`; whoever knows how long a session stays away
calls `retain`. What is retained for all alike leaves in the order in which it would leave anyway.

All that is retained is at most RETAINED_SHARE of the tier, and a namespace has at most half of what
the others leave: beyond that, what it retained longest ago is let go.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from sglang_hc.policy.pins import share

RETAINED_SHARE = 0.5
"""Share of the host tier that may be retained: the other half goes by age in any case."""

MAX_RETAIN_S = 3600.0
"""Longest retention, in seconds."""

MIN_RETAIN_S = 0.001
"""Shortest one: steps within it are further apart than what a clock of floats tells apart."""

MAX_CLAIMS = 8192
"""Most retentions at a time."""

LEVELS = 4
"""Steps in which a value falls."""

DEMOTED = -1.0
"""Weight of blocks that are to leave first."""

FEW_STEPS = 64
"""So many steps that say nothing any more are kept in any case."""


@dataclass(eq=False, slots=True)
class Claim:
    """What one call retained. weight: in (0, 1], or DEMOTED. session: whose claim it is; None for
    nobody's. blocks: of which `count`, at least half, are still this claim's. level: its value in
    steps. step: when that changes next."""

    owner: str | None
    session: str | None
    blocks: Sequence[bytes]
    weight: float
    seconds: float
    until: float
    level: int = 0
    step: float = math.inf
    count: int = 0

    def settle(self, now: float) -> None:
        """Its level now, and when that ends."""
        if self.weight < 0:
            self.level, self.step = -1, self.until
            return
        whole = LEVELS * self.weight / self.seconds  # levels per second
        most = math.ceil(LEVELS * self.weight)  # sums of times are rounded
        self.level = min(most, max(1, math.ceil(whole * (self.until - now))))
        self.step = self.until - (self.level - 1) / whole
        if self.step <= now:  # rounding: it has come to the end of its level
            self.level -= 1
            self.step = self.until - max(0, self.level - 1) / whole

    def outlasts(self, other: Claim) -> bool:
        """Whether a block stays this claim's although the other one wants it now."""
        return self.weight >= max(0.0, other.weight) and self.until > other.until


class SoftRetention:
    """Which blocks are wanted, how much, until when. Belongs to the scheduler thread. A call costs
    the blocks that it names, and O(log n) of n claims."""

    def __init__(self, max_blocks: int, max_claims: int = MAX_CLAIMS) -> None:
        """max_blocks, max_claims: of all namespaces together."""
        if max_blocks < 0 or max_claims < 0:
            raise ValueError("soft retention needs max_blocks and max_claims >= 0")
        self._max_blocks = max_blocks
        self._max_claims = max_claims
        self._of: dict[bytes, Claim] = {}
        self._claims: dict[str | None, dict[Claim, None]] = {}
        """By owner, which has one at least; the oldest first."""
        self._count = 0
        self._held: Counter[str | None] = Counter()
        self.demoted = 0
        """Blocks that are to leave first."""
        self._steps: list[tuple[float, int, Claim]] = []
        self._numbers = itertools.count()
        self._listeners: list[Callable[[Sequence[bytes]], None]] = []

    @classmethod
    def sized_for(cls, slots: int) -> SoftRetention:
        """With the bounds for a host tier of so many blocks."""
        return cls(int(RETAINED_SHARE * slots))

    def __len__(self) -> int:
        """Blocks that have a value."""
        return len(self._of)

    def value(self, block_id: bytes) -> float:
        """How much a block is wanted, in (0, 1); 0 by nobody; negative for one to leave first."""
        claim = self._of.get(block_id)
        return 0.0 if claim is None else claim.level / (LEVELS + 1)

    def subscribe(self, listener: Callable[[Sequence[bytes]], None]) -> None:
        """Call `listener(block_ids)` after the `value` of these blocks has changed."""
        self._listeners.append(listener)

    def max_blocks(self, owner: str | None) -> int:
        """Most blocks that an owner may have retained now."""
        return share(self._max_blocks, len(self._of) - self._held[owner])

    def retain(
        self,
        owner: str | None,
        blocks: Sequence[bytes],
        seconds: float,
        now: float,
        weight: float = 1.0,
        session: str | None = None,
    ) -> int:
        """Want blocks of one path, root first, until now + seconds: as many of the first ones as
        `max_blocks` allows. Where a block is wanted for longer already, that stays.

        seconds: less than MIN_RETAIN_S count as that. weight: in (0, 1]; DEMOTED has them leave
        first, where nobody but this session wants them, and as many of the last ones.
        Returns how many of them are retained, or leave first. Raises ValueError for a wrong weight
        or time.
        """
        if not (0 < seconds <= MAX_RETAIN_S and (0 < weight <= 1 or weight == DEMOTED)):
            raise ValueError(f"cannot retain for {seconds:g} s with weight {weight:g}")
        self.advance(now)
        seconds = max(seconds, MIN_RETAIN_S)
        if not share(self._max_claims, self._count - len(self._claims.get(owner, ()))):
            return 0
        most = self.max_blocks(owner)
        blocks = blocks[:most] if weight > 0 else blocks[max(0, len(blocks) - most) :]
        claim = Claim(owner, session, (), weight, seconds, now + seconds)
        claim.blocks = [one for one in blocks if self._takes(claim, self._of.get(one))]
        if not claim.blocks:
            return len(blocks) if weight > 0 else 0
        claim.settle(now)
        self._enter(claim)
        self._let_oldest_go(owner)
        self._tell(claim.blocks)
        return len(blocks) if weight > 0 else claim.count

    def used(self, blocks: Iterable[bytes]) -> None:
        """Blocks were used: those of them that were to leave first are not any more."""
        again = [one for one in blocks if (known := self._of.get(one)) and known.weight < 0]
        for one in again:
            self._drop(one, self._of[one])
        self._tell(again)

    def forget(self, names: Callable[[str | None], bool]) -> None:
        """End all that owners have whom `names` is true for."""
        gone = [claim for owner, claims in self._claims.items() if names(owner) for claim in claims]
        for claim in gone:
            self._end(claim)

    def advance(self, now: float) -> None:
        """Values fall as time passes. Times must not go backwards."""
        while self._steps and self._steps[0][0] <= now:
            step, _, claim = heappop(self._steps)
            if step != claim.step or not claim.count:
                continue
            if now >= claim.until or claim.level <= 1:
                self._end(claim)
                continue
            claim.settle(now)
            self._note_step(claim)
            self._tell([one for one in claim.blocks if self._of.get(one) is claim])

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts follow from the claims and keep the bounds."""
        everything = [claim for claims in self._claims.values() for claim in claims]
        assert all(self._claims.values()) and self._count == len(everything) <= self._max_claims
        assert Counter(claim for claim in self._of.values()) == Counter(
            {claim: claim.count for claim in everything}
        )
        assert all(len(claim.blocks) <= 2 * claim.count for claim in everything)
        for owner, held in self._held.items():
            assert 0 < held == sum(claim.count for claim in self._claims[owner])
        assert self.demoted == sum(claim.weight < 0 for claim in self._of.values())
        assert self._held.total() == len(self._of) <= self._max_blocks
        assert len(everything) <= len(self._steps) <= 2 * self._max_claims + FEW_STEPS

    # -- inner parts -----------------------------------------------------------------------------

    @staticmethod
    def _takes(claim: Claim, known: Claim | None) -> bool:
        if known is None:
            return True
        if claim.weight < 0:
            return claim.session is not None and known.session == claim.session
        return not known.outlasts(claim)

    def _enter(self, claim: Claim) -> None:
        for one in claim.blocks:
            known = self._of.get(one)
            if known is not None:
                self._drop(one, known)
            self._of[one] = claim
        claim.count = len(claim.blocks)
        self._held[claim.owner] += claim.count
        self.demoted += claim.count if claim.weight < 0 else 0
        self._claims.setdefault(claim.owner, {})[claim] = None
        self._count += 1
        self._note_step(claim)

    def _let_oldest_go(self, owner: str | None) -> None:
        claims = self._claims[owner]
        others = self._count - len(claims)
        most = share(self._max_claims, others)
        while len(claims) > most or self._held[owner] > self.max_blocks(owner):
            self._end(next(iter(claims)))

    def _end(self, claim: Claim) -> None:
        gone = [one for one in claim.blocks if self._of.get(one) is claim]
        for one in gone:
            self._drop(one, claim)
        self._tell(gone)

    def _drop(self, block_id: bytes, claim: Claim) -> None:
        """A block is not this claim's any more. A claim without blocks is over."""
        del self._of[block_id]
        claim.count -= 1
        self.demoted -= claim.weight < 0
        self._held[claim.owner] -= 1
        if not claim.count:
            claims = self._claims[claim.owner]
            del claims[claim]
            self._count -= 1
            if not claims:
                del self._claims[claim.owner]
        elif 2 * claim.count < len(claim.blocks):
            claim.blocks = [one for one in claim.blocks if self._of.get(one) is claim]
        if not self._held[claim.owner]:
            del self._held[claim.owner]

    def _note_step(self, claim: Claim) -> None:
        """Costs O(log n): the heap is made anew when most of it says nothing any more."""
        heappush(self._steps, (claim.step, next(self._numbers), claim))
        if len(self._steps) > 2 * self._count + FEW_STEPS:
            live = [one for claims in self._claims.values() for one in claims]
            self._steps = [(one.step, next(self._numbers), one) for one in live]
            heapify(self._steps)

    def _tell(self, blocks: Sequence[bytes]) -> None:
        if blocks:
            for listener in self._listeners:
                listener(blocks)
