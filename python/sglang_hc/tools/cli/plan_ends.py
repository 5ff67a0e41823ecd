"""`sglang-hc plan` for models whose layers do not all have full attention.

There is no choice of forms: layers with full attention are kept as KV, the others at ends. So it
says what that takes, and how long the copies of a restoration take.
"""

from __future__ import annotations

import json
from typing import Any

from sglang_hc.tools.model_ends import KeptShape

MIB = 1 << 20


def report(shape: KeptShape, context: int, rates: dict[str, float], *, as_json: bool) -> str:
    """What is kept of `context` tokens with one end. rates: 1e9 bytes/s, by tier."""
    size = shape.path_bytes(context, 1)
    found: dict[str, Any] = {
        "model": shape.describe(),
        "context": context,
        "kv_bytes_per_token": shape.token_bytes,
        "end_bytes": shape.end_bytes,
        "end_parts": shape.ends.blocks,
        "bytes_per_token": size / context,
        "share_of_full_kv": shape.share(context, 1),
        "copy_seconds": {tier: size / (rate * 1e9) for tier, rate in rates.items()},
    }
    return json.dumps(found, indent=2) if as_json else _text(found)


def _text(found: dict[str, Any]) -> str:
    lines = [
        f"model    {found['model']}",
        f"request  {found['context']} history tokens, with one end",
        f"kept     {found['kv_bytes_per_token']:,} bytes/token of the layers with full attention; "
        f"an end takes {found['end_bytes'] / MIB:.3g} MiB",
        f"         together {found['bytes_per_token']:,.0f} bytes/token, "
        f"{found['share_of_full_kv']:.3f} of K and V in all layers",
    ]
    for tier, seconds in found["copy_seconds"].items():
        lines.append(f"from {tier}: {seconds * 1e3:.2f} ms of copies")
    return "\n".join(lines)
