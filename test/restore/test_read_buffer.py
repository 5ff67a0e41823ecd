"""The read buffer: chunks of waiting requests on the device before their turn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.queue.requests import Waiting
from sglang_hc.restore.path import Restoration, RestorePath
from sglang_hc.restore.read_buffer import PIECES_PER_PASS, ReadBuffer
from sglang_hc.restore.restore_pass import RestorePass
from sglang_hc.restore.staging import FEW_RUNS, StagingRing
from sglang_hc.tree.block_tree import Moved
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.examples import examples
from support.restores import FRAME, expected, host_with, path_tokens
from support.streams import COPIES, SimulatedCopyStream, StreamDevice, StreamPool
from support.tiers import CPU

PLAN = LayerPlan(0, 3, 2)
LENGTHS = (300, 150, 200)
LAYERS = range(PLAN.num_layers)


class Bench:
    """Three conversations in a host tier, a late device, a read buffer of `frames` frames."""

    def __init__(self, frames: int = 40, seed: int = 0, bias: float = 0.5) -> None:
        self.host, self.pool = host_with(PLAN, LENGTHS, slots=16)
        self.device = StreamDevice(seed, bias)
        self.copy_stream = SimulatedCopyStream(self.device)
        self.target = StreamPool(self.device, 1000, PLAN.num_layers)
        self.ring = StagingRing(2, FRAME, CPU, self.copy_stream)
        self.frames = StagingRing(frames, FRAME, CPU, self.copy_stream)
        self.early = ReadBuffer(self.host, self.pool, self.frames)
        self.waiting: dict[str, Waiting] = {}
        self.looked = 0

    def wait(self, path: int, on_device: int = 0, length: int | None = None) -> str:
        rid = f"r{len(self.waiting)}"
        tokens = path_tokens(path, length or LENGTHS[path])
        self.waiting[rid] = Waiting(Prefix(None, pack_tokens(tokens)), lambda: on_device)
        return rid

    def look(self, *rids: str, passes: int = 20) -> None:
        for _ in range(passes):
            self.early.on_schedule_step(rids, self._waiting_of)
            self.early.poll()
            self.early.check_integrity()

    def _waiting_of(self, rid: str) -> Waiting:
        self.looked += 1
        return self.waiting[rid]

    def restoration(self, path: int, start: int, stop: int, at: int = 0) -> Restoration:
        nodes = self.host.tree.match(Prefix(None, pack_tokens(path_tokens(path, stop)))).nodes
        return Restoration(nodes, start, stop, torch.arange(at, at + stop - start))

    def restore(self, restorations: Sequence[Restoration], beside: bool = False) -> None:
        side = self.copy_stream.side_stream() if beside else None
        path = RestorePath(
            self.pool, self.target, self.ring, read_buffer=self.early, side_stream=side
        )
        restore = RestorePass(path, restorations)
        for layer in LAYERS:
            restore.wait(layer)
            self.target.attend(layer)
        restore.finish()

    def check(self, restorations: Sequence[Restoration]) -> None:
        """What attention saw is what the host tier holds."""
        self.device.run()
        for layer, parts in self.target.seen:
            for restoration in restorations:
                wanted = expected(self.pool, restoration, layer)
                for part, rows in zip(parts, wanted, strict=True):
                    assert torch.equal(part[restoration.device_slots], rows)
        self.target.seen.clear()

    @property
    def copies(self) -> int:
        return self.early.counters["early_layer_tokens"]

    @property
    def used(self) -> int:
        return self.early.counters["early_used_layer_tokens"]


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 10**6), bias=st.sampled_from([0.05, 0.5, 0.95]),
    frames=st.integers(1, 40), passes=st.integers(1, 12),
    queue=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 140), st.integers(0, 140)), min_size=1,
        max_size=3, unique_by=lambda item: item[0],
    ),
    rounds=st.integers(1, 3), beside=st.booleans(),
)  # fmt: skip
def test_attention_sees_what_the_host_holds_whatever_was_copied_early(
    seed: int, bias: float, frames: int, passes: int, queue: list[tuple[int, int, int]],
    rounds: int, beside: bool,
) -> None:  # fmt: skip
    """`queue`: (path, tokens on the device when it is looked at, and when it is restored).

    In later rounds frames are filled that the computation of the last one may still read.
    """
    bench = Bench(frames, seed, bias)
    for _ in range(rounds):
        rids = [bench.wait(path, then) for path, then, _ in queue]
        bench.look(*rids, passes=passes)
        restorations, at = [], 0
        for path, _, now in queue:
            restorations.append(bench.restoration(path, now, LENGTHS[path], at))
            at += LENGTHS[path] - now
        bench.restore(restorations, beside)
        bench.look()  # the requests have left the queue
        assert bench.early.held == 0
    bench.check(restorations)
    bench.early.clear()
    assert all(node.pins == 0 for node in bench.host.tree.nodes())


def test_what_was_copied_early_is_not_copied_again() -> None:
    bench = Bench()
    bench.look(bench.wait(0))
    bench.device.run()
    restoration = bench.restoration(0, 0, 300)
    before = bench.device.queues[COPIES].submitted
    bench.restore([restoration])
    assert bench.device.queues[COPIES].submitted == before
    assert bench.used == 300 * len(LAYERS)
    bench.check([restoration])


def test_copies_run_while_the_device_computes_something_else() -> None:
    bench = Bench()
    bench.device.submit(0, None, after=(COPIES, 10**9))  # a batch that does not end
    bench.look(bench.wait(1))
    assert bench.copies and bench.device.run_only(COPIES)


def test_the_first_layers_of_the_first_request_come_first() -> None:
    """Frames for two pieces: one layer of the first request as hidden states, not of both."""
    bench = Bench(frames=2)
    first, second = bench.wait(1), bench.wait(2)
    bench.look(first, second)
    assert bench.copies == 3 * BLOCK_TOKENS
    bench.restore([bench.restoration(2, 0, 200)])
    assert bench.used == 0
    bench.target.seen.clear()
    bench.restore([bench.restoration(1, 0, 150)])
    assert bench.used == 150


def test_a_pass_enqueues_a_bounded_number_of_copies() -> None:
    bench = Bench()
    bench.look(bench.wait(0), passes=1)
    assert bench.copies <= PIECES_PER_PASS * 2 * BLOCK_TOKENS
    assert len(bench.frames.free) == 40 - PIECES_PER_PASS


def test_a_request_is_looked_up_once() -> None:
    """Matching a long prompt in every pass would cost more than the copies bring."""
    bench = Bench()
    bench.look(bench.wait(0), bench.wait(1))
    assert bench.looked == 2


def test_blocks_are_pinned_while_their_copies_are_under_way_and_no_longer() -> None:
    bench = Bench()
    rid = bench.wait(1)
    bench.look(rid, passes=1)
    nodes = bench.host.tree.match(bench.waiting[rid].prompt).nodes
    assert all(node.pins for node in nodes)
    bench.device.run()
    bench.early.poll()
    assert not any(node.pins for node in nodes)


def test_evicted_meanwhile_is_still_right_and_another_path_does_not_find_it() -> None:
    bench = Bench()
    bench.look(bench.wait(1))
    restoration = bench.restoration(1, 0, 150)
    wanted = [expected(bench.pool, restoration, layer) for layer in LAYERS]
    bench.device.run()
    bench.early.poll()
    bench.host.evict(3, 0.0, is_protected=lambda node: node not in restoration.nodes)
    assert restoration.nodes[0].slot == -1
    torch.from_numpy(bench.pool.bytes).zero_()  # other requests write to the slots
    bench.restore([bench.restoration(0, 0, 100, at=500)])
    assert bench.used == 0
    early = [list(bench.early.take(layer, restoration.nodes, 0, 150)) for layer in LAYERS]
    for layer, pieces in enumerate(early):
        if layer >= PLAN.hidden:
            for number, rows in enumerate(wanted[layer]):
                assert torch.equal(torch.cat([p.parts[number] for p in pieces]), rows)
        assert sum(p.stop - p.start for p in pieces) == 150


def test_a_changed_tail_is_not_found_and_the_blocks_before_it_are() -> None:
    bench = Bench()
    """Layers of hidden states have their blocks in pairs here, the tail in the second pair."""
    bench.look(bench.wait(2))
    nodes = bench.host.tree.match(Prefix(None, pack_tokens(path_tokens(2, 200)))).nodes
    longer = pack_tokens(path_tokens(2, 230)[192:])
    slot = bench.host.stage(0.0)
    assert slot is not None
    bench.host.publish(nodes[2], longer, slot, 0.0).node.ready = True
    restoration = bench.restoration(2, 0, 230)
    bench.restore([restoration])
    assert bench.used == 192 * len(LAYERS)
    bench.check([restoration])


def test_a_block_that_was_moved_is_not_found_for_one_that_was_computed_at_its_place() -> None:
    """Both have one identity. Its K would have been served at the positions where it was computed
    before a cut."""
    bench = Bench()
    restoration = bench.restoration(1, 0, 150)
    block = restoration.nodes[1]
    block.moved = Moved(b"origin", 64)
    bench.look(bench.wait(1))
    block.moved = None  # evicted, and computed again
    bench.restore([restoration])
    assert bench.used == (150 - BLOCK_TOKENS) * len(LAYERS)
    bench.check([restoration])


def test_a_request_that_leaves_gives_its_frames_to_the_next() -> None:
    bench = Bench(frames=4)
    first, second = bench.wait(0), bench.wait(1)
    bench.look(first, second)
    assert not bench.frames.has_free
    bench.look(second)
    restoration = bench.restoration(1, 0, 150)
    bench.restore([restoration])
    assert bench.used > 0
    bench.check([restoration])


def test_blocks_that_are_not_in_place_are_left_alone() -> None:
    bench = Bench()
    rid = bench.wait(1)
    nodes = bench.host.tree.match(bench.waiting[rid].prompt).nodes
    nodes[1].ready = False
    bench.look(rid)
    assert bench.copies == BLOCK_TOKENS * len(LAYERS)


def test_what_is_on_its_way_from_disk_is_waited_for() -> None:
    bench = Bench()
    fetching = {"r0"}
    bench.early = ReadBuffer(bench.host, bench.pool, bench.frames, fetching=fetching.__contains__)
    rid = bench.wait(1)
    bench.look(rid)
    assert bench.copies == 0
    fetching.clear()
    bench.look(rid)
    assert bench.copies > 0


def test_scattered_blocks_are_copied_in_one_call() -> None:
    """As in a restoration: the thread's time does not grow with the number of blocks."""
    bench = Bench()
    nodes = bench.host.tree.match(Prefix(None, pack_tokens(path_tokens(0, 300)))).nodes
    slots = sorted(node.slot for node in nodes)
    for node, slot in zip(nodes, [slots[i] for i in (4, 2, 0, 3, 1)], strict=True):
        node.slot = slot
    assert len(slots) > FEW_RUNS
    bench.frames = StagingRing(10, 8 * FRAME, CPU, bench.copy_stream)
    bench.early = ReadBuffer(bench.host, bench.pool, bench.frames)
    bench.look(bench.wait(0))
    plan = bench.pool.layout.plan
    assert bench.copy_stream.calls == plan.hidden + 2 * plan.kv
    restoration = bench.restoration(0, 0, 300)
    bench.restore([restoration])
    assert bench.used == 300 * len(LAYERS)
    bench.check([restoration])


@pytest.mark.parametrize("on_device", [150, 149, 128])
def test_what_the_device_has_is_not_copied(on_device: int) -> None:
    bench = Bench()
    bench.look(bench.wait(1, on_device))
    blocks = 0 if on_device == 150 else 1
    assert bench.copies == blocks * BLOCK_TOKENS * len(LAYERS)


def test_clearing_waits_for_copies_and_forgets_everything() -> None:
    bench = Bench()
    rid = bench.wait(0)
    bench.look(rid, passes=1)
    bench.early.clear()
    assert bench.early.held == 0 and len(bench.frames.free) == 40
    assert all(node.pins == 0 for node in bench.host.tree.nodes())
    bench.look(rid)  # still waiting: copied anew
    assert bench.early.held > 0
