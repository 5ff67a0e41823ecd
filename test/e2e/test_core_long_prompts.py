"""Prompts as long as the prefill chunks of 80 GB cards are kept whole, alone and two at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.core import Core, run_in_child
from support.prompts import prompt

pytestmark = pytest.mark.long

POOL = 62_000
"""Tokens of the device pool: two of the longest prompts."""

CHUNK = 8192
CHUNKS_AND_A_PART = 2 * CHUNK + 2000
PLANS = ("hidden", "kv", "hidden:1,kv:1")
SHAPE = {"num_hidden_layers": 2, "max_position_embeddings": 32_768}
"""Of the tiny Llama, made shallow and long. Its weights are in place; the rest of them is left."""


def second_turns(forms: str, lengths: list[int]) -> dict[str, Any]:
    """All prompts at once, out of the device, then each again with a few words more."""
    core = Core(
        "--hc-forms", forms, "--chunked-prefill-size", str(CHUNK), "--max-total-tokens", str(POOL),
        "--hc-host-size-gb", "2", "--dtype", "bfloat16", "--context-length", "32768",
        "--json-model-override-args", json.dumps(SHAPE),
    )  # fmt: skip
    prompts = [prompt(seed, length) for seed, length in enumerate(lengths)]
    rids = [core.submit(tokens, 4) for tokens in prompts]
    core.run()
    first = [core.reply(rid).tokens for rid in rids]
    core.settle()
    core.evict()
    again = [core.ask([*p, *r, *prompt(9, 8)], 1) for p, r in zip(prompts, first, strict=True)]
    core.settle()
    return {"again": again, "stats": core.tree.stats()}


TWO = [CHUNKS_AND_A_PART, CHUNKS_AND_A_PART]


@pytest.mark.parametrize(
    ("forms", "lengths"),
    [
        ("hidden", [CHUNKS_AND_A_PART]),
        ("kv", [CHUNKS_AND_A_PART]),
        *((forms, [7000, 7000]) for forms in PLANS),
        ("hidden:1,kv:1", TWO),
        pytest.param("hidden:1,kv:1", [30_000, 30_000], marks=pytest.mark.slow),
    ],
)
def test_a_long_prompt_is_kept(models: None, forms: str, lengths: list[int]) -> None:
    seen = run_in_child(second_turns, forms, lengths)
    for length, reply in zip(lengths, seen["again"], strict=True):
        assert reply.device == 0
        assert reply.host >= 0.98 * length, seen["stats"]
    assert "not_staged_tokens" not in seen["stats"]
