"""Two tensor-parallel ranks: a conversation that was evicted between its turns goes on token for
token, on both ranks, from memory and from disk, and whatever happens to one of them.

The reference is the same conversation on the same two ranks that never leaves the device.
"""

from __future__ import annotations

import pytest

from support.conversations import Outcome, check_same_tokens, compare, options
from support.exactness import BOUND
from support.ranked_core import RankedCore, run_ranks

MIXED = "recompute:1,hidden:2,kv:1"
CASES = [
    ("llama-gqa", MIXED),
    ("llama-mha", "hidden"),
    ("llama-mha", "kv"),
    ("llama-gqa", "hidden"),
    ("qwen3", "hidden:2,kv:2"),
    ("qwen3", MIXED),
    ("deepseek-v2", "kv"),
    ("deepseek-v2", "recompute:2,kv:2"),
]


def both_on_rank(rank: int, port: int, model: str, form: str, *flags: str) -> Outcome:
    return compare(RankedCore(rank, port, *options(form, "float32"), *flags, model=model))


def check_alike(found: list[Outcome]) -> None:
    """Ranks sampled the same tokens and took the same decisions."""
    first, second = found
    assert first.kept["tokens"] == second.kept["tokens"]
    assert first.evicted["tokens"] == second.evicted["tokens"]
    assert first.stats == second.stats


@pytest.mark.parametrize(
    ("model", "form"), [CASES[0], *(pytest.param(*c, marks=pytest.mark.slow) for c in CASES[1:])]
)
def test_each_form_float32(models: None, model: str, form: str) -> None:
    found = run_ranks(both_on_rank, model, form)
    check_alike(found)
    for rank in found:
        assert rank.stats["layer_plan"] == (form if ":" in form else f"{form}:4")
        check_same_tokens(rank)
        assert rank.worst("error") <= BOUND["float32"]
        assert rank.worst("error", slice(rank.layers - 1, rank.layers)) == 0.0 or form == "hidden"
