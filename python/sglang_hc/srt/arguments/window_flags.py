"""What of SGLang goes with models that have sliding windows: their pool of their own.

SGLang gives the windows of some models none beside HiCache. They would take as many rows as full
attention then, on the device and in the tiers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_hc.srt.binding.arguments import architecture, asked, choose

BESIDE_HICACHE = frozenset({"Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"})
"""Architectures whose windows have no pool of their own beside HiCache, whose place the tiers take,
and one without it."""

HICACHE = "enable_hierarchical_cache"


@contextmanager
def own_pool(args: Any) -> Iterator[None]:
    """While SGLang chooses for a model: it chooses for these as without HiCache."""
    hides = asked(args, HICACHE) and architecture(args) in BESIDE_HICACHE
    if hides:
        choose(args, HICACHE, False)
    yield
    if hides:
        choose(args, HICACHE, True)
