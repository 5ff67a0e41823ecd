"""What is worth writing below host memory (`--hc-write`).

An SSD takes only so many bytes in its life, and a block that nobody asks for again was written for
nothing. Whether blocks are used again is learned from a sample of all that requests used, written
or not, apart for those that begin a path and those that continue one that is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hc.errors import ConfigError

ENOUGH = 0.05
"""New blocks are written while at least this share of those like them is used again."""

EVIDENCE = 16
"""Blocks of the sample that were used again, before anything follows from it."""

SAMPLED = 8
"""One of so many blocks is in the sample."""

REMEMBERED = 1 << 16
"""Blocks of the sample at most, the newest ones."""

SEEN = 1 << 19
"""Of the blocks that requests used, at least so many of the newest are known by their identity."""

BURST_S = 3600.0
"""A budget of bytes may be spent so many seconds ahead."""

DAY_S = 86400.0

FIELD_BITS = 1 << 24
HASHES = 4


@dataclass(frozen=True)
class WriteRule:
    """bytes_per_day: a budget; infinite for none. Raises ConfigError in `parse`."""

    bytes_per_day: float = math.inf

    @classmethod
    def parse(cls, text: str) -> WriteRule | None:
        """None where everything is written: `all`."""
        if text == "all":
            return None
        if text == "second-use":
            return cls()
        try:
            budget = float(text)
        except ValueError:
            budget = math.nan
        if not 0 < budget < math.inf:
            raise ConfigError(f"must be all, second-use, or bytes a day above 0, got {text!r}")
        return cls(budget)


class SeenBlocks:
    """Identities that came by: the newest `SEEN` of them at least. Fewer than one in a thousand
    others is taken for one of them (two Bloom filters, of which the older one is emptied)."""

    def __init__(self) -> None:
        self._young, self._old = _field(), _field()
        self._count = 0

    def leading(self, names: npt.NDArray[np.uint64]) -> int:
        """How many of the first identities came by, without a gap."""
        if not len(names):
            return 0
        places = _places(names)
        there = _all_set(self._young, places) | _all_set(self._old, places)
        return len(names) if there.all() else int(there.argmin())

    def add(self, names: npt.NDArray[np.uint64]) -> None:
        if self._count >= SEEN:
            self._young, self._old, self._count = _field(), self._young, 0
        places = _places(names)
        np.bitwise_or.at(self._young, places >> 3, (1 << (places & 7)).astype(np.uint8))
        self._count += len(names)


class WriteAdmission:
    """Which blocks of a path that was used may be written, by a rule. Calls on several ranks in the
    same order, with the same times, say the same."""

    def __init__(self, rule: WriteRule, block_bytes: int, now: float, part_bytes: int = 0) -> None:
        """block_bytes, part_bytes: that one block, and one end part, takes below, on all ranks
        together. A budget of less than that an hour is for one at a time."""
        self._rule = rule
        self._bytes = block_bytes, part_bytes
        self._burst = max(rule.bytes_per_day * BURST_S / DAY_S, *self._bytes)
        self._left, self._at = self._burst, now
        self._seen = SeenBlocks()
        self._sample: dict[bytes, tuple[bool, bool]] = {}
        """Of its blocks: whether they continued a known path, and whether they were used again."""
        self._first, self._again = [0, 0], [0, 0]
        """Blocks of the sample, and of these such as were used again, by whether they continued."""

    def used(self, block_ids: Sequence[bytes], now: float) -> int:
        """A request used a path of these blocks. Returns how many of the first may be written, as
        far as the budget goes: those that were used before, and all when new ones are worth it."""
        self._earn(now)
        names = names_of(block_ids)
        known = self._seen.leading(names)
        if known < len(names):
            self._seen.add(names[known:])
        for block_id in block_ids:
            if block_id[0] % SAMPLED == 0:
                self._note(block_id, known > 0)
        return len(block_ids) if self.worth(known > 0) else known

    def worth(self, continues: bool) -> bool:
        """Whether new blocks are written: such as continue a path that is known, or others."""
        if math.isfinite(self._burst) and self._left >= self._burst / 2:
            return True
        again = self._again[continues]
        return again >= EVIDENCE and again >= ENOUGH * self._first[continues]

    def take(self, now: float, *, part: bool = False) -> bool:
        """Whether the budget has one more block, or end part, which is written then."""
        self._earn(now)
        if self._left < self._bytes[part]:
            return False
        self._left -= self._bytes[part]
        return True

    def _earn(self, now: float) -> None:
        if math.isfinite(self._burst):
            earned = self._rule.bytes_per_day * max(0.0, now - self._at) / DAY_S
            self._left, self._at = min(self._burst, self._left + earned), max(self._at, now)

    def _note(self, block_id: bytes, continues: bool) -> None:
        before = self._sample.get(block_id)
        if before is None:
            self._sample[block_id] = continues, False
            self._first[continues] += 1
            if len(self._sample) > REMEMBERED:
                continued, used_again = self._sample.pop(next(iter(self._sample)))
                self._first[continued] -= 1
                self._again[continued] -= used_again
        elif not before[1]:
            self._sample[block_id] = before[0], True
            self._again[before[0]] += 1


def names_of(block_ids: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """(n, 2) of identities."""
    return np.frombuffer(b"".join(block_ids), dtype="<u8").reshape(-1, 2)


def _field() -> npt.NDArray[np.uint8]:
    return np.zeros(FIELD_BITS // 8, dtype=np.uint8)


def _places(names: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """(n, HASHES) bits of identities, which are random already."""
    steps = np.arange(HASHES, dtype=np.uint64)
    bits = names[:, :1] + steps * (names[:, 1:] | np.uint64(1))
    return (bits % np.uint64(FIELD_BITS)).astype(np.int64)


def _all_set(field: npt.NDArray[np.uint8], places: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    bits = (field[places >> 3] >> (places & 7).astype(np.uint8)) & 1
    return np.asarray(bits.all(axis=1))
