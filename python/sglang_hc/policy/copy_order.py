"""In which order the pieces of a restoration are copied, and how much is copied before its turn.

The model needs the HIDDEN layers first. Where projecting a layer takes longer than copying the next
one, the link fills the staging frames and is then idle: KV layers copied behind the last HIDDEN
layer overlap with no projection any more. So as much of the KV layers as the link has time for goes
between the HIDDEN layers (the bubble-free pipeline of HCache section 4.1 in bounded memory), and no
more, which would hold up the HIDDEN layers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.makespan import busy

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


def early_bytes(
    cost: CostModel, stored: LayerPlan, size: int, *, history: int, context: int, new: int
) -> int:
    """Bytes of a history in host memory that should be on the device when its request starts.

    The read buffer of AttentionStore section 3.2.1: with T_load and T_pref the seconds to load and
    to prefill one token, S = B * (T_load * L_hist - T_pref * L_new). That is what the link brings
    in the time by which loading the history is longer than the computation that it overlaps with.
    With less the computation waits for copies; more buys nothing.

    size: bytes of the `history` tokens in all stored layers. context: tokens before them that are
    on the device. new: tokens that the request computes. The projection of hidden states overlaps
    with copies as the prefill of new tokens does. Between 0 and `size`.
    """
    times = cost.layer_times(SourceTier.HOST, history, context=context, new=new)
    copy, compute = busy(times, stored)
    if copy <= compute:
        return 0
    return math.ceil(size * (copy - compute) / copy)
