"""Restoration through the ring of frames, on a device that computes and copies when it likes."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.device.copy_stream import HostCopyStream
from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.restore.path import Restoration, RestorePath
from sglang_hc.restore.restore_pass import SIDE_LAYERS, LayerGate, RestorePass
from sglang_hc.restore.staging import (
    FEW_RUNS,
    HostSpan,
    Piece,
    Run,
    StagingRing,
    copy_piece,
    cut,
)
from sglang_hc.store.host_pool import HostPool
from support.examples import examples
from support.restores import FRAME, expected, filled_pool, nodes_in
from support.streams import COMPUTE, COPIES, SIDE, SimulatedCopyStream, StreamDevice, StreamPool
from support.tiers import CPU, project

PLAN = LayerPlan(0, 3, 2)
SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 200)), min_size=1, max_size=3)


@settings(max_examples=examples(60), deadline=None)
@given(
    spans=SPANS, order=st.permutations(range(12)), frames=st.integers(1, 4),
    seed=st.integers(0, 10**6), bias=st.sampled_from([0.05, 0.5, 0.95]), twice=st.booleans(),
    beside=st.booleans(), asked=st.lists(st.integers(0, 4), max_size=6), ends=st.integers(0, 2),
)  # fmt: skip
def test_attention_sees_what_the_host_holds_in_every_order_of_events(
    spans: list[tuple[int, int]], order: list[int], frames: int, seed: int, bias: float,
    twice: bool, beside: bool, asked: list[int], ends: int,
) -> None:  # fmt: skip
    """Also when a second pass takes over the frames while the first one's work is still queued,
    and in whatever order layers are waited for.

    ends: how often a pass is finished, if not by the next one.
    """
    plan, pool = PLAN, filled_pool(PLAN, 12)
    device = StreamDevice(seed, bias)
    copy_stream = SimulatedCopyStream(device)
    ring = StagingRing(frames, FRAME, CPU, copy_stream)
    target = StreamPool(device, 2 * sum(count for _, count in spans), plan.num_layers)
    first = 0
    passes: list[list[Restoration]] = []
    for _ in range(2 if twice else 1):
        restorations = []
        for start, count in spans:
            slots = torch.arange(first, first + count)
            restorations.append(Restoration(nodes_in(order), start, start + count, slots))
            first += count
        passes.append(restorations)
    for restorations in passes:
        side = copy_stream.side_stream() if beside else None
        restore = RestorePass(RestorePath(pool, target, ring, side_stream=side), restorations)
        for layer in asked:
            restore.wait(layer)
            target.attend(layer)
        for _ in range(ends):
            restore.finish()
    if not ends:
        restore.finish()
    device.run()
    assert [layer for layer, _ in target.seen] == asked * len(passes)
    for number, (layer, parts) in enumerate(target.seen):
        for restoration in passes[number // len(asked)]:
            wanted = expected(pool, restoration, layer)
            for part, rows in zip(parts, wanted, strict=True):
                assert torch.equal(part[restoration.device_slots], rows)
    for restoration, layer in itertools.product(itertools.chain(*passes), range(plan.num_layers)):
        wanted = expected(pool, restoration, layer)
        for part, rows in zip(target.rows(layer), wanted, strict=True):
            assert torch.equal(part[restoration.device_slots], rows)


class Bench(NamedTuple):
    """What a pass works on: `count` tokens that go to slots 0, 1, ..."""

    path: RestorePath
    target: StreamPool
    device: StreamDevice
    pool: HostPool
    restoration: Restoration

    def begin(self) -> RestorePass:
        return RestorePass(self.path, [self.restoration])


def bench_of(
    count: int, plan: LayerPlan, *, frames: int = 2, seed: int = 1, bias: float = 0.5,
    beside: bool = False,
) -> Bench:  # fmt: skip
    pool = filled_pool(plan, -(-count // BLOCK_TOKENS))
    device = StreamDevice(seed, bias)
    copy_stream = SimulatedCopyStream(device)
    target = StreamPool(device, count, plan.num_layers)
    restoration = Restoration(
        nodes_in(range(pool.num_slots)), 0, count, torch.arange(count), plan.recompute
    )
    side = copy_stream.side_stream() if beside else None
    ring = StagingRing(frames, FRAME, CPU, copy_stream)
    path = RestorePath(pool, target, ring, side_stream=side)
    return Bench(path, target, device, pool, restoration)


def test_copies_of_the_next_pass_do_not_wait_for_other_computation() -> None:
    """A batch that runs when a restoration is queued would hold its copies back."""
    bench = bench_of(64, PLAN, frames=8)
    bench.begin().finish()
    bench.device.run()
    bench.device.submit(COMPUTE, None, after=(COPIES, 10**9))  # a computation that does not end
    bench.begin()
    assert bench.device.run_only(COPIES)


@settings(max_examples=examples(200), deadline=None)
@given(
    slots=st.lists(st.integers(0, 8), min_size=1, max_size=12),
    start=st.integers(0, BLOCK_TOKENS - 1), limit=st.integers(BLOCK_TOKENS, 300),
    tail=st.integers(1, BLOCK_TOKENS),
)  # fmt: skip
def test_pieces_cover_the_spans_in_order(
    slots: list[int], start: int, limit: int, tail: int
) -> None:
    spans = [HostSpan(slot, 0, BLOCK_TOKENS) for slot in slots]
    spans[0] = HostSpan(slots[0], start, BLOCK_TOKENS - start)
    spans.append(HostSpan(9, 0, tail))
    pieces = list(cut(spans, limit))
    wanted = [(slot, row + i) for slot, row, rows in spans for i in range(rows)]
    rows = [
        (run.slot + s, run.row + i)
        for piece in pieces for run in piece.runs
        for s in range(run.slots) for i in range(run.rows)
    ]  # fmt: skip
    assert rows == wanted
    at = 0
    for piece in pieces:
        assert piece.first == at and 0 < piece.rows <= limit
        assert piece.rows == sum(run.slots * run.rows for run in piece.runs)
        at += piece.rows


def test_adjacent_slots_travel_as_one_copy() -> None:
    spans = [HostSpan(slot, 0, 64) for slot in (3, 4, 5, 7, 8)] + [HostSpan(9, 0, 10)]
    (piece,) = cut(spans, 1000)
    assert piece == Piece(0, 330, (Run(3, 3, 0, 64), Run(7, 2, 0, 64), Run(9, 1, 0, 10)))


@settings(max_examples=examples(100), deadline=None)
@given(
    slots=st.lists(st.integers(0, 8), min_size=1, max_size=12),
    start=st.integers(0, BLOCK_TOKENS - 1), tail=st.integers(1, BLOCK_TOKENS),
)  # fmt: skip
def test_a_piece_as_ranges_is_the_same_rows(slots: list[int], start: int, tail: int) -> None:
    """The slots of its runs, one range each, at the addresses that the host pool gives them."""
    spans = [HostSpan(slots[0], start, BLOCK_TOKENS - start)]
    spans += [HostSpan(slot, 0, BLOCK_TOKENS) for slot in slots[1:]] + [HostSpan(9, 0, tail)]
    source = torch.randint(0, 256, (10, 3, BLOCK_TOKENS, 5), dtype=torch.uint8)[:, 1]
    (piece,) = cut(spans, 2000)
    target = torch.zeros((piece.rows, 5), dtype=torch.uint8)
    ranges = piece.ranges(source.stride(0), 5)
    assert len(ranges.sizes) == len(spans)
    HostCopyStream().copy_ranges(target, source, ranges)
    assert torch.equal(target, torch.cat([source[s, row : row + n] for s, row, n in spans]))


@pytest.mark.parametrize(("gaps", "calls"), [(FEW_RUNS - 1, FEW_RUNS), (FEW_RUNS, 1)])
def test_many_runs_are_one_batch_and_few_are_a_copy_each(gaps: int, calls: int) -> None:
    slots = [2 * n for n in range(gaps)] + [20, 21, 22]
    (piece,) = cut([HostSpan(slot, 0, BLOCK_TOKENS) for slot in slots], 2000)
    source = torch.randint(0, 256, (23, 2, BLOCK_TOKENS, 4), dtype=torch.uint8)[:, 1]
    wanted = source[slots].reshape(-1, 4)
    for batches in (True, False):
        device = StreamDevice(0)
        copy_stream = SimulatedCopyStream(device)
        copy_stream.batches = batches
        target = torch.zeros((piece.rows, 4), dtype=torch.uint8)
        copy_piece(copy_stream, piece, source, target)
        device.run()
        assert torch.equal(target, wanted)
        assert copy_stream.calls == (calls if batches else len(piece.runs))


def test_a_limit_below_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="one block"):
        list(cut([HostSpan(0, 0, 64)], 63))


def test_memory_does_not_grow_with_layers_or_tokens() -> None:
    """Frames are taken and given back; no other device memory holds rows."""
    bench = bench_of(500, LayerPlan(0, 20, 10))
    restore = bench.begin()
    for layer in range(30):
        restore.wait(layer)
        bench.device.run()
    frames = {frame.untyped_storage().data_ptr() for frame in bench.path.staging.free}
    assert len(frames) == 2 and bench.path.copy_stream.targets == frames


def test_the_gate_finishes_the_pass_of_the_running_batch() -> None:
    bench = bench_of(130, PLAN)
    gate = LayerGate()
    index = gate.produce(bench.begin())
    gate.wait_until(0)  # a batch that waits for nothing
    assert gate.finish() == ()
    gate.set_consumer(index)
    gate.wait_until(2)
    assert gate.finish() == (bench.restoration,)
    gate.set_consumer(index)  # the index sticks to the batch
    gate.wait_until(0)
    assert gate.finish() == ()
    bench.device.run()
    wanted = expected(bench.pool, bench.restoration, 4)
    for got, rows in zip(bench.target.rows(4), wanted, strict=True):
        assert torch.equal(got, rows)


def test_a_side_gets_a_few_layers_at_once_and_the_rest_as_layers_are_waited_for() -> None:
    """The launch of the batch waits for this thread, so what is not needed yet comes later."""
    layers = SIDE_LAYERS + 3
    bench = bench_of(128, LayerPlan(0, layers, 0), beside=True)
    written: list[int] = []
    write = bench.target.write_hidden

    def note(layer: int, *rest: torch.Tensor) -> None:
        written.append(layer)
        assert bench.device.current == SIDE
        write(layer, *rest)

    bench.target.write_hidden = note  # type: ignore[method-assign]
    restore = bench.begin()
    assert written == list(range(SIDE_LAYERS))
    restore.wait(0)
    assert written == list(range(SIDE_LAYERS))
    restore.wait(1)
    assert written == list(range(SIDE_LAYERS + 1))
    restore.finish()
    assert written == list(range(layers))


class SlowRecomputer:
    """Several passes; before each but the first the thread waits, and the copies go on."""

    def __init__(self, device: StreamDevice, passes: int) -> None:
        self.device, self.passes = device, passes
        self.copied: list[int] = []

    def run(self, restoration: Restoration, between: Callable[[], None]) -> None:
        for _ in range(self.passes - 1):
            self.device.run()
            between()
            self.copied.append(self.device.queues[COPIES].submitted)


def test_copies_go_on_between_the_passes_of_a_recomputation() -> None:
    """They would stop with the frames full, and the link stand still while the thread waits."""
    bench = bench_of(128, LayerPlan(1, 6, 0), seed=0)
    recomputer, copy_stream = SlowRecomputer(bench.device, 4), bench.path.copy_stream
    restore = RestorePass(replace(bench.path, recomputer=recomputer), [bench.restoration])
    assert copy_stream.calls == 2
    restore.recompute()
    first, second, third = recomputer.copied
    assert first < second <= third and copy_stream.calls == 6
    restore.finish()
    bench.device.run()
    for layer in range(1, 7):
        states = torch.from_numpy(bench.pool.hidden)[:, layer - 1].reshape(128, -1)
        wanted = project(layer, states, torch.arange(128))
        for got, rows in zip(bench.target.rows(layer), wanted, strict=True):
            assert torch.equal(got, rows)


def test_frames_are_gone_when_the_last_pass_over_them_is() -> None:
    """Without a run of the garbage collector, which may not come for minutes."""
    bench = bench_of(130, PLAN)
    bench.begin().finish()
    bench.device.run()
    frames = [weakref.ref(frame) for frame in bench.path.staging.free]
    assert len(frames) == 2
    gc.disable()
    try:
        del bench
        assert [frame() for frame in frames] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(20))
def test_beside_the_compute_stream_slots_are_not_written_before_their_last_reader(
    seed: int,
) -> None:
    """The slots were another request's; the batch that runs still attends to them."""
    bench = bench_of(128, LayerPlan(0, 2, 1), seed=seed, bias=0.05, beside=True)
    for layer in range(3):
        bench.target.attend(layer)
    bench.begin().finish()
    for layer in range(3):
        bench.target.attend(layer)
    bench.device.run()
    before, after = bench.target.seen[:3], bench.target.seen[3:]
    assert not any(part.any() for _, parts in before for part in parts)
    for layer, parts in after:
        wanted = expected(bench.pool, bench.restoration, layer)
        for part, rows in zip(parts, wanted, strict=True):
            assert torch.equal(part, rows)
