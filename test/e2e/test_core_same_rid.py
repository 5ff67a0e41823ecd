"""Requests with one rid that are alive at once stay two: in their replies, and in K and V.

A client that went away may send again under the same name while its first request still runs, and
two tokenizer workers know nothing of each other's names.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from support.core import Core, Reply, run_in_child
from support.during import when

POOL = 1200
FLAGS = (
    "--hc-host-size-gb", "0.2", "--max-total-tokens", str(POOL), "--dtype", "float32",
    "--chunked-prefill-size", "128",
)  # fmt: skip
FORMS = ("hidden", "kv", "hidden:2,kv:2")
RID = "conversation 7"
LENGTHS = (150, 190)
"""Tokens of the two prompts."""


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 900) for _ in range(LENGTHS[seed])]


def second_turns(core: Core, first: list[Reply]) -> list[tuple[Reply, list[np.ndarray]]]:
    """Replies to the next turns, and the K and V of their prompts."""
    found = []
    for seed, reply in enumerate(first):
        tokens = [*prompt(seed), *reply.tokens, 5]
        found.append((core.ask(tokens, 12), [part.numpy() for part in core.kv(tokens)]))
    return found


def same(found: list[tuple[Reply, list[np.ndarray]]], wanted: Any) -> None:
    """Both next turns came from the tiers and are those of an engine that never evicts."""
    for (reply, kv), (good, good_kv) in zip(found, wanted, strict=True):
        assert reply.tokens == good.tokens
        for one, other in zip(kv, good_kv, strict=True):
            assert np.allclose(one, other, atol=1e-4), "K or V of other tokens"


def generated(core: Core) -> int:
    """Tokens of the first request's reply so far."""
    return len(core.arrived[0].output_ids) if core.arrived else 0


def talk(form: str, rid: str | None, evict: bool, *flags: str) -> Any:
    """Two prompts, the second of which comes while the first decodes; then their next turns."""
    core = Core("--hc-forms", form, *FLAGS, *flags)
    core.submit(prompt(0), 24, rid=rid)
    when(core, lambda: generated(core) == 6, lambda: core.submit(prompt(1), 24, rid=rid))
    core.run()
    first = [core.reply_to(req) for req in core.arrived]
    core.settle()
    if evict:
        core.evict()
    turns = second_turns(core, first)
    core.settle()
    return [reply.tokens for reply in first], turns, core.tree.stats()


@pytest.fixture(scope="module")
def good(models: None) -> Any:
    return run_in_child(talk, "kv", None, False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flags", [(), ("--disable-overlap-schedule",)], ids=["overlap", "plain"])
def test_two_requests_of_one_rid_are_captured_apart(
    good: Any, form: str, flags: tuple[str, ...]
) -> None:
    tokens, turns, stats = run_in_child(talk, form, RID, True, *flags)
    assert tokens == good[0]
    same(turns, good[1])
    assert all(reply.host >= 170 for reply, _ in turns), "both were saved whole"
    assert stats["host_staged_slots"] == 0
