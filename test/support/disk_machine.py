"""The tiers' machine with a disk below that is late, fails, damages and dies in mid-operation.

Whatever it does, only right bytes are served, and a slot that an operation may touch belongs to
nobody else.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from sglang_hc.queue.requests import QueuedPrompt
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.fake_io import FakeIo
from support.tiers_machine import TiersMachine

SEEN: Counter[str] = Counter()
"""Over all runs: what the disk did."""

FAILURES = [Outcome.DAMAGED, Outcome.IO_ERROR, Outcome.TIMED_OUT, Outcome.NO_SPACE]


class DiskMachine(TiersMachine):
    """Blocks are written through, the host tier forgets, waiting requests fetch them again."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()
        assert self.tiers.disk is not None
        self.disk, self.view = self.tiers.disk, self.tiers.queue
        self.fetching: dict[str, QueuedPrompt] = {}

    def make_disk(self, pool: HostPool) -> FakeIo:
        self.io = FakeIo(pool, writes_wait=True, polls_per_step=8)
        return self.io

    @rule(
        salt=st.sampled_from([None, "a"]),
        more=st.lists(st.integers(0, 2), min_size=20, max_size=60),
        forget=st.sampled_from([True, True, False]),
        steps=st.integers(0, 2),
        end=st.sampled_from(["lost", "well", "lost", *FAILURES]),
    )
    def remember(
        self, salt: str | None, more: list[int], forget: bool, steps: int, end: Outcome | str
    ) -> None:
        """A long turn goes to disk, memory forgets it, a request fetches it, which ends somehow."""
        self.back()
        while forget and self.running:
            self.finish(0, drop=False)
        self.turn(salt, 0, 0, (4 * more)[:220], chunk=250, reply=0, scattered=40, again=False)
        self.work(6)
        if forget:
            self.forget_memory()
        self.fetch(0, 250, steps)
        if end == "lost":
            self.lose(poll=True)
            self.back()
        elif isinstance(end, Outcome):
            self.fail_on_disk(end)

    @rule(old=st.integers(0, 50), cut=st.sampled_from([64, 130, 200, 250]), steps=st.integers(0, 4))
    def fetch(self, old: int, cut: int, steps: int) -> None:
        """A waiting request asks for what the disk has of an earlier prompt."""
        salt, tokens = self.spoken[-1 - old % len(self.spoken)]
        self.count += 1
        rid = f"f{self.count}"
        self.fetching[rid] = QueuedPrompt(Prefix(salt, pack_tokens(tokens[:cut])), lambda: 0)
        self.view.arrived(rid, partial(self.fetching.__getitem__, rid))
        self.look()
        self.work(steps)

    @rule()
    def look(self) -> None:
        """A scheduling pass."""
        self.view.on_schedule_step(list(self.fetching))

    @rule(steps=st.integers(1, 6))
    def work(self, steps: int) -> None:
        """The disk gets some work done."""
        for _ in range(steps):
            self.io.step()
        self.tiers.poll()

    @rule(outcome=st.sampled_from(FAILURES))
    def fail_on_disk(self, outcome: Outcome) -> None:
        SEEN["failed"] += bool(self.io.moves)
        self.io.step(outcome)
        self.tiers.poll()

    @rule(poll=st.booleans())
    def lose(self, poll: bool) -> None:
        """The disk goes out of use; waiting requests learn it now or at a later poll."""
        SEEN["lost"] += len(self.io.moves)
        self.io.lose()
        if poll:
            self.tiers.poll()

    @precondition(lambda self: not self.io.up)
    @rule()
    def back(self) -> None:
        self.io.back()

    @precondition(lambda self: self.fetching)
    @rule(which=st.integers(0, 5), cancel=st.booleans(), later=st.sampled_from([0.0, 1.0, 6.0]))
    def stop_waiting(self, which: int, cancel: bool, later: float) -> None:
        """A request gets its turn, or waited too long, or goes."""
        rid = list(self.fetching)[which % len(self.fetching)]
        self.now += later
        if cancel:
            self.view.left(rid)
        elif self.view.ready(rid):
            self.view.finished(rid, 3)
        else:
            return
        del self.fetching[rid]

    @precondition(lambda self: not self.running)
    @rule()
    def forget_memory(self) -> None:
        """Only the disk has it from now on."""
        self.scatter(20)
        self.work(20)
        self.tiers.clear()

    @invariant()
    def what_is_under_way_has_its_slot_for_itself(self) -> None:
        host = self.tiers.host
        pinned = {node.slot for node in host.tree.nodes() if node.pins}
        for move in self.io.moves:
            assert move.slot in pinned if move.write else host.is_staged(move.slot)
        reads = [move.slot for move in self.io.moves if not move.write]
        assert len(reads) == len(set(reads))

    @invariant()
    def whoever_waits_waits_for_what_is_under_way(self) -> None:
        requests = self.view.requests
        requests.check_integrity()
        awaited = {block_id for name in requests for block_id in requests[name].awaits}
        coming = self.view.sources.coming
        assert awaited <= coming and len(coming) == len(self.disk.coming)

    @invariant()
    def what_can_be_served_is_not_known_as_bad(self) -> None:
        ready = {node.slot for node in self.tiers.host.tree.nodes() if node.ready}
        assert not ready & self.tiers.host.damaged_slots

    def teardown(self) -> None:
        SEEN["loaded"] += self.disk.counters["disk_loaded_blocks"]
        SEEN["saved"] += self.disk.counters["disk_saved_blocks"]
        self.disk.drain()
        super().teardown()
