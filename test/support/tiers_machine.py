"""Random interleavings of requests, turns, evictions, aborts, restores and flushes against a model.

The model knows for every sequence what its hidden states and K/V are (a function of all tokens up
to a position, as in a transformer). Whatever the tiers serve must be exactly that, and after each
step every slot has one owner.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_hc.capture.capture import Segment
from sglang_hc.forms import LayerPlan
from sglang_hc.ranks.agreement import ALONE, Ranks
from sglang_hc.restore.path import Restoration
from sglang_hc.store.block_io import LocalBlockIo
from sglang_hc.store.host_pool import HostPool
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.decisions import Note
from support.examples import examples
from support.tiers import HIDDEN_BYTES, build, project

SALTS = [None, "", "a"]
DEVICE_SLOTS = 600
RESTORED: Counter[str] = Counter()
EARLY: Counter[str] = Counter()


POWERS = np.cumprod(np.full(DEVICE_SLOTS, 0x9E3779B97F4A7C15, np.uint64), dtype=np.uint64)


def states(layer: int, salt: str | None, tokens: list[int], first: int, stop: int) -> torch.Tensor:
    """Hidden states (stop - first, HIDDEN_BYTES) uint8 of positions [first, stop): each depends on
    every token up to it and on the namespace."""
    known = np.asarray(tokens[:stop], np.uint64) + np.uint64(1)
    sums = np.cumsum(known * POWERS[:stop], dtype=np.uint64)[first:]
    mixed = sums + np.uint64(zlib.crc32(repr((layer, salt)).encode()))
    for shift in (29, 32):
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(shift)
    return torch.from_numpy(mixed.view(np.uint8).reshape(-1, HIDDEN_BYTES))


@dataclass
class Running:
    """A request: its tokens, how many are computed, its device slots."""

    rid: str
    salt: str | None
    tokens: list[int]
    computed: int
    slots: list[int]
    kept: int = 0
    layers: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Waits:
    """A waiting request: the device is said to have its first tokens. early: its blocks that were
    restored before its turn, and their device slots."""

    salt: str | None
    tokens: list[int]
    on_device: int
    early: dict[int, list[int]] = field(default_factory=dict)


class TiersMachine(RuleBasedStateMachine):
    """One device, one host tier, requests that share prefixes often (three token ids)."""

    plan = LayerPlan(0, 1, 1)
    ring = 0
    now = 0.0
    ranks: Ranks = ALONE
    notes: list[Note] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.tiers, self.pool, self.executor = build(
            self.plan, slots=14, device_slots=DEVICE_SLOTS, rows=128,
            copy_stream=self.make_copy_stream(), recomputer=self, ring=self.ring,
            disk=self.make_disk, store=self.make_store, clock=lambda: self.now, ranks=self.ranks,
            notes=self.notes,
        )  # fmt: skip
        self.free = list(range(DEVICE_SLOTS))
        self.running: dict[str, Running] = {}
        self.spoken: list[tuple[str | None, list[int]]] = [(None, [])]
        self.count = 0
        self.waiting: dict[str, Waits] = {}

    def run(self, restoration: Restoration, between: Callable[[], None]) -> None:
        """The model's first layers, from the tokens the blocks hold."""
        salt, tokens = restoration.nodes[0].namespace, restoration.tokens().tolist()
        positions = torch.arange(len(tokens))
        for layer in range(restoration.recompute):
            rows = states(layer, salt, tokens, 0, len(tokens))
            self.pool.write_hidden(layer, rows, positions, restoration.device_slots)

    def make_copy_stream(self) -> object:
        return None

    make_disk: Callable[[HostPool], LocalBlockIo] | None = None
    make_store: Callable[[HostPool], LocalBlockIo] | None = None

    @rule(
        salt=st.sampled_from(SALTS),
        old=st.integers(0, 50),
        cut=st.integers(0, 200),
        more=st.lists(st.integers(0, 2), min_size=1, max_size=90),
    )
    def start(self, salt: str | None, old: int, cut: int, more: list[int]) -> None:
        """A request begins."""
        self.begin(salt, old, cut, more)

    def begin(self, salt: str | None, old: int, cut: int, more: list[int]) -> Running | None:
        """A request goes on from a prefix of something said before, restored if possible."""
        return self.admit(salt, self.prompt(salt, old, cut, more))

    def prompt(self, salt: str | None, old: int, cut: int, more: list[int]) -> list[int]:
        known_salt, known = self.spoken[old % len(self.spoken)]
        return ((known[:cut] if known_salt == salt else []) + more)[:250]

    def admit(self, salt: str | None, tokens: list[int]) -> Running | None:
        if len(self.running) == 3 or len(tokens) > len(self.free):
            return None
        self.count += 1
        req = Running(f"r{self.count}", salt, tokens, 0, [self.free.pop() for _ in tokens])
        nodes, usable = self.tiers.host.tree.match(Prefix(salt, pack_tokens(tokens[:-1]))).ready
        if usable:
            self.restore(req, nodes, usable)
        self.running[req.rid] = req
        self.tiers.capture.open(req.rid, Prefix(salt, pack_tokens(tokens[: req.computed])))
        return req

    @precondition(lambda self: self.tiers.host.published_blocks)
    @rule(
        old=st.integers(0, 50),
        cut=st.sampled_from([40, 64, 100, 200, 250]),
        more=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        on_device=st.sampled_from([0, 0, 10, 64]),
        looks=st.integers(1, 3),
        admit=st.booleans(),
    )
    def queue(
        self, old: int, cut: int, more: list[int], on_device: int, looks: int, admit: bool
    ) -> None:
        """A request waits, for a while or for long. What the device is said to hold of it may be
        wrong later."""
        if len(self.waiting) == 3:
            return
        self.count += 1
        salt = self.spoken[-1 - old % len(self.spoken)][0]
        tokens = self.prompt(salt, -1 - old % len(self.spoken), cut, more)
        self.waiting[f"w{self.count}"] = Waits(salt, tokens, min(on_device, len(tokens) - 1))
        for _ in range(looks):
            self.look()
        if admit:
            self.leave(len(self.waiting) - 1, abort=False)

    @rule()
    def look(self) -> None:
        """A scheduling pass: a block of each waiting request is restored before its turn."""
        for one in self.waiting.values():
            prompt = Prefix(one.salt, pack_tokens(one.tokens))
            nodes, tokens = self.tiers.host.tree.match(prompt).ready
            whole = range(-(-one.on_device // 64), tokens // 64)  # of the last a part may match
            blocks = [n for n in whole if n not in one.early]
            if blocks and not self.plan.recompute and len(self.free) > 128:
                self.restore_early(one, blocks[0], nodes[blocks[0]])

    def restore_early(self, one: Waits, block: int, node: BlockNode) -> None:
        one.early[block] = [self.free.pop() for _ in range(64)]
        start, slots = 64 * block, torch.tensor(one.early[block])
        restoration = Restoration((node,), start, start + 64, slots, first=block)
        self.tiers.restorer.restore_early([restoration])
        self.tiers.restorer.keep([node])

    def check_early(self, one: Waits) -> None:
        """What was restored of a request is right, and its slots are free again."""
        for block, slots in one.early.items():
            first, stop = 64 * block, 64 * block + 64
            for layer in range(self.plan.num_layers):
                hidden = states(layer, one.salt, one.tokens, first, stop)
                wanted = project(layer, hidden, torch.arange(first, stop))
                for part, rows in zip(self.pool.rows(layer), wanted, strict=True):
                    assert torch.equal(part[torch.tensor(slots)], rows), "restored early, and wrong"
            self.free += slots
            EARLY[type(self).__name__] += 64

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 5), abort=st.sampled_from([False, False, False, True]))
    def leave(self, which: int, abort: bool) -> None:
        """A waiting request is admitted, or goes."""
        rid = list(self.waiting)[which % len(self.waiting)]
        one = self.waiting.pop(rid)
        self.check_early(one)
        if not abort:
            self.admit(one.salt, one.tokens)

    @rule(
        salt=st.sampled_from(SALTS[:2]),
        old=st.integers(0, 50),
        cut=st.sampled_from([0, 40, 64, 100, 250]),
        more=st.lists(st.integers(0, 2), min_size=1, max_size=90),
        chunk=st.sampled_from([30, 64, 250]),
        reply=st.integers(0, 30),
        scattered=st.sampled_from([40, 40, 3, 0]),
        again=st.booleans(),
    )
    def turn(
        self, salt: str | None, old: int, cut: int, more: list[int], chunk: int, reply: int,
        scattered: int, again: bool,
    ) -> None:  # fmt: skip
        """A whole request: prefill in chunks, decode, finish; then some scatters, a next turn."""
        req = self.begin(salt, old, cut, more)
        if req is None:
            return
        which = list(self.running).index(req.rid)
        while req.computed < len(req.tokens):
            self.compute(which, chunk)
            self.keep(which, req.computed < len(req.tokens))
        self.decode(which, reply)
        self.finish(which, False)
        self.scatter(scattered)
        if again:
            self.queue(0, 250, [1], 0, 1, True)

    @rule(
        salt=st.sampled_from(SALTS[:2]),
        talk=st.lists(st.integers(0, 2), min_size=16, max_size=60),
    )
    def come_back(self, salt: str | None, talk: list[int]) -> None:
        """A conversation of a block or more comes back: it is restored before its turn."""
        self.turn(salt, 0, 0, (4 * talk)[:220], 250, 0, 40, True)

    def restore(self, req: Running, nodes: tuple, usable: int) -> None:
        slots = torch.tensor(req.slots[:usable])
        for layer in range(self.plan.num_layers):
            for part in self.pool.rows(layer):
                part[slots] = 255
        released: list[bool] = []
        restoration = Restoration(
            nodes[: -(-usable // 64)], 0, usable, slots, self.recomputed(usable)
        )
        self.tiers.restorer.queue(restoration, lambda: released.append(True))
        index = self.tiers.restorer.start()
        self.tiers.restorer.gate.set_consumer(index)
        for layer in range(self.plan.num_layers):
            self.tiers.restorer.gate.wait_until(layer)
            self.check_layer(req, layer, usable)
        self.tiers.after_pass(())
        assert released == [True]
        req.computed = usable
        RESTORED[type(self).__name__] += usable

    def recomputed(self, usable: int) -> int:
        """Layers a restoration leaves to the model: what is not stored, and sometimes more."""
        return min(self.plan.recompute + usable % 3, self.plan.num_layers)

    def check_layer(self, req: Running, layer: int, length: int) -> None:
        """The first `length` positions hold exactly what the model would have computed."""
        slots = torch.tensor(req.slots[:length])
        hidden = states(layer, req.salt, req.tokens, 0, length)
        wanted = project(layer, hidden, torch.arange(length))
        for part, rows in zip(self.pool.rows(layer), wanted, strict=True):
            assert torch.equal(part[slots], rows), f"layer {layer}: a restored row is wrong"

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5), step=st.integers(1, 130))
    def compute(self, which: int, step: int) -> None:
        """One forward pass over the next tokens of a request; its K/V go to the pool."""
        req = list(self.running.values())[which % len(self.running)]
        stop = min(req.computed + step, len(req.tokens))
        if stop == req.computed:
            return
        taps = []
        positions = torch.arange(req.computed, stop)
        slots = torch.tensor(req.slots[req.computed : stop])
        for layer in range(self.plan.num_layers):
            rows = states(layer, req.salt, req.tokens, req.computed, stop)
            self.pool.write_hidden(layer, rows, positions, slots)
            if layer in self.plan.hidden_layers:
                taps.append(rows)
        if taps:
            segment = Segment(req.rid, req.computed, 0, stop - req.computed)
            self.tiers.capture.take([segment], torch.stack(taps))
        req.computed = stop

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5), chunk=st.booleans())
    def keep(self, which: int, chunk: bool) -> None:
        """The tree commits what a running request has."""
        req = list(self.running.values())[which % len(self.running)]
        self.commit(req, req.computed // 64 * 64 if chunk else req.computed, final=False)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5), new=st.integers(0, 40))
    def decode(self, which: int, new: int) -> None:
        """A request whose prompt is computed generates tokens."""
        req = list(self.running.values())[which % len(self.running)]
        if req.computed < len(req.tokens) or new > len(self.free):
            return
        for token in range(new):
            req.tokens.append(token % 3)
            req.slots.append(self.free.pop())
            self.compute(which, 1)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5), drop=st.booleans())
    def finish(self, which: int, drop: bool) -> None:
        """A request ends: kept whole, or aborted with what had been committed."""
        req = list(self.running.values())[which % len(self.running)]
        length = req.kept if drop else req.computed
        self.commit(req, length, final=True)
        self.spoken.append((req.salt, req.tokens[: req.computed]))
        self.free += req.slots
        del self.running[req.rid]

    def commit(self, req: Running, length: int, final: bool) -> None:
        slots = torch.tensor(req.slots[:length], dtype=torch.int64)
        packed = pack_tokens(req.tokens[:length])
        self.tiers.capture.commit(req.rid, Prefix(req.salt, packed), slots, final=final)
        req.kept = max(req.kept, length)

    @rule(steps=st.integers(1, 6))
    def scatter(self, steps: int) -> None:
        """The executor gets some work done."""
        for _ in range(steps):
            self.executor.step()
            self.tiers.poll()

    @rule()
    def fail(self) -> None:
        """The next operation fails."""
        self.executor.fail_next = 1

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        self.tiers.host.evict(count, 0.0)

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        self.tiers.clear()
        assert self.tiers.host.free_slots == self.tiers.host.num_slots

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        self.tiers.check_integrity()

    def teardown(self) -> None:
        for one in self.waiting.values():
            self.check_early(one)
        self.tiers.restorer.clear()
        for rid in list(self.running):
            self.tiers.capture.drop(rid)
        self.tiers.drain()
        self.tiers.check_integrity()
        assert self.tiers.host.staged_slots == 0
        assert all(node.pins == 0 for node in self.tiers.host.tree.nodes())
        # What is left is served, and right.
        for salt, tokens in self.spoken:
            nodes, usable = self.tiers.host.tree.match(Prefix(salt, pack_tokens(tokens))).ready
            if usable:
                req = Running("last", salt, tokens, 0, list(range(len(tokens))))
                self.restore(req, nodes, usable)


PROFILE = settings(
    max_examples=examples(25),
    stateful_step_count=30,
    deadline=None,
    derandomize=True,  # the nightly target draws anew
    suppress_health_check=list(HealthCheck),
)
