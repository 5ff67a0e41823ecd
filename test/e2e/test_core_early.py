"""The read buffer in a real scheduler: waiting conversations are there before their turn."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.core import Core, run_in_child
from support.profiles import cost_model, write

TURNS = 6


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(3, 900) for _ in range(150 + 17 * i)] for i in range(TURNS)]


def returning(
    forms: str, read_buffer: str, pool: int, profile: str
) -> tuple[list[list[int]], dict]:
    """Conversations that come back at once, one after the other, after others ran."""
    core = Core(
        "--hc-forms", forms, "--max-total-tokens", str(pool), "--dtype", "float32",
        "--hc-host-size-gb", "0.1", "--max-running-requests", "1",
        "--hc-read-buffer-gb", read_buffer, profile=profile,
    )  # fmt: skip
    core.believe_profile()
    histories = [prompt + core.ask(prompt, 8).tokens for prompt in prompts()]
    core.settle()
    rids = [core.submit([*history, 7, 8, 9], 8) for history in histories]
    core.run()
    core.settle()
    stats = core.tree.stats()
    buffer = core.tree.tiers.restorer.path.read_buffer
    assert buffer is None or buffer.held == 0
    return [core.reply(rid).tokens for rid in rids], stats


@pytest.mark.parametrize("forms", ["hidden:3,kv:1", "kv"])
def test_answers_are_those_of_conversations_that_never_left(
    models: None, tmp_path: Path, forms: str
) -> None:
    """Loading takes a tenth of recomputing, and longer than the few new tokens: copied early."""
    profile = write(cost_model(host=1e-6, prefill=1e-5), tmp_path)
    tokens, stats = run_in_child(returning, forms, "0.002", 640, profile)
    wanted, never = run_in_child(returning, forms, "0", 8000, profile)
    assert tokens == wanted
    assert never.get("early_layer_tokens", 0) == 0
    assert stats["early_layer_tokens"] >= stats["early_used_layer_tokens"] > 0
