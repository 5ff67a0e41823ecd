"""Learned pauses on SGLang's scheduler: who is about to come back stays in host memory."""

from __future__ import annotations

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.pauses import EVIDENCE, Kind, Pauses
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.clock import Clock
from support.core import Core, run_in_child
from support.prompts import SMALL, prompt

PROMPTS = {name: prompt(name, 260) for name in ("build", "read")}


def teach(pauses: Pauses, clock: Clock) -> None:
    """Files are read in a tenth of a second, or never, and builds take 100 s."""
    for number in range(EVIDENCE):
        for tool, seconds in (("read", 0.1), ("build", 100.0)):
            pauses.left(Kind(None, tool, 1), [number.to_bytes(16, "big")], clock.now)
            clock.pass_time(seconds)
            pauses.advance(clock.now)
            pauses.came([number.to_bytes(16, "big")], clock.now)
        pauses.left(Kind(None, "read", 1), [(1000 + number).to_bytes(16, "big")], clock.now)


def two_sessions(eviction: str) -> dict[str, int]:
    """A build has begun, a file was read 50 s later, and 40 s later others need room. Returns how
    many tokens of both host memory has then."""
    from sglang_hc.srt.tree import capturing_tree

    core = Core(*SMALL, "--hc-forms", "kv", "--hc-host-size-gb", "0.01", "--hc-eviction", eviction)
    clock, away, names = Clock(), core.tree.tiers.away, {}
    if away is not None:
        away.clock = clock
        teach(away.pauses, clock)
        capturing_tree.called_by = lambda req: names.get(req.rid, "")
    histories = {}
    for name, said in PROMPTS.items():
        rid = core.submit(said, 4)
        names[rid] = name
        core.run()
        histories[name] = said + core.reply(rid).tokens
        core.settle()
        clock.pass_time(50)
    clock.pass_time(-10)
    host, number = core.tree.tiers.host, 0
    while host.free_slots > 3:
        core.ask(prompt(number, 3 * BLOCK_TOKENS + 1), 1)
        core.settle()
        number += 1
    assert host.evicted_blocks == 0
    core.ask(prompt("last", 6 * BLOCK_TOKENS + 1), 1)
    core.settle()
    return {
        name: host.tree.match(Prefix(None, pack_tokens(history))).tokens
        for name, history in histories.items()
    }


@pytest.mark.parametrize(("eviction", "stays"), [("queue", "read"), ("learned", "build")])
def test_who_is_about_to_come_back_stays(models: None, eviction: str, stays: str) -> None:
    found = run_in_child(two_sessions, eviction)
    other = {"read": "build", "build": "read"}[stays]
    assert found[stays] >= 256 > found[other], found
