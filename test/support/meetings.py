"""A conversation whose first turn lies below host memory when the second comes, under SGLang's real
scheduler; what the tests of meetings share."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_hc.policy.correction import Resource
from sglang_hc.store.outcome import Outcome
from support import profiles
from support.core import Core
from support.prompts import on_disk, prompt

FLAGS = (
    "--max-total-tokens", "4000", "--dtype", "float32", "--hc-host-size-gb", "0.2",
    "--chunked-prefill-size", "512",
)  # fmt: skip
SAID = prompt(3, 720)
PROMPT, FOLLOW = SAID[:700], SAID[700:]
BLOCKS = 11
"""Whole blocks of the prompt and its reply of 30 tokens, 29 of which are kept."""


Replies = tuple[list[int], list[int]]
"""To both turns of the conversation."""


def undisturbed() -> Replies:
    core = Core("--hc-forms", "kv", *FLAGS)
    first = core.ask(PROMPT, 30).tokens
    return first, core.ask(second_turn(first), 24).tokens


FAST = 2e-4
"""Seconds for a token of a layer. At this price a block or two are computed before the rest is
expected: nearly every block is read, and is a point at which the meeting may have to move."""


def halving_profile(folder: Path, disk: float = 1e-3, host: float = 1e-6) -> str:
    """A profile file. A token of a layer is computed in a millisecond and read as K and V in `disk`
    seconds, by default a millisecond too: then half of a history is computed. Restoring it takes
    `host` seconds; where that is long, blocks are restored as they come."""
    return profiles.write(profiles.cost_model(host=host, disk=disk, prefill=1e-3), folder)


class HeldDisk:
    """The disk's `BlockIo` with the answers to reads in the hand of the test. What is let through
    is waited for: it comes in the same pass however fast the disk is."""

    def __init__(self, core: Core) -> None:
        tier = core.tree.tiers.disk
        self._io, tier._io = tier._io, self
        self._held: deque[Any] = deque()
        self._under_way: set[int] = set()
        """Tickets of the reads that the disk has not answered."""
        self.left: int | None = None
        """So many reads are let through, then none; None for all."""
        self.verdicts: dict[int, Outcome] = {}
        """Outcome of the reads by their number, 0 for the first that was asked for."""
        self.asked: list[int] = []

    def read(self, ticket: int, *args: Any) -> None:
        self.asked.append(ticket)
        self._under_way.add(ticket)
        self._io.read(ticket, *args)

    def poll(self) -> list[Any]:
        count = len(self._held) + len(self._under_way)
        if self.left is not None:
            count = min(self.left, count)
            self.left -= count
        answers = self._take()
        while len(self._held) < count:
            time.sleep(0.001)
            answers += self._take()
        return answers + [self._held.popleft() for _ in range(count)]

    def _take(self) -> list[Any]:
        """Answers to writes; those to reads are held."""
        others = []
        for done in self._io.poll():
            if done.ticket not in self._under_way:
                others.append(done)
                continue
            self._under_way.remove(done.ticket)
            outcome = done.outcome
            if done.ticket in self.asked:
                outcome = self.verdicts.get(self.asked.index(done.ticket), outcome)
            self._held.append(done._replace(outcome=outcome))
        return others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io, name)


def server(
    form: str,
    profile: str,
    *flags: str,
    store_seconds: float | None = None,
    kind: type[Core] = Core,
) -> Core:
    """A server that goes by its profile. store_seconds: what a token of a layer from a remote store
    is said to have taken."""
    core = kind("--hc-forms", form, *FLAGS, *flags, profile=profile)
    if store_seconds is not None:
        costs = core.tree.tiers.restorer.planner.costs
        costs.observe({Resource.REMOTE: 1.0}, store_seconds)
    core.believe_profile()
    return core


def start(
    form: str,
    folder: str,
    profile: str,
    *flags: str,
    kind: type[Core] = Core,
) -> tuple[Core, list[int]]:
    """A server whose disk alone holds the first turn."""
    core = server(form, profile, *on_disk(folder), *flags, kind=kind)
    first = core.ask(PROMPT, 30).tokens
    core.forget()
    return core, first


def second_turn(first: list[int]) -> list[int]:
    """The prompt of the second turn, given the reply to the first."""
    return [*PROMPT, *first, *FOLLOW]


def counted(core: Core, during: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    before = core.tree.stats()
    reply = during()
    core.settle()
    tiers = core.tree.tiers
    assert tiers.host.staged_slots == 0 and not len(tiers.disk.coming), "nothing is left over"
    assert all(node.pins == 0 for node in tiers.host.tree.nodes())
    after = core.tree.stats()
    changes = {k: v - before.get(k, 0) for k, v in after.items() if isinstance(v, int)}
    return reply, {name: change for name, change in changes.items() if change}
