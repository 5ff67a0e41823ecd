"""How much of a waiting request's history is worth copying before its turn.

AttentionStore section 3.2.1: with T_load and T_pref the seconds to load and to prefill one token,
the read buffer is S = B * (T_load * L_hist - T_pref * L_new): what the link brings in the time by
which loading the history is longer than the computation that it overlaps with. Less than that and
the computation waits for copies; more buys nothing.
"""

from __future__ import annotations

import math

from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.makespan import busy


def early_bytes(
    cost: CostModel, stored: LayerPlan, size: int, *, history: int, context: int, new: int
) -> int:
    """Bytes of a history in host memory that should be on the device when its request starts.

    size: bytes of the `history` tokens in all stored layers. context: tokens before them that are
    on the device. new: tokens that the request computes. The projection of hidden states overlaps
    with copies as the prefill of new tokens does. Between 0 and `size`.
    """
    times = cost.layer_times(SourceTier.HOST, history, context=context, new=new)
    copy, compute = busy(times, stored)
    if copy <= compute:
        return 0
    return math.ceil(size * (copy - compute) / copy)
