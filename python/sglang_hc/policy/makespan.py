"""Exact time of one restoration on two resources (HCache section 4.1.2, without its rounding).

The model:

- One copy resource moves the loaded layers in layer order, back to back, beginning at `start`.
- One compute resource first recomputes layers 0..r-1 of the history, from time 0 on. Then, layer by
  layer: project the layer's hidden states (HIDDEN), or nothing (KV), then run the new tokens
  through the layer. It idles only to wait for the layer's copy.
- A layer's hidden states arrive and are projected in `pieces` equal pieces; a piece is projected
  when it has arrived. With one piece the first projection waits for a whole layer.
- Copies wait for compute in one case only: while layers are recomputed nothing takes what arrives,
  so no more than `ahead` seconds of copies can be done then. Otherwise what has arrived is held
  until it is projected; the order of copies (`copy_order.py`) keeps this small.
- The weights of recomputed layers that are not on the device come by the copy resource, before the
  copies of loaded layers.
- Without `overlap` there is one resource: the thread that computes also copies, as on a CPU.

Why `work_and_chain` is exact and not a bound: the compute resource runs a fixed sequence of tasks,
so the end is the longest chain "task i becomes ready, then tasks i, i+1, ... without a pause", or
the sum of all tasks. Readiness minus the work before it is linear in the layer and in the piece
within a run of equal layers, so only the corners of each run can be the longest chain.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sglang_hc.forms import LayerPlan


class LayerTimes(NamedTuple):
    """Seconds that one layer of one restoration takes, per form. All at least 0.

    copy_hidden, copy_kv: to move the layer's stored state onto the device.
    project: hidden states to K and V. Infinite when the model has no HIDDEN form.
    recompute: to run the layer over the history tokens.
    new: to run the layer over the tokens that follow the history; 0 for a restoration alone.
    start: when the copy resource is free.
    pieces: in how many pieces a layer's hidden states are handed to the projection; the paper hands
    over chunks of 64 tokens.
    overlap: whether copies run beside the compute.
    ahead: seconds of copies that staging holds.
    weights: that the weights of a recomputed layer keep the copy resource busy, in all passes.
    """

    copy_hidden: float
    copy_kv: float
    project: float
    recompute: float
    new: float = 0.0
    start: float = 0.0
    pieces: int = 1
    overlap: bool = True
    ahead: float = math.inf
    weights: float = 0.0


def work_and_chain(times: LayerTimes, recompute: int, hidden: int, kv: int) -> tuple[float, float]:
    """(end if the compute resource never waited, end of the longest chain that begins in a copy).

    The restoration ends at the later of the two. The counts are those of a layer plan.
    """
    copy_hidden, copy_kv, project, recompute_layer, new, start, pieces, overlap, ahead, _ = times
    if not overlap:
        loaded = (hidden + kv) * new + kv * copy_kv
        if hidden:
            loaded += hidden * (copy_hidden + project)
        chain = start + loaded if hidden or kv else 0.0
        return recompute * (recompute_layer + new) + loaded, chain
    if recompute:
        start = max(start + recompute * times.weights, recompute * (recompute_layer + new) - ahead)
    work = recompute * recompute_layer + (recompute + hidden + kv) * new
    chain = 0.0
    if hidden:
        work += hidden * project
        # Inside a layer the chain begins at its first or at its last piece; among the layers at the
        # first or at the last, whichever leaves more behind it.
        first, last = copy_hidden / pieces + project, copy_hidden + project / pieces
        work_step, copy_step = project + new, copy_hidden
        chain = start + (first if first > last else last) + new + kv * new
        chain += (hidden - 1) * (work_step if work_step > copy_step else copy_step)
        start += hidden * copy_hidden
    if kv:
        tail = start + copy_kv + new + (kv - 1) * (new if new > copy_kv else copy_kv)
        chain = max(chain, tail)
    return work, chain


def makespan(times: LayerTimes, plan: LayerPlan) -> float:
    """Seconds until the last layer is restored and, if `new` > 0, the new tokens are through it."""
    work, chain = work_and_chain(times, plan.recompute, plan.hidden, plan.kv)
    return max(work, chain)
