"""A conversation whose first turn lies below host memory when the second comes, under SGLang's real
scheduler; what the tests of meetings share."""

from __future__ import annotations

import itertools
import json
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_hc.store.outcome import Outcome
from support import profiles
from support.core import Core

FLAGS = (
    "--max-total-tokens", "4000", "--dtype", "float32", "--hc-host-size-gb", "0.2",
    "--chunked-prefill-size", "512",
)  # fmt: skip
_RNG = random.Random(3)
PROMPT = [_RNG.randrange(3, 900) for _ in range(700)]
FOLLOW = [_RNG.randrange(3, 900) for _ in range(20)]
BLOCKS = 11
"""Whole blocks of the prompt and its reply of 30 tokens, 29 of which are kept."""


def undisturbed(form: str) -> tuple[list[int], list[int]]:
    core = Core("--hc-forms", form, *FLAGS)
    first = core.ask(PROMPT, 30).tokens
    return first, core.ask(second_turn(first), 24).tokens


def halving_profile(folder: Path, disk: float = 1e-3) -> str:
    """A profile file. A token of a layer is computed in a millisecond and read as K and V in `disk`
    seconds, by default a millisecond too: then half of a history is computed."""
    return profiles.write(profiles.cost_model(host=1e-6, disk=disk, prefill=1e-3), folder)


class HeldDisk:
    """The disk's `BlockIo` with its answers in the hand of the test."""

    def __init__(self, core: Core) -> None:
        tier = core.tree.tiers.disk
        self._io, tier._io = tier._io, self
        self._held: deque[Any] = deque()
        self.left: int | None = None
        """So many answers are let through, then none; None for all."""
        self.verdicts: dict[int, Outcome] = {}
        """Outcome of the reads by their number, 0 for the first that was asked for."""
        self.asked: list[int] = []

    def read(self, ticket: int, *args: Any) -> None:
        self.asked.append(ticket)
        self._io.read(ticket, *args)

    def poll(self) -> list[Any]:
        for done in self._io.poll():
            outcome = done.outcome
            if done.ticket in self.asked:
                outcome = self.verdicts.get(self.asked.index(done.ticket), outcome)
            self._held.append(done._replace(outcome=outcome))
        count = len(self._held) if self.left is None else min(self.left, len(self._held))
        if self.left is not None:
            self.left -= count
        return [self._held.popleft() for _ in range(count)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io, name)


def on_disk(folder: str) -> tuple[str, ...]:
    return "--hc-disk", f"{folder}:1"


def in_store(folder: str) -> tuple[str, ...]:
    return "--hc-remote", "file", "--hc-remote-config", json.dumps({"dir": folder})


def server(form: str, profile: str, *flags: str, store_seconds: float | None = None) -> Core:
    """A server that goes by its profile. store_seconds: what a token of a layer from a remote store
    is said to have taken."""
    core = Core("--hc-forms", form, *FLAGS, *flags, profile=profile)
    costs = core.tree.tiers.restorer.watch.costs
    if store_seconds is not None:
        costs.observe_remote(store_seconds)
    costs.observe_remote = lambda _: None
    core.believe_profile()
    return core


def start(form: str, folder: str, profile: str, *flags: str) -> tuple[Core, list[int]]:
    """A server whose disk alone holds the first turn."""
    core = server(form, profile, *on_disk(folder), *flags)
    first = core.ask(PROMPT, 30).tokens
    forget(core)
    return core, first


def second_turn(first: list[int]) -> list[int]:
    """The prompt of the second turn, given the reply to the first."""
    return [*PROMPT, *first, *FOLLOW]


def forget(core: Core) -> None:
    core.settle()
    assert core.scheduler.flush_cache()


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


def run(core: Core, each_pass: Callable[[int], None]) -> None:
    """Run to the end; `each_pass` is told the number of each pass at its top."""
    receive = core.scheduler.request_receiver.recv_requests
    passes = itertools.count(1)

    def received() -> list[Any]:
        each_pass(next(passes))
        return receive()

    core.scheduler.request_receiver.recv_requests = received
    try:
        core.run()
    finally:
        core.scheduler.request_receiver.recv_requests = receive
