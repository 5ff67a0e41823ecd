"""Pins and time to live under SGLang's real scheduler."""

from __future__ import annotations

import random
import time
from typing import Any

from sglang_hc.tree.identity import Prefix, pack_tokens
from support.core import Core, run_in_child

FLAGS = (
    "--hc-forms", "kv", "--max-total-tokens", "640", "--dtype", "float32",
    "--hc-host-size-gb", "0.02",
)  # fmt: skip
PROMPT = random.Random(8).choices(range(3, 900), k=200)


def ask_pinned(core: Core, seconds: float) -> list[int]:
    wish = {"hc_pin": {"session": "tool", "ttl_s": seconds}}
    rid = core.submit(PROMPT, 8, custom_params=wish)
    core.run()
    core.settle()
    return core.reply(rid).tokens


def flood_host(core: Core) -> None:
    """More unrelated conversations than the host tier holds."""
    rng = random.Random(1)
    for _ in range(2 * core.tree.tiers.host.num_slots // 4):
        core.ask([rng.randrange(3, 900) for _ in range(250)], 1, salt="flood")
    core.settle()


def a_pin_and_its_end() -> tuple[Any, ...]:
    core = Core(*FLAGS)
    reply = ask_pinned(core, 600.0)
    pins = core.tree.tiers.retention.pinned(None)
    flood_host(core)
    path = Prefix(None, pack_tokens([*PROMPT, *reply]))
    held = core.tree.tiers.host.tree.match(path).ready.tokens
    kept = core.ask([*PROMPT, *reply, 5], 4)
    core.tree.tiers.retention.pins.expire(time.monotonic() + 601)
    flood_host(core)
    lost = core.ask([*PROMPT, *reply, 5], 4)
    return pins, held, kept, lost, core.tree.stats()


def test_a_pinned_session_outlives_a_flood_until_its_pin_ends(models: None) -> None:
    pins, held, kept, lost, stats = run_in_child(a_pin_and_its_end)
    assert [(pin.session, pin.blocks) for pin in pins] == [("tool", 4)]
    assert held >= 207  # the token sampled last need not have been computed
    assert kept.cached >= 207
    assert lost.cached == 0
    assert kept.tokens == lost.tokens
    assert stats["evicted_blocks"] > 0 and "pins_refused" not in stats


def a_time_to_live() -> tuple[Any, ...]:
    core = Core(*FLAGS, "--hc-ttl", "600")
    first = core.ask(PROMPT, 8)
    core.settle()
    core.flood(random.Random(2), 1300)
    soon = core.ask([*PROMPT, *first.tokens, 5], 1)
    core.flood(random.Random(3), 1300)
    retention = core.tree.tiers.retention
    retention._clock = lambda: time.monotonic() + 601
    core.run()
    retention._clock = time.monotonic
    late = core.ask([*PROMPT, *first.tokens, 5], 1)
    return soon, late, core.tree.stats()


def test_what_nobody_used_for_its_time_to_live_is_gone(models: None) -> None:
    soon, late, stats = run_in_child(a_time_to_live)
    assert soon.host > 190
    assert late.cached == 0
    assert stats["expired_blocks"] >= 4
