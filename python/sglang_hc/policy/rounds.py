"""Running requests of a pass in rounds that share the device's places (HybridServe 4.3.3).

In each layer the rounds attend one after the other. What crosses for a round fills one place while
another round is attended to from the other. The paper calls a round a mini-batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from sglang_hc.policy.streamed_pass import Load, Split, StreamedModel


class Rows(NamedTuple):
    """Tokens of one request, or of a round, that are kept as K and V and as hidden states."""

    kv: int
    act: int

    def plus(self, other: Rows) -> Rows:
        return Rows(self.kv + other.kv, self.act + other.act)

    def within(self, place: Rows) -> bool:
        return self.kv <= place.kv and self.act <= place.act


class Surplus(NamedTuple):
    """Seconds by which the link works longer than the device for a row that is K and V, and for one
    that is a hidden state. Negative where the device works longer.

    A round is balanced when the surplus of its rows is 0. There the paper's F_b (equation 12), the
    ratio of both times, is 1; unlike F_b it is defined for a round without hidden states.
    """

    kv: float
    act: float

    def of(self, rows: Rows) -> float:
        return self.kv * rows.kv + self.act * rows.act


def surplus(model: StreamedModel, load: Load, split: Split) -> Surplus:
    """Surplus of the rows of a pass. Each row has its share of the weights that cross in a layer
    and of the step, and a hidden state crosses as often as they do on average; so the rows of a
    pass whose times are equal have none together, but for what rounds add. `model.kv_gen` must be
    finite."""
    weights = (model.layers - split.resident) / model.layers * model.load_w
    step = model.step(load) + model.outside / model.layers
    shared = (weights - step) / load.tokens
    crossing = model.load_act * split.host_act / split.act if split.act else model.load_act
    return Surplus(model.load_kv + shared, crossing - model.kv_gen + shared)


def imbalance(requests: Sequence[Rows], rounds: Sequence[Sequence[int]], by: Surplus) -> float:
    """Seconds of a layer in which link or device would wait if no round ran beside another: the
    paper's equation 8 for each round, added up."""
    return sum(abs(sum(by.of(requests[index]) for index in one)) for one in rounds)


def pack(requests: Sequence[Rows], place: Rows, by: Surplus) -> list[list[int]]:
    """The requests of each round, by their index in `requests`.

    place: rows of each kind that a place holds (the paper's bin), which no round exceeds. Where all
    fit there is one round. Otherwise each round takes, as long as anything fits, the request that
    leaves it best balanced. The paper closes a round as soon as nothing makes it better; then equal
    requests, as its own 4.3.2 makes them, would get a round each. Requests in their order are
    packed too, and what is better balanced is taken, then what has fewer rounds.

    Raises ValueError for a request that is larger than a place.
    """
    for rows in requests:
        if not rows.within(place):
            raise ValueError(f"{rows} do not fit into a place of {place}")
    together = sum_rows(requests)
    if together.within(place):
        return [list(range(len(requests)))] if requests else []
    both = _in_order(requests, place), _balanced(requests, place, by)
    return min(both, key=lambda rounds: (imbalance(requests, rounds, by), len(rounds)))


def sum_rows(requests: Sequence[Rows]) -> Rows:
    """Rows of several requests together."""
    return Rows(sum(rows.kv for rows in requests), sum(rows.act for rows in requests))


def _in_order(requests: Sequence[Rows], place: Rows) -> list[list[int]]:
    """First come, first packed: a round ends before the first request that does not fit."""
    rounds: list[list[int]] = []
    filled = place  # the first request begins a round
    for index, rows in enumerate(requests):
        filled = filled.plus(rows)
        if not rounds or not filled.within(place):
            rounds.append([])
            filled = rows
        rounds[-1].append(index)
    return rounds


def _balanced(requests: Sequence[Rows], place: Rows, by: Surplus) -> list[list[int]]:
    """Each round takes the request whose surplus is nearest to what the round lacks."""
    waiting = sorted((by.of(rows), index) for index, rows in enumerate(requests))
    rounds: list[list[int]] = []
    while waiting:
        members: list[int] = []
        filled, lacks = Rows(0, 0), 0.0
        while (found := _nearest(waiting, requests, lacks, filled, place)) is not None:
            seconds, index = waiting.pop(found)
            members.append(index)
            filled, lacks = filled.plus(requests[index]), lacks - seconds
        rounds.append(members)
    return rounds


def _nearest(
    waiting: Sequence[tuple[float, int]],
    requests: Sequence[Rows],
    lacks: float,
    filled: Rows,
    place: Rows,
) -> int | None:
    """Place in `waiting` of the request that fits and whose surplus is nearest to `lacks`."""
    right = bisect_left(waiting, (lacks, 0))
    left = right - 1
    while left >= 0 or right < len(waiting):
        if right == len(waiting) or (
            left >= 0 and lacks - waiting[left][0] <= waiting[right][0] - lacks
        ):
            candidate, left = left, left - 1
        else:
            candidate, right = right, right + 1
        if filled.plus(requests[waiting[candidate][1]]).within(place):
            return candidate
    return None
