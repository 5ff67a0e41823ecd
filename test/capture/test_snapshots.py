"""Rows on their way to slots, with an executor and a device that are late."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_hc.capture.snapshots import Snapshots
from sglang_hc.capture.taps import TapBuffer
from sglang_hc.device.copy_stream import HostCopyStream
from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.store.executor import RowSpan
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.scatter_queue import ScatterQueue
from support.host import host_tier
from support.streams import BACK, COMPUTE, COPIES, SimulatedCopyStream, StreamDevice
from support.tiers import CPU, StepExecutor

LAYERS, WIDTH = 2, 8
LAYOUT = BlockLayout(LayerPlan(0, LAYERS, 0), StateShape(LAYERS, WIDTH, (8, 8), "uint8"))


class Bench:
    """Snapshots of `buffers` x `rows` rows over a late device, or over the host alone."""

    def __init__(
        self, rows: int = 4, buffers: int = 2, device: StreamDevice | None = None,
        copy_stream: SimulatedCopyStream | None = None,
    ) -> None:  # fmt: skip
        self.pool = HostPool(LAYOUT, 8)
        self.buffers = list(np.zeros((buffers, LAYERS, rows, WIDTH), dtype=np.uint8))
        self.executor = StepExecutor(self.pool, self.buffers)
        self.host = host_tier(8)
        self.scatters = ScatterQueue(self.executor, self.host)
        used = copy_stream or (SimulatedCopyStream(device) if device else HostCopyStream())
        size = buffers * rows * LAYERS * WIDTH
        staging = torch.empty(size, dtype=torch.uint8) if device or copy_stream else None
        self.snapshots = Snapshots(self.buffers, staging, used, self.scatters)

    def add(self, value: int, rows: int, slot: int, slot_row: int = 0) -> None:
        """`rows` rows of value, value + 1, ... to a slot."""

        def fill(targets: list[torch.Tensor], at: int, first: int, count: int) -> None:
            drawn = torch.arange(value + first, value + first + count, dtype=torch.uint8)
            targets[0][:, at : at + count] = drawn[None, :, None]

        self.snapshots.add(0, rows, fill, [RowSpan(0, slot, slot_row, rows)])

    def row(self, slot: int, row: int) -> int:
        values = set(self.pool.hidden[slot, :, row].flatten().tolist())
        assert len(values) == 1, values
        return values.pop()


def test_rows_of_several_passes_share_a_copy_and_a_pass_may_span_buffers() -> None:
    bench = Bench()
    bench.add(10, 3, slot=0)
    assert len(bench.scatters) == 0, "nothing is worth a copy yet"
    bench.add(20, 4, slot=1)  # one row fills the first buffer, three go to the second
    bench.snapshots.flush()
    bench.scatters.drain()
    assert [bench.row(0, i) for i in range(3)] == [10, 11, 12]
    assert [bench.row(1, i) for i in range(4)] == [20, 21, 22, 23]


def test_room_shrinks_with_what_is_on_its_way_and_comes_back_when_it_is_there() -> None:
    bench = Bench()
    assert bench.snapshots.room == 8
    bench.add(1, 5, slot=0)
    assert bench.snapshots.room == 3
    bench.add(1, 3, slot=1)
    assert bench.snapshots.room == 0
    bench.executor.step()
    assert bench.snapshots.room == 0, "completions are taken in by poll alone"
    bench.scatters.poll()
    assert bench.snapshots.room == 4
    bench.scatters.drain()
    assert bench.snapshots.room == 8


def test_flushing_nothing_sends_nothing() -> None:
    bench = Bench()
    bench.snapshots.flush()
    assert bench.scatters.last().done and not len(bench.scatters)
    bench.add(1, 4, slot=0)
    bench.snapshots.flush()
    sent = bench.scatters.last()
    bench.snapshots.flush()
    assert bench.scatters.last() is sent and not sent.done
    bench.scatters.drain()
    assert sent.done


def test_a_snapshot_that_waits_for_the_forward_pass_holds_no_restoration_back() -> None:
    """Each direction has a stream of its own: the copies of a restoration that was asked for after
    the snapshot are over while the pass that fills the snapshot still runs."""
    device = StreamDevice(0)
    copy_stream = SimulatedCopyStream(device)
    bench = Bench(copy_stream=copy_stream.opposite())
    device.submit(COMPUTE, None, after=(COMPUTE, 10**9))  # a pass that does not end
    bench.add(1, 4, slot=0)
    device.run_only(BACK)
    source, target = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    copy_stream.copy(target, source)
    event = copy_stream.record()
    assert device.run_only(COPIES) and event.done() and bool(target.all())
    assert not device.run_only(BACK)
    bench.scatters.poll()
    bench.executor.step()
    assert len(bench.scatters) == 1


@pytest.mark.parametrize("seed", range(10))
def test_the_next_step_never_waits_for_what_the_last_one_tapped(seed: int) -> None:
    """Steps overwrite the same tap buffer while no copy to the host moves at all, as in a replayed
    decode graph. All are computed; when the copies move, every step's own rows are scattered."""
    steps, device = 6, StreamDevice(seed)
    bench = Bench(rows=2, buffers=4, device=device)
    taps = TapBuffer(LAYERS, 1, WIDTH, torch.uint8, CPU)

    def fill(targets: list[torch.Tensor], at: int, first: int, count: int) -> None:
        source = taps.bytes(1)  # late, as everything on the compute stream
        device.submit(COMPUTE, lambda: targets[0][:, at : at + count].copy_(source))

    for step in range(steps):
        device.submit(COMPUTE, lambda n=step: taps.states.fill_(n + 1))
        bench.snapshots.add(0, 1, fill, [RowSpan(0, step, 0, 1)])
        assert device.run_only(COMPUTE), "a step waits for a copy"
    assert device.queues[COPIES].over == 0
    assert bench.snapshots.room == 2, "what finds no room is refused by the caller, not waited for"
    device.run()
    bench.snapshots.flush()
    device.run()
    bench.scatters.drain()
    assert [bench.row(step, 0) for step in range(steps)] == [1, 2, 3, 4, 5, 6]
