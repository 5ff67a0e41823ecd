"""Conversations with a common start that come back, of which the host tier holds a part."""

from __future__ import annotations

import random
from collections.abc import Callable

from support.core import Core

FLAGS = (
    "--max-total-tokens", "1200", "--dtype", "float32", "--hc-host-size-gb", "0.008",
    "--max-running-requests", "3", "--random-seed", "1",
)  # fmt: skip
"""For a device that holds the requests that run, and a host tier that holds two or three of
the conversations."""


def talk(
    core: Core, talks: int, after_turn: Callable[[int], None] = lambda turn: None
) -> list[str]:
    """Three turns of `talks` conversations, every fifth with a salt of its own, and in each turn a
    request that is aborted while it waits. Returns the names of the answered requests."""
    rng = random.Random(5)
    system = rng.choices(range(3, 900), k=100)
    histories = [system + rng.choices(range(3, 900), k=90) for _ in range(talks)]
    salts = ["other" if number % 5 == 0 else None for number in range(talks)]
    answered: list[str] = []
    for turn in range(3):
        now = [core.submit(h, 8, s) for h, s in zip(histories, salts, strict=True)]
        core.abort(core.submit(histories[0][:150], 8))
        core.run()
        after_turn(turn)
        answered += now
        histories = [
            h + core.reply(rid).tokens + [7, 8, 9 + turn]
            for h, rid in zip(histories, now, strict=True)
        ]
    return answered
