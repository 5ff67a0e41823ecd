"""Every access to places and host rows is ordered, by streams and events, under SGLang's scheduler
(`--hc-throughput`); three mistakes that bring no wrong reply on one machine are found.

`support/ordered_core.py` says what is compared and how.
"""

from __future__ import annotations

from typing import Any

import pytest

from sglang_hc.hybrid.units import Units
from support.core import run_in_child
from support.ordered_core import OrderedStreams
from support.prompts import prompt
from support.spoiled_units import NeverWaits, ReadsTooEarly, RefillsTooEarly
from support.streaming import SOME, backend_of, flags_of, units_of

SPEC = f"act:0.5,rounds:3,{SOME}"


def served(mistake: type[Units] | None = None) -> dict[str, Any]:
    """Requests at once in several rounds, then their second turns."""
    core = OrderedStreams(*flags_of(SPEC), model="llama-mha")
    if mistake is not None:
        units_of(core).__class__ = mistake
    prompts = [prompt(n, 60 + 10 * n) for n in range(5)]
    for _ in range(2):
        rids = [core.submit(tokens, 6) for tokens in prompts]
        core.run()
        prompts = [
            [*tokens, *core.reply(rid).tokens, *prompt(9, 20)]
            for tokens, rid in zip(prompts, rids, strict=True)
        ]
    passed = units_of(core).passed
    assert passed.rounds > passed.passes and backend_of(core).streamed.streaming.device_act
    return {
        "races": [str(race) for race in core.watch.races],
        "regions": {race.region for race in core.watch.races},
        "accesses": core.watch.accesses,
    }


def test_no_access_is_unordered(models: None) -> None:
    seen = run_in_child(served)
    assert not seen["races"], "\n".join(seen["races"])
    wanted = {"slot table", "row table", "place 0", "place 1", "host rows", "kept rows"}
    assert wanted <= seen["accesses"].keys()


@pytest.mark.parametrize(
    ("mistake", "region"),
    [
        (NeverWaits, "place 0"),
        pytest.param(RefillsTooEarly, "place 0", marks=pytest.mark.slow),
        (ReadsTooEarly, "host rows"),
    ],
)
def test_the_checker_sees(models: None, mistake: type[Units], region: str) -> None:
    seen = run_in_child(served, mistake)
    assert region in seen["regions"], f"found elsewhere: {seen['races']}"
