"""Several restorations in one pass: who recomputes, so that their batch is through first.

This is CacheFlow's question (arXiv 2604.25080): link and compute are shared, and whoever came first
should not decide for the others. A batch goes through a layer when it has this layer's K and V of
all its restorations, so the copies go layer by layer, and their order within a layer changes
nothing. What is left to decide is who recomputes how many of the first layers instead of having
them copied.

The model is that of `makespan`, with the copies of a layer together, and all that is recomputed
before the first layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.restore_plan import best_prefix

HOST = SourceTier.HOST

WAYS = 64
"""That are compared at most, beside two more: this is done on the scheduler's thread."""

Way = tuple[int, ...]
"""Layers that are recomputed of each restoration."""


class Load(NamedTuple):
    """One restoration: `tokens` behind `context` tokens, whose first `recompute` layers would be
    recomputed if it were alone."""

    tokens: int
    context: int
    recompute: int


def shared(
    cost: CostModel, stored: LayerPlan, loads: Sequence[Load], new: Sequence[tuple[int, int]]
) -> Way:
    """The way by which the batch is through first. new: (tokens, context) of the prompts' rests,
    which run in the same pass; of each in the order of the loads, as far as they are known.

    Never later, as modelled, than if each were restored as if it were alone, or as if it had the
    link behind those before it. Where one thread copies and computes nothing is shared; and where
    weights share the link, nothing is changed.
    """
    alone = tuple(load.recompute for load in loads)
    if len(loads) < 2 or not cost.overlap or cost.weights or stored.recompute == stored.num_layers:
        return alone
    more = list(_more_and_more(cost, stored, loads))
    step = -(-len(more) // WAYS)
    ways = [alone, first_come(cost, stored, loads, new), *more[::step]]
    return ways[int(np.argmin(batch_ends(cost, stored, loads, new, ways)))]


def first_come(
    cost: CostModel, stored: LayerPlan, loads: Sequence[Load], new: Sequence[tuple[int, int]]
) -> Way:
    """Each takes what is best for it when the copies of those before it go first."""
    rests = [*(tokens for tokens, _ in new), *[0] * len(loads)]
    way, busy = [], 0.0
    for load, rest in zip(loads, rests, strict=False):
        times = cost.layer_times(HOST, load.tokens, context=load.context, new=rest, start=busy)
        layers = best_prefix(times, stored)[1]
        kv = min(stored.kv, stored.num_layers - layers)
        loaded = LayerPlan(layers, stored.num_layers - layers - kv, kv)
        busy += cost.copy_stored(HOST, loaded, load.tokens)
        way.append(layers)
    return tuple(way)


def _more_and_more(cost: CostModel, stored: LayerPlan, loads: Sequence[Load]) -> Iterator[Way]:
    """From none to nearly all layers recomputed: first of the restoration that needs the fewest
    seconds of compute for a second of copies."""
    prices = [
        cost.prefill_layer(load.tokens, load.context)
        / max(cost.copy_stored(HOST, stored, load.tokens), 1e-12)
        for load in loads
    ]
    way = [stored.recompute] * len(loads)
    yield tuple(way)
    for index in sorted(range(len(loads)), key=prices.__getitem__):
        while way[index] < stored.num_layers - 1:  # something of each is loaded
            way[index] += 1
            yield tuple(way)


def batch_ends(
    cost: CostModel, stored: LayerPlan, loads: Sequence[Load], new: Sequence[tuple[int, int]],
    ways: Sequence[Way],
) -> npt.NDArray[np.float64]:  # fmt: skip
    """(len(ways),) seconds until the prompts of `new` are through the last layer."""
    times = [cost.layer_times(HOST, load.tokens, context=load.context) for load in loads]
    rest, recompute = cost.prefill_batch(new), np.array([one.recompute for one in times])
    layer = np.arange(stored.num_layers)
    is_kv = layer >= stored.recompute + stored.hidden
    copy = np.array([np.where(is_kv, one.copy_kv, one.copy_hidden) for one in times])
    project = np.array([np.where(is_kv, 0.0, one.project) for one in times])

    counts = np.array(ways)
    loaded = counts[:, :, None] <= layer  # (ways, loads, layers)
    before = counts @ recompute
    link = np.maximum(0.0, before + counts.min(axis=1) * rest - times[0].ahead)
    copied = np.where(before > 0, link, 0.0)[:, None] + np.where(loaded, copy, 0.0).sum(1).cumsum(1)
    work = np.where(loaded, project, 0.0).sum(axis=1) + rest
    left = work[:, ::-1].cumsum(axis=1)[:, ::-1]  # behind the arrival of each layer
    waits = np.where(loaded.any(axis=1), copied + left, 0.0)
    ends: npt.NDArray[np.float64] = np.maximum(before + left[:, 0], waits.max(axis=1))
    return ends
