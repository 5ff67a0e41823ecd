"""Restorations that follow the reads of layers: whatever comes, comes late, or never."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.queue.requests import Waiting
from sglang_hc.restore.arrival import LateLayer, LayerArrival
from sglang_hc.restore.path import Restoration, RestorePath
from sglang_hc.restore.read_buffer import ReadBuffer
from sglang_hc.restore.restore_pass import RestorePass
from sglang_hc.restore.staging import StagingRing
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.layer_reads import LayerReads
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.identity import Prefix, pack_tokens
from sglang_hc.tree.promotions import Promotion
from support.examples import examples
from support.restore_bench import LENGTH, Bench, check, token
from support.restores import FRAME, expected, host_with, path_tokens
from support.streams import COMPUTE, COPIES, SIDE, SimulatedCopyStream, StreamDevice, StreamPool
from support.tiers import CPU, PARTS

GARBAGE = 0xEE


class Disk:
    """Reads some blocks of a path layer by layer; each poll brings the next piece, which takes a
    second, and sooner or later there may be a failure, or no more of them."""

    def __init__(
        self,
        pool: HostPool,
        nodes: Sequence[BlockNode],
        group: int,
        order: Sequence[int] | None = None,
    ) -> None:
        """nodes: of the blocks, which are in the pool. group: layers that are read together. order:
        in which the pieces come; None: as they were asked for."""
        self.now, self.fails_at, self.stops_at, self.polls_per_piece = 0.0, -1, -1, 1
        self._pool = pool
        stored = self._pool.layout.stored_layers
        groups = [stored[first : first + group] for first in range(0, len(stored), group)]
        promotions = [Promotion(node.block_id, node.tokens, None, node.slot, 0.0) for node in nodes]
        self.reads = LayerReads(promotions, groups)
        self._content = {node.slot: self._pool.slot(node.slot).copy() for node in nodes}
        for slot in self._content:
            self._pool.slot(slot)[:] = GARBAGE
        pieces = list(self.reads.pieces())
        if order is not None:
            pieces = [pieces[number] for number in order]
        self._pieces: Iterator[tuple[Promotion, int]] = iter(pieces)
        self._count = self._polls = 0

    def poll(self) -> None:
        self.now += 1.0
        self._polls += 1
        if self._count == self.stops_at or self._polls % self.polls_per_piece:
            return
        piece = next(self._pieces, None)
        if piece is not None:
            self._come(*piece, fails=self._count == self.fails_at)
            self._count += 1

    def _come(self, promotion: Promotion, group: int, *, fails: bool) -> None:
        if not fails:
            for layer in self.reads.groups[group]:
                offset, length = self._pool.layout.chunk(layer)
                place = slice(offset, offset + length)
                self._pool.slot(promotion.slot)[place] = self._content[promotion.slot][place]
        outcome = Outcome.DAMAGED if fails else Outcome.OK
        ended = self.reads.came(promotion, group, outcome)
        if ended is not None:  # what the disk tier does
            promotion.here, promotion.lost = True, ended is not Outcome.OK

    def pause(self, seconds: float) -> None:
        self.now += seconds


def disk_of(
    bench: Bench, first: int, end: int, group: int, order: Sequence[int] | None = None
) -> Disk:
    """Reads blocks [first, end) of the first path."""
    return Disk(bench.tiers.restorer.path.pool, bench.nodes[0][first:end], group, order)


def queue(bench: Bench, disk: Disk, start: int, stop: int, patience: float) -> None:
    arrival = LayerArrival(disk.reads, disk.poll, patience, lambda: disk.now, disk.pause)
    nodes, slots = bench.nodes[0], bench.slots[0]
    restoration = Restoration(
        nodes, start, stop, slots[start:stop], 0, slots[:start], arrival=arrival
    )
    bench.tiers.restorer.queue(restoration, bench.release)


def run_pass(bench: Bench, *reach: int) -> int:
    """A forward pass that is run again when it met a late layer. Returns how often that was."""
    restorer, again = bench.tiers.restorer, 0
    restorer.gate.set_consumer(restorer.start())
    while True:
        try:
            for layer in range(bench.plan.num_layers):
                restorer.gate.wait_until(layer)
                for path, stop in enumerate(reach):
                    tokens = [token(path, position) for position in range(stop)]
                    check(bench.pool, layer, tokens, bench.slots[path, :stop])
            break
        except LateLayer:
            again += 1
            restorer.start_again(restorer.gate.current)
    bench.tiers.after_pass(())
    late = restorer.counters["late_layers"]
    assert again <= late <= 1, "what waits for nothing is not late"
    return late


counts = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any)


@settings(deadline=None, max_examples=examples(150))
@given(data=st.data(), counts=counts)
def test_every_row_is_right_whatever_comes(data: st.DataObject, counts: tuple[int, int]) -> None:
    bench = Bench(LayerPlan(0, *counts))
    start = data.draw(st.sampled_from([0, BLOCK_TOKENS, 100]))
    stop = data.draw(st.integers(start + 1, LENGTH))
    first, end = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
    low = data.draw(st.integers(first, end - 1))
    high = data.draw(st.integers(low + 1, end))
    group = data.draw(st.integers(1, 3))
    pieces = -(-sum(counts) // group) * (high - low)
    order = data.draw(st.one_of(st.none(), st.permutations(range(pieces))))
    disk = disk_of(bench, low, high, group, order)
    disk.fails_at = data.draw(st.integers(-1, pieces - 1))
    disk.stops_at = data.draw(st.integers(-1, pieces - 1))
    bench.valid(0, start)
    queue(bench, disk, start, stop, patience=data.draw(st.floats(0, 2 * pieces + 5)))
    for _ in range(data.draw(st.integers(0, 2))):
        disk.poll()
    restorer, layers = bench.tiers.restorer, data.draw(st.integers(0, sum(counts)))
    if data.draw(st.booleans()):
        restorer.path = replace(restorer.path, side_stream=nullcontext)
    if layers:  # another request of the batch, some of whose layers are recomputed
        bench.queue(1, 0, LENGTH, layers)
    reach = stop, LENGTH if layers else 0
    late = run_pass(bench, *reach)
    bench.check(reach)
    assert bench.released == 1 + (layers > 0)
    ours = bench.recomputer.ran - (1 + late) * layers * LENGTH
    if late:
        whole = [disk.reads.has_all(bench.nodes[0][block].slot) for block in range(low, high)]
        assert ours <= (stop - start) * bench.plan.num_layers
        assert not all(whole), "nothing is recomputed that is here"
    else:
        assert ours == 0 and not disk.reads.is_lost
    staging = restorer.path.staging
    assert len(staging.free) == staging.bytes // staging.frame_bytes, "all frames are free again"


@pytest.mark.parametrize(("patience", "late"), [(6.9, 1), (7.1, 0)])
def test_all_layers_together_are_waited_for_so_long(patience: float, late: int) -> None:
    bench = Bench(LayerPlan(0, 2, 2))
    disk = disk_of(bench, 0, 1, 1)
    disk.polls_per_piece = 2
    disk.pause = lambda seconds: None  # type: ignore[method-assign]
    queue(bench, disk, 0, BLOCK_TOKENS, patience)
    assert run_pass(bench, BLOCK_TOKENS) == late
    bench.check([BLOCK_TOKENS, 0])


def test_a_pass_that_does_not_come_waits_and_recomputes_as_well() -> None:
    for fails_at in (-1, 1):
        bench = Bench(LayerPlan(0, 1, 2))
        disk = disk_of(bench, 0, 2, 1)
        disk.fails_at = fails_at
        queue(bench, disk, 0, 2 * BLOCK_TOKENS, patience=100.0)
        bench.tiers.restorer.run_now()
        bench.check([2 * BLOCK_TOKENS, 0])
        assert bench.released == 1
        assert bool(bench.recomputer.ran) == (fails_at >= 0)


def test_blocks_that_joined_the_tree_stay_until_their_copies_are_over() -> None:
    bench = Bench(LayerPlan(0, 1, 1))
    node = bench.nodes[0][0]
    bench.tiers.restorer.keep([node])
    assert node.pins == 1
    bench.tiers.restorer.path.copy_stream.record().wait()
    bench.tiers.restorer.poll()
    assert node.pins == 0


def test_rows_of_a_layer_are_not_copied_before_it_has_come() -> None:
    bench = Bench(LayerPlan(0, 0, 4))
    disk = disk_of(bench, 0, 1, 1)
    queue(bench, disk, 0, BLOCK_TOKENS, patience=100.0)
    restorer = bench.tiers.restorer
    restorer.gate.set_consumer(restorer.start())
    for layer in range(4):
        restorer.gate.wait_until(layer)
        slots = bench.slots[0, :BLOCK_TOKENS]
        for later in range(layer + 1, 4):
            rows = torch.cat([part[slots] for part in bench.pool.rows(later)], dim=1)
            assert np.all(rows.numpy() == 255), "nothing of a later layer"
    bench.tiers.after_pass(())
    bench.check([BLOCK_TOKENS, 0])


def test_a_layer_that_overtook_the_one_before_it_is_not_waited_for_beside_the_model() -> None:
    """Reads of several threads end in any order. A pass that was to write the layer that was here
    waited for the one before it, when the batch was put together: a late one ended the scheduler.
    """
    bench = Bench(LayerPlan(0, 0, 4))
    restorer = bench.tiers.restorer
    restorer.path = replace(restorer.path, side_stream=nullcontext)
    disk = disk_of(bench, 0, 1, 1, order=[0, 2, 3, 1])
    disk.stops_at = 3
    for _ in range(3):
        disk.poll()
    queue(bench, disk, 0, BLOCK_TOKENS, patience=0.0)
    assert run_pass(bench, BLOCK_TOKENS) == 1
    bench.check([BLOCK_TOKENS, 0])


def test_a_pass_that_starts_again_gives_back_what_was_copied_early_for_another_request() -> None:
    """Chunks behind the late layer had left the read buffer and were in no frame of the ring yet:
    their frames were lost for good."""
    bench = Bench(LayerPlan(0, 1, 3))
    restorer = bench.tiers.restorer
    frames = StagingRing(8, 3 * BLOCK_TOKENS * sum(PARTS), CPU, restorer.path.copy_stream)
    early = ReadBuffer(bench.tiers.host, restorer.path.pool, frames)
    restorer.path = replace(restorer.path, read_buffer=early)
    prompt = Prefix(None, pack_tokens([token(1, position) for position in range(LENGTH)]))
    early.on_schedule_step(["other"], lambda rid: Waiting(prompt, lambda: 0))
    assert early.held == 8 - len(frames.free) == 4
    disk = disk_of(bench, 0, 1, 1)
    disk.fails_at = 1
    queue(bench, disk, 0, BLOCK_TOKENS, patience=100.0)
    bench.queue(1, 0, LENGTH, 0)
    assert run_pass(bench, BLOCK_TOKENS, LENGTH) == 1
    bench.check([BLOCK_TOKENS, LENGTH])
    assert early.counters["early_used_layer_tokens"] == 4 * LENGTH
    assert len(frames.free) == 8


class LateRecomputer:
    """Submits what the model would write, behind what it reads: the loaded layers before it."""

    def __init__(self, device: StreamDevice, pool: StreamPool, truth: list[list[torch.Tensor]]):
        self.restore: RestorePass
        self._device, self._pool, self._truth = device, pool, truth

    def run(self, restoration: Restoration, between: Callable[[], None]) -> None:
        rows, slots = slice(restoration.start, restoration.stop), restoration.device_slots
        for layer in range(restoration.recompute):
            self.restore.wait(layer)
            parts = [part[rows] for part in self._truth[layer]]
            self._device.submit(COMPUTE, partial(self._pool.toy.write_kv, layer, parts, slots))
            between()


@settings(deadline=None, max_examples=examples(100))
@given(data=st.data(), beside=st.booleans(), seed=st.integers(0, 10**6))
def test_a_late_device_never_sees_what_a_pass_that_was_given_up_still_writes(
    data: st.DataObject, beside: bool, seed: int
) -> None:
    """Copies, projections, recomputed layers and attention take any order that fences allow."""
    plan = LayerPlan(0, data.draw(st.integers(0, 4)), 3)
    layers, blocks = plan.num_layers, 4
    host, pool = host_with(plan, [blocks * BLOCK_TOKENS], slots=8)
    tokens = path_tokens(0, blocks * BLOCK_TOKENS)
    nodes = host.tree.match(Prefix(None, pack_tokens(tokens))).nodes
    slots = torch.randperm(300)[: len(tokens)]
    whole = Restoration(nodes, 0, len(tokens), slots, 0, slots[:0])
    truth = [expected(pool, whole, layer) for layer in range(layers)]
    disk = Disk(pool, nodes[data.draw(st.integers(0, blocks - 1)) :], data.draw(st.integers(1, 2)))
    disk.fails_at = data.draw(st.integers(0, 8))
    device = StreamDevice(seed, data.draw(st.sampled_from([0.05, 0.5, 0.95])))
    copy_stream, target = SimulatedCopyStream(device), StreamPool(device, 300, layers)
    recomputer = LateRecomputer(device, target, truth)
    ring = StagingRing(data.draw(st.integers(1, 4)), FRAME, CPU, copy_stream)
    side = copy_stream.side_stream() if beside else None
    path = RestorePath(pool, target, ring, recomputer, side_stream=side)
    arrival = LayerArrival(disk.reads, disk.poll, 100.0, lambda: disk.now, disk.pause)

    def run(restorations: Sequence[Restoration]) -> None:
        recomputer.restore = restore = RestorePass(path, restorations)
        try:
            restore.recompute()
            for layer in range(layers):
                restore.wait(layer)
                target.attend(layer)
            restore.finish()
        except LateLayer:
            restore.abandon()
            raise

    try:
        run([replace(whole, arrival=arrival)])
    except LateLayer:
        device.run_only(data.draw(st.sampled_from([COMPUTE, COPIES, SIDE])))
        run(replace(whole, arrival=arrival).without_waiting(layers))
    device.run()
    assert [layer for layer, _ in target.seen[-layers:]] == list(range(layers))
    for layer, parts in target.seen:
        for part, wanted in zip(parts, truth[layer], strict=True):
            assert torch.equal(part[slots], wanted)
    assert len(ring.free) == ring.bytes // ring.frame_bytes
