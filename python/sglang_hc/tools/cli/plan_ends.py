"""`sglang-hc plan` for models whose layers do not all have full attention.

There is no choice of forms: layers with full attention are kept as KV, the others at ends. So it
says why, what that takes, and how long the copies of a restoration take beside computing again.
"""

from __future__ import annotations

import json
from typing import Any

from sglang_hc.policy.cost_model import CostModel
from sglang_hc.tools.model_ends import KeptShape

MIB = 1 << 20


def report(
    shape: KeptShape, context: int, rates: dict[str, float], cost: CostModel | None, *,
    as_json: bool,
) -> str:  # fmt: skip
    """What is kept of `context` tokens with one end. rates: 1e9 bytes/s, by tier. cost: None where
    computing is not modelled."""
    size = shape.path_bytes(context, 1)
    computed = None if cost is None else shape.num_layers * cost.prefill_layer(context, 0)
    found: dict[str, Any] = {
        "model": shape.describe(),
        "context": context,
        "forms": f"kv:{shape.full_layers}",
        "why": why_kv(shape),
        "kv_bytes_per_token": shape.token_bytes,
        "end_bytes": shape.end_bytes,
        "end_parts": shape.ends.blocks,
        "bytes_per_token": size / context,
        "share_of_full_kv": shape.share(context, 1),
        "copy_seconds": {tier: size / (rate * 1e9) for tier, rate in rates.items()},
        "compute_seconds": computed,
    }
    return json.dumps(found, indent=2) if as_json else _text(found)


def why_kv(shape: KeptShape) -> str:
    """Why layers with full attention are kept as KV, for people."""
    if not shape.hidden_bytes:
        return f"K and V have {shape.row_bytes:,} bytes"
    sizes = f"a hidden state has {shape.hidden_bytes:,} bytes, K and V {shape.row_bytes:,}"
    if shape.hidden_bytes < shape.row_bytes:
        return f"{sizes}, but hidden states of such models were not checked"
    return sizes


def _text(found: dict[str, Any]) -> str:
    lines = [
        f"model    {found['model']}",
        f"request  {found['context']} history tokens, with one end",
        f"forms    {found['forms']}, others at ends: {found['why']}",
        f"kept     {found['kv_bytes_per_token']:,} bytes/token of the layers with full attention; "
        f"an end takes {found['end_bytes'] / MIB:.3g} MiB",
        f"         together {found['bytes_per_token']:,.0f} bytes/token, "
        f"{found['share_of_full_kv']:.3f} of K and V in all layers",
    ]
    computed = found["compute_seconds"]
    for tier, seconds in found["copy_seconds"].items():
        line = f"from {tier}: {seconds * 1e3:.2f} ms of copies"
        if computed is not None:
            chosen = "computed again" if computed <= seconds else "loaded"
            line += f", {computed * 1e3:.2f} ms to compute again: {chosen}"
        lines.append(line)
    return "\n".join(lines)
