"""A host tier with a recorder, used as a server uses both."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.eviction import make_policy
from sglang_hc.policy.pins import PinLimitError, SessionPins, TimeToLive
from sglang_hc.queue.requests import Serial
from sglang_hc.tiers.recording import Recorder, RecordingHostTier, RecordingLookAhead
from sglang_hc.tree.block_tree import BlockNode, BlockTree
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.host import FINGERPRINT, keep

SLOTS = 12


class Server:
    """A recorded tier, used as a server uses it: short prompts over few tokens, so paths share."""

    def __init__(self, path: Path, seed: int, eviction: str = "queue", limit: int = 10**6) -> None:
        self.rng = random.Random(seed)
        header = {"host_slots": SLOTS, "eviction": eviction, "page_size": 1}
        self.recorder = Recorder(path, header, FINGERPRINT, limit)
        self.pins = SessionPins(6, 60.0)
        ttl: TimeToLive[BlockNode] = TimeToLive(40.0)
        blocks = BlockTree(FINGERPRINT)
        self.window = RecordingLookAhead(self.recorder)
        policy = make_policy(eviction, self.window, pinned=self.pins)
        self.tier = RecordingHostTier(self.recorder, blocks, SLOTS, policy, ttl)
        self.recorder.watch(self.pins)
        self.waiting: dict[Serial, Prefix] = {}
        self.hits = 0
        self.count = 0
        self.now = 0.0

    def prompt(self) -> Prefix:
        blocks = [[self.rng.randrange(2)] * BLOCK_TOKENS for _ in range(self.rng.randint(0, 3))]
        tail = [self.rng.randrange(2) for _ in range(self.rng.randint(1, BLOCK_TOKENS))]
        tokens = [token for block in [*blocks, tail] for token in block]
        return Prefix(self.rng.choice([None, "tenant"]), pack_tokens(tokens))

    def arrive(self) -> None:
        request = Serial(self.count)
        self.count += 1
        self.waiting[request] = self.prompt()
        self.recorder.arrived(request, self.waiting[request])

    def look(self) -> None:
        order = list(self.waiting)
        if self.rng.random() < 0.3:
            self.rng.shuffle(order)
        self.window.update(order, 4, lambda request: self.ids(self.waiting[request]))

    def ids(self, prompt: Prefix) -> list[bytes]:
        nodes = self.tier.tree.match(prompt).nodes
        return list(dict.fromkeys(node.block_id for node in nodes))

    def abort(self) -> None:
        request = self.rng.choice(list(self.waiting))
        del self.waiting[request]
        self.window.leave(request)
        self.recorder.gone(request)

    def serve(self) -> None:
        request = next(iter(self.waiting))
        prompt = self.waiting.pop(request)
        match = self.tier.tree.match(prompt)
        usable = match.tokens if all(node.ready for node in match.nodes) else 0
        if usable == match.tokens:
            self.recorder.matched(request, prompt.num_tokens, 0, usable)
            self.recorder.admitted(request, usable, 0)
            self.hits += usable
        rank = self.window.rank(request)

        def is_protected(node) -> bool:
            use = self.window.next_use(node.block_id)
            return rank is not None and use is not None and use < rank

        self.tier.pin(match.nodes)
        keep(self.tier, prompt.tokens, prompt.namespace, self.now, is_protected)
        self.tier.access(self.tier.tree.match(prompt).nodes, self.now)
        self.tier.unpin(match.nodes)
        self.recorder.finished(request, prompt)

    def pin(self) -> None:
        """A session keeps its blocks for a while."""
        prompt = self.prompt()
        with contextlib.suppress(PinLimitError):
            ids = self.ids(prompt)
            self.pins.pin(prompt.namespace, f"s{self.rng.randrange(3)}", ids, 20.0, self.now)

    def run(self, steps: int = 300) -> Server:
        for _ in range(steps):
            self.now += 1
            self.look()
            self.pins.expire(self.now)
            self.tier.expire(self.now)
            if self.rng.random() < 0.1:
                self.pin()
            choice = self.rng.random()
            if choice < 0.5 or not self.waiting:
                self.arrive()
            elif choice < 0.93:
                self.serve()
            elif choice < 0.97:
                self.abort()
            elif choice < 0.99:
                self.tier.evict(2, self.now)
            else:
                self.tier.clear()
        self.tier.check_integrity()
        self.recorder.close()
        return self
