"""Rows of the tokens of a round in a place on the device.

A round has its tokens' K and V in rows of a place from `FIRST_ROW` on: those that were computed
before, in the order of their slots, then those of this pass, in the same order. So what crosses is
a few long runs. Low slots are hidden states (`policy.streaming`), and their K and V come first.
Their hidden states, old ones and then new ones, have rows of their own in the place, from 0 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_hc.policy.rounds import Rows, Surplus, pack
from sglang_hc.policy.streaming import Streaming

Numbers = npt.NDArray[np.int64]

FIRST_ROW = 1
"""Row 0 of K and V is where SGLang writes what belongs to nobody."""


class Kinds(NamedTuple):
    """Tokens that are hidden states on the device, hidden states in host memory, and K and V."""

    device_act: int
    host_act: int
    kv: int

    @property
    def act(self) -> int:
        return self.device_act + self.host_act

    @classmethod
    def of(cls, slots: Numbers, streaming: Streaming) -> Kinds:
        """slots: ascending."""
        device, act = np.searchsorted(slots, (streaming.device_act, streaming.act_tokens), "right")
        return cls(int(device), int(act - device), len(slots) - int(act))


class Runs(NamedTuple):
    """n int64 numbers each: run i is `counts[i]` rows, from `home[i]` on in host memory and from
    `place[i]` on in the place."""

    home: Numbers
    place: Numbers
    counts: Numbers


@dataclass(frozen=True)
class RoundRows:
    """One round of a pass. requests: by their number in the pass. old, new: tokens that were
    computed before, and in this pass.

    rows: per request (its tokens,) int64 rows of K and V. new_tokens: (new,) int64, the pass's
    tokens that belong to this round, in their order; new_rows: their rows.
    positions: (old.act,) int64 positions of the old hidden states. kept: (old.device_act,) int64,
    their rows among those that never leave the device.
    act_tokens: (new.act,) int64, those of the pass's tokens that become hidden states, in the order
    of their rows. to_keep: (new.device_act,) int64, as `kept`.
    """

    requests: tuple[int, ...]
    old: Kinds
    new: Kinds
    rows: tuple[Numbers, ...]
    new_tokens: Numbers
    new_rows: Numbers
    positions: Numbers
    kept: Numbers
    act_tokens: Numbers
    to_keep: Numbers
    hidden_in: Runs
    kv_in: Runs
    hidden_out: Runs
    kv_out: Runs


def rounds_of(
    slots: Sequence[Numbers], new: Sequence[int], streaming: Streaming
) -> list[RoundRows]:
    """The rounds of a pass (HybridServe 4.3.3).

    slots: per request the slots of all its tokens in their order; new: how many of them, at the
    end, are computed in this pass. Slots of a shared prefix are in several requests. Raises
    ValueError for a request that is larger than a place.
    """
    starts = [0, *accumulate(new)]

    return [
        _round(
            [_Member(index, slots[index], new[index], starts[index]) for index in one], streaming
        )
        for one in _packed(slots, streaming)
    ]


def _packed(slots: Sequence[Numbers], streaming: Streaming) -> list[list[int]]:
    """Requests of each round. Where all rows fit, shared ones counted once, there is one round;
    else each request counts with all of its own."""
    total = sum(map(len, slots))
    if total <= streaming.rows or len(np.unique(np.concatenate(slots))) <= streaming.rows:
        return [list(range(len(slots)))] if slots else []
    # `pack` bounds each kind. What is bounded here is all rows, so it is told of these and, within
    # them, of hidden states; and the surplus of a row that is one is what it has beyond K and V.
    sizes = [Rows(len(one), int((one <= streaming.act_tokens).sum())) for one in slots]
    by = Surplus(streaming.balance.kv, streaming.balance.act - streaming.balance.kv)
    return pack(sizes, Rows(streaming.rows, streaming.rows), by)


class _Member(NamedTuple):
    """A request of a round. start: number of its first new token among the pass's."""

    number: int
    slots: Numbers
    new: int
    start: int


def _round(members: Sequence[_Member], streaming: Streaming) -> RoundRows:
    before = [one.slots[: len(one.slots) - one.new] for one in members]
    after = [one.slots[len(one.slots) - one.new :] for one in members]
    old, first = np.unique(np.concatenate(before), return_index=True)
    position = np.concatenate([np.arange(len(one)) for one in before])[first]
    new_slots = np.concatenate(after)
    order = np.argsort(new_slots)
    new = new_slots[order]
    tokens = np.concatenate([np.arange(one.start, one.start + one.new) for one in members])
    kinds, new_kinds = Kinds.of(old, streaming), Kinds.of(new, streaming)
    first_new = FIRST_ROW + len(old)
    return RoundRows(
        requests=tuple(one.number for one in members),
        old=kinds,
        new=new_kinds,
        rows=tuple(
            np.concatenate(
                (FIRST_ROW + np.searchsorted(old, one), first_new + np.searchsorted(new, behind))
            )
            for one, behind in zip(before, after, strict=True)
        ),
        new_tokens=tokens,
        new_rows=first_new + np.searchsorted(new, new_slots),
        positions=position[: kinds.act],
        kept=old[: kinds.device_act] - 1,
        act_tokens=tokens[order[: new_kinds.act]],
        to_keep=new[: new_kinds.device_act] - 1,
        hidden_in=_hidden(old, kinds, 0, streaming),
        kv_in=_kv(old, kinds, FIRST_ROW, streaming),
        hidden_out=_hidden(new, new_kinds, kinds.act, streaming),
        kv_out=_kv(new, new_kinds, first_new, streaming),
    )


def _hidden(slots: Numbers, kinds: Kinds, row: int, streaming: Streaming) -> Runs:
    """Runs of hidden states in host memory. row: of the first hidden state of `slots`."""
    chosen = slots[kinds.device_act : kinds.act] - 1 - streaming.device_act
    return _runs(chosen, row + kinds.device_act)


def _kv(slots: Numbers, kinds: Kinds, row: int, streaming: Streaming) -> Runs:
    return _runs(slots[kinds.act :] - 1 - streaming.act_tokens, row + kinds.act)


def _runs(home: Numbers, row: int) -> Runs:
    """home: ascending rows in host memory, whose rows in the place follow each other from `row`."""
    starts = np.flatnonzero(np.diff(home, prepend=-2) != 1)
    counts = np.diff(starts, append=len(home))
    return Runs(home[starts], row + starts, counts)
