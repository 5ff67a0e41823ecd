"""In which order the pieces of a restoration are copied.

The model needs the HIDDEN layers first. Where projecting a layer takes longer than copying the next
one, the link fills the staging frames and is then idle: KV layers copied behind the last HIDDEN
layer overlap with no projection any more. So as much of the KV layers as the link has time for goes
between the HIDDEN layers (the bubble-free pipeline of HCache section 4.1 in bounded memory), and no
more, which would hold up the HIDDEN layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

from sglang_hc.policy.cost_model import CostModel, SourceTier

T = TypeVar("T")


def kv_per_hidden(cost: CostModel, tokens: int) -> float:
    """KV layers that the link can bring while one HIDDEN layer of `tokens` tokens is projected and
    the next one is copied."""
    spare = cost.project_kv(tokens) - cost.copy_hidden(SourceTier.HOST, tokens)
    copy = cost.copy_kv(SourceTier.HOST, tokens)
    if not cost.overlap or cost.project is None or spare <= 0 or copy == 0:
        return 0.0
    return spare / copy


def merged(
    hidden: Iterable[tuple[float, T]], kv: Iterable[tuple[float, T]], rate: float
) -> Iterator[T]:
    """Items of both in their own order: behind x HIDDEN layers, `rate` * x KV layers at most.

    hidden, kv: (share of its layer, item). What is left of `kv` comes last.
    """
    later = deque(kv)
    credit = 0.0
    for share, item in hidden:
        yield item
        credit += rate * share
        while later and later[0][0] <= credit:
            part, other = later.popleft()
            credit -= part
            yield other
    yield from (item for _, item in later)
