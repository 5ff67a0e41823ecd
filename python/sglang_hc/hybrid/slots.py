"""Which slots are free, and of which kind: tokens of one request are to be of both kinds evenly.

Slots are numbered from 1, as SGLang does; the first of them are kept as hidden states
(`policy.streaming`). HybridServe 4.3.2 keeps a ratio of kinds for each request. Here nobody says
whose slots are asked for, so the kinds are spread over what is asked for at once, and from one call
to the next: a request that gets one slot in each call gets both kinds in their ratio, too.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sglang_hc.policy.streaming import Streaming

Slots = npt.NDArray[np.int64]

AMONG = (math.sqrt(5) - 1) / 2
CALLS = math.sqrt(2) - 1
COUNTS = math.sqrt(3) - 1
"""Steps of sequences that fill the interval from 0 to 1 evenly: of the slots of one call, of the
same place in one call after the other, and of what is rounded."""


class FreeSlots:
    """The free ones of slots 1 to `tokens`, lowest first. Belongs to one thread."""

    def __init__(self, streaming: Streaming) -> None:
        self._last_act = streaming.act_tokens
        self._free = np.zeros(streaming.tokens + 1, dtype=np.bool_)
        self._calls = 0
        self.clear()

    def clear(self) -> None:
        """All are free."""
        self._free[1:] = True
        self.act, self.kv = self._last_act, len(self._free) - 1 - self._last_act

    @property
    def count(self) -> int:
        return self.act + self.kv

    def all(self) -> Slots:
        """(count,) int64, ascending."""
        return np.flatnonzero(self._free)

    def take(self, count: int) -> Slots | None:
        """(count,) int64 slots, in the order in which tokens get them; None only where fewer are
        free. Of each kind as many as it has a share of what is free, so neither is used up before
        the other."""
        if count > self.count:
            return None
        if not count:
            return np.empty(0, dtype=np.int64)
        self._calls += 1
        act = int(self.act * count / self.count + self._calls * COUNTS % 1)
        act = min(max(act, count - self.kv), self.act, count)
        order = np.argsort(np.arange(count) * AMONG % 1)
        first = math.ceil(-self._calls * CALLS % 1 * count)  # each is it as often as the others
        is_act = np.zeros(count, dtype=np.bool_)
        is_act[order[(first + np.arange(act)) % count]] = True
        found = np.empty(count, dtype=np.int64)
        found[is_act] = np.flatnonzero(self._free[: self._last_act + 1])[:act]
        behind = self._last_act + 1
        found[~is_act] = np.flatnonzero(self._free[behind:])[: count - act] + behind
        self._free[found] = False
        self.act, self.kv = self.act - act, self.kv - (count - act)
        return found

    def give_back(self, slots: Slots) -> None:
        """Raises ValueError for one that is free, or is none."""
        if len(slots) and not (slots.min() > 0 and slots.max() < len(self._free)):
            raise ValueError("there is no such slot")
        if self._free[slots].any() or len(np.unique(slots)) != len(slots):
            raise ValueError("a slot was given back twice")
        self._free[slots] = True
        act = int((slots <= self._last_act).sum())
        self.act, self.kv = self.act + act, self.kv + len(slots) - act
