"""What one rank decides of retention and learned pauses, as a process of its own prints it.

    python -m support.agent_ranks FIRST STOP

prints a line of JSON for each seed: a digest of all that left host memory and of what every block
was worth on the way, and how often what happened. The clock of decisions and the requests come from
the seed. What else a process has is its own: its hashes (`PYTHONHASHSEED`), and its clocks, which
run as they like here.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from sglang_hc.config import HcConfig
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy import pauses
from sglang_hc.policy.learned import LEARNED
from sglang_hc.policy.pins import RetentionPriority, SessionPins
from sglang_hc.policy.soft_retention import SoftRetention
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.queue.requests import QueuedPrompt, Serial
from sglang_hc.ranks.agreement import AgreedClock
from sglang_hc.srt.start.build_host import host_tier
from sglang_hc.tiers.retention import Retention
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.host import FINGERPRINT, keep, queue_over

SLOTS = 48
STEPS = 250
CLIENTS = (None, "s4:acme", "s5:other")
TOOLS = {"read": 0.05, "build": 3.0, "": 0.5}
"""And about how many seconds their sessions stay away."""


@dataclass
class Talk:
    """A conversation. back: when its client goes on; None for never."""

    client: str | None
    name: str
    tokens: list[int]
    tool: str = ""
    back: float | None = 0.0


@dataclass
class Waiting:
    """A request that is queued."""

    talk: Talk
    prompt: list[int] = field(default_factory=list)

    @property
    def prefix(self) -> Prefix:
        return Prefix(self.talk.client, pack_tokens(self.prompt))


class AgentRank:
    """The parts of one scheduler that know agents, as `build_tree_cache` puts them together."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = AgreedClock(0.0)
        self.window, pins = LookAhead(), SessionPins.sized_for(SLOTS)
        self.soft = SoftRetention.sized_for(SLOTS)
        config, wanted = HcConfig(eviction=LEARNED), RetentionPriority(self.window, pins)
        parts = self.window, pins, self.soft, self.clock
        self.host, away = host_tier(config, SLOTS, FINGERPRINT, *parts)
        assert away is not None
        self.away = away
        self.retention = Retention(self.host, None, pins, wanted, self.clock, self.soft)
        self.queue = queue_over(self.host, None, self.window)
        self.queue.away = away
        self.talks = [
            Talk(self.rng.choice(CLIENTS), f"s{number}", self._text(300)) for number in range(16)
        ]
        self.waiting: dict[Serial, Waiting] = {}
        self.count = 0
        self.seen: Counter[str] = Counter()
        self.digest = hashlib.blake2b(digest_size=16)

    def run(self) -> dict[str, object]:
        for _ in range(STEPS):
            self.clock.now += self.rng.choice([0.0, 0.02, 0.2])
            self.retention.upkeep()
            self.away.upkeep()
            self.action()
            self.queue.on_schedule_step(list(self.waiting))
            self.note()
        self.seen["back"] = self.away.pauses.returned
        self.seen["evicted"] = self.host.evicted_blocks
        return {"digest": self.digest.hexdigest(), **self.seen}

    def note(self) -> None:
        """What other ranks must have alike."""
        self.host.check_integrity()
        value, owners = self.soft.value, self.away._policy._owners
        for node in self.host.tree.nodes():
            worth = value(node.block_id), owners.value(node.block_id)
            self.seen["retained"] += worth[0] > 0
            self.seen["demoted"] += worth[0] < 0
            self.seen["owned"] += worth[1] > 0 and self.away.pauses.is_evident
            self.digest.update(f"{node.block_id.hex()} {node.slot} {worth} ".encode())
        counted = sorted(self.retention.counters.items()), self.host.evicted_blocks
        self.digest.update(f"{counted} {len(self.retention.sessions)}\n".encode())

    def action(self) -> None:
        rng = self.rng
        kind = rng.choice(["ask", "ask", "ask", "answer", "answer", "answer", "agent", "retract"])
        if kind == "ask":
            self.ask()
        elif kind == "agent":
            self.agent(rng.choice(self.talks))
        elif self.waiting:
            request = rng.choice(list(self.waiting))
            if kind == "answer":
                self.answer(request)
            else:
                self.retract(request)

    def ask(self) -> None:
        back = [one for one in self.talks if one.back is not None and one.back <= self.clock.now]
        if not back or len(self.waiting) > 5:
            return
        talk, self.count = self.rng.choice(back), self.count + 1
        talk.back = None
        if len(talk.tokens) > 700:
            talk.tokens = self._text(200)
        self._queue(Serial(self.count), Waiting(talk, talk.tokens + self._text(40)))

    def answer(self, request: Serial) -> None:
        one = self._admitted(request)
        talk, said = one.talk, one.prompt + self._text(100)
        left = Prefix(talk.client, pack_tokens(said))
        keep(self.host, left.tokens, talk.client, self.clock())
        session = self.rng.choice([talk.name, None])
        self.retention.used(left, session)
        if self.rng.random() < 0.3:
            seconds, weight = self.rng.choice([0.3, 2.0]), self.rng.choice([0.2, 1.0])
            self.retention.retain(left, seconds, weight, session)
        if self.rng.random() < 0.1:
            self.retention.pin_if_possible(left, talk.name, 0.5)
        talk.tool = self.rng.choice(list(TOOLS))
        self.away.answered(request, left, len(one.prompt), talk.tool)
        self.queue.finished(request, len(said) // BLOCK_TOKENS)
        pause = TOOLS[talk.tool] * self.rng.uniform(0.5, 1.5)
        talk.tokens, talk.back = said, self.clock() + pause

    def retract(self, request: Serial) -> None:
        """It has computed its prompt and is queued again."""
        one = self._admitted(request)
        keep(self.host, one.prefix.tokens, one.talk.client, self.clock())
        self.queue.finished(request, len(one.prompt) // BLOCK_TOKENS, comes_back=True)
        self._queue(request, one)

    def agent(self, talk: Talk) -> None:
        """What the routes do with a name."""
        path = self.retention.left_by(talk.client, talk.name)
        if path is None:
            return
        kind = self.rng.choice(["retain", "demote", "demote", "unpin", "evict", "forget"])
        if kind == "retain":
            self.retention.retain(path, self.rng.choice([0.1, 1.0]), 1.0, talk.name)
        elif kind == "demote":
            self.retention.demote(path, talk.name)
        elif kind == "unpin":
            self.retention.pins.unpin(talk.client, talk.name)
        elif kind == "evict":
            self.host.evict(self.rng.randint(1, 6), self.clock())
        elif self.rng.random() < 0.1:
            self.retention.forget(lambda client: client == talk.client)
            self.away.pauses.forget(lambda client: client == talk.client)

    def _queue(self, request: Serial, one: Waiting) -> None:
        self.waiting[request] = one
        self.queue.arrived(request, lambda: QueuedPrompt(one.prefix, lambda: 0))

    def _admitted(self, request: Serial) -> Waiting:
        self.queue.on_schedule_step(list(self.waiting))
        one = self.waiting.pop(request)
        self.queue.on_schedule_step(list(self.waiting))
        return one

    def _text(self, count: int) -> list[int]:
        return self.rng.choices(range(3, 900), k=count)


def main(first: int, stop: int) -> None:
    pauses.EVIDENCE = 8
    own = random.SystemRandom()
    for name in ("monotonic", "time"):
        setattr(time, name, lambda: own.uniform(0, 1e6))
    for seed in range(first, stop):
        print(json.dumps(AgentRank(seed).run()))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
