"""What is seen of the costs: each resource by itself, nothing that is mixed with other work."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from sglang_hc.device.copy_stream import HostCopyStream
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.policy.cost_correction import CorrectedCosts, Resource
from sglang_hc.restore.cost_watch import (
    PENDING,
    CostWatch,
    HostTimer,
    WatchedGate,
    WatchedPass,
    timer_for,
)
from sglang_hc.restore.path import Restoration, RestorePath
from sglang_hc.restore.staging import StagingRing
from sglang_hc.store.host_pool import HostPool
from sglang_hc.tree.block_tree import BlockNode, Moved
from support.clock import Clock
from support.profiles import cost_model
from support.streams import COMPUTE, SimulatedCopyStream, StreamDevice
from support.tiers import CPU, HIDDEN_BYTES, PARTS, ToyPool

COST = cost_model(host=1e-3, disk=5e-3, project=2e-3, prefill=1e-2)
LAYERS = 4


class Seen(CorrectedCosts):
    """Notes what is observed."""

    def __init__(self) -> None:
        super().__init__(COST)
        self.seen: list[tuple[Resource, float, float]] = []

    def observe(self, resource: Resource, predicted: float, observed: float) -> None:
        self.seen.append((resource, predicted, observed))


class LateTimer:
    """Points in time that are reached when a test says so, as on an accelerator."""

    synchronous = False

    def __init__(self) -> None:
        self.made = 0
        self.reached = 0

    def compute(self) -> int:
        self.made += 1
        return self.made

    copies = compute

    def seconds(self, begin: int, end: int) -> float | None:
        return float(end - begin) if end <= self.reached else None


def watch(timer: Any, plan: LayerPlan | None = None) -> tuple[CostWatch, Seen]:
    costs = Seen()
    return CostWatch(costs, plan or LayerPlan(0, 0, LAYERS), timer, HostCopyStream()), costs


def test_copies_of_a_host_are_timed_by_its_clock() -> None:
    assert isinstance(timer_for(HostCopyStream()), HostTimer)


def test_what_the_device_has_not_reached_is_taken_in_later_and_in_order() -> None:
    timer = LateTimer()
    seen, costs = watch(timer)
    for predicted in (1.0, 2.0):
        begin, end = timer.compute(), timer.compute()
        seen.between((Resource.PREFILL,), predicted, begin, end)
    assert costs.seen == []
    timer.reached = 3
    seen.poll()
    assert costs.seen == [(Resource.PREFILL, 1.0, 1.0)]
    timer.reached = 4
    seen.poll()
    assert [predicted for _, predicted, _ in costs.seen] == [1.0, 2.0]


@pytest.mark.parametrize("extra", [0, 1])
def test_no_more_than_a_bound_wait_for_the_device(extra: int) -> None:
    timer = LateTimer()
    seen, costs = watch(timer)
    for _ in range(PENDING + extra):
        seen.between((Resource.PREFILL,), 1.0, timer.compute(), timer.compute())
    timer.reached = timer.made
    seen.poll()
    assert len(costs.seen) == PENDING


def layers(gate: WatchedGate, clock: Clock, count: int = LAYERS) -> None:
    """A forward pass: each layer asks twice, for K and for V, and takes two seconds."""
    for layer in range(count):
        gate.wait_until(layer)
        gate.wait_until(layer)
        clock.now += 2.0
    gate.pass_ended()


def gate_of() -> tuple[WatchedGate, Seen, Clock]:
    clock = Clock()
    seen, costs = watch(HostTimer(clock))
    return WatchedGate(LAYERS, seen), costs, clock


def test_a_prefill_is_timed_from_its_first_attention_to_its_last() -> None:
    gate, costs, clock = gate_of()
    gate.prefill_begins([(100, 0), (28, 500)])
    layers(gate, clock)
    ((resource, predicted, observed),) = costs.seen
    assert resource is Resource.PREFILL and observed == 2.0 * (LAYERS - 1)
    assert predicted == pytest.approx((LAYERS - 1) * 128 * 1e-2)
    layers(gate, clock)
    assert len(costs.seen) == 1, "the next pass may be anything"


@pytest.mark.parametrize(("new", "timed"), [(BLOCK_TOKENS - 1, False), (BLOCK_TOKENS, True)])
def test_a_prefill_of_less_than_a_block_says_nothing(new: int, timed: bool) -> None:
    gate, costs, clock = gate_of()
    gate.prefill_begins([(new, 900)])
    layers(gate, clock)
    assert bool(costs.seen) == timed


def test_a_prefill_with_a_restoration_in_it_says_nothing() -> None:
    gate, costs, clock = gate_of()

    class Restore:
        restorations = ()

        def wait(self, layer: int) -> None:
            clock.now += 5.0

        def finish(self) -> None:
            return None

    gate.set_consumer(gate.produce(Restore()))  # type: ignore[arg-type]
    gate.prefill_begins([(256, 0)])
    layers(gate, clock)
    assert costs.seen == []
    gate.finish()
    gate.prefill_begins([(256, 0)])
    layers(gate, clock)
    assert len(costs.seen) == 1


def test_a_pass_that_leaves_early_is_forgotten() -> None:
    gate, costs, clock = gate_of()
    gate.prefill_begins([(256, 0)])
    layers(gate, clock, LAYERS - 1)
    clock.now += 100.0
    gate.wait_until(LAYERS - 1)
    assert costs.seen == []


class SlowSink:
    """Projections take three seconds a piece, scatters one."""

    def __init__(self, pool: Any, clock: Clock) -> None:
        self.pool, self.clock = pool, clock

    def write_hidden(self, *args: Any) -> None:
        self.clock.now += 3.0
        self.pool.write_hidden(*args)

    def write_kv(self, *args: Any) -> None:
        self.clock.now += 1.0
        self.pool.write_kv(*args)


class NoRotation:
    def move(self, layer: int, parts: Any, old: Any, new: Any) -> Any:
        return parts


def watched(
    seen: CostWatch, plan: LayerPlan, sink: Any, blocks: int = 1, moved: Moved | None = None
) -> WatchedPass:
    """A restoration of `blocks` blocks whose copies are enqueued. moved: where they come from."""
    layout = BlockLayout(plan, StateShape(LAYERS, HIDDEN_BYTES, PARTS, "uint8"))
    nodes = []
    for slot in range(blocks):
        node = BlockNode(None, b"", bytes(4 * BLOCK_TOKENS), None)
        node.slot, node.moved = slot, moved
        nodes.append(node)
    copy_stream, tokens = HostCopyStream(), blocks * BLOCK_TOKENS
    # Two frames, of one block as KV each: not all of a restoration fits.
    ring = StagingRing(2, BLOCK_TOKENS * sum(PARTS), CPU, copy_stream)
    span = Restoration(tuple(nodes), 0, tokens, torch.arange(tokens))
    path = RestorePath(HostPool(layout, blocks), sink, ring, rotation=NoRotation())
    return WatchedPass(seen, path, [span])


def test_a_restoration_on_a_cpu_tells_projections_and_copies_apart() -> None:
    plan = LayerPlan(0, 2, 2)
    clock = Clock()
    seen, costs = watch(HostTimer(clock), plan)
    restore = watched(seen, plan, SlowSink(ToyPool(BLOCK_TOKENS, LAYERS), clock))
    clock.now += 1000.0  # other work
    for layer in range(LAYERS):
        restore.wait(layer)
        restore.wait(layer)
    clock.now += 1000.0
    restore.finish()
    restore.finish()
    found = {resource: (predicted, observed) for resource, predicted, observed in costs.seen}
    assert len(costs.seen) == 3, "told once"
    assert found[Resource.PROJECTION] == (pytest.approx(2 * 64 * 2e-3), 6.0)
    copies = (pytest.approx(2 * 64 * 1e-3 + 2 * 64 * 0.5e-3), 2.0)
    assert found[Resource.KV_COPY] == found[Resource.HIDDEN_COPY] == copies
    told, _ = seen.copies(Counter({2: 640, 3: 640, 0: 1, 1: 1}))
    assert told == (Resource.KV_COPY,), "a share too small to tell of"


@pytest.mark.parametrize(("rows", "told"), [(4, (Resource.KV_COPY, Resource.HIDDEN_COPY)),
                                             (5, (Resource.KV_COPY,))])  # fmt: skip
def test_a_form_with_a_fifth_of_the_copies_counts(rows: int, told: tuple[Resource, ...]) -> None:
    """A row costs twice as much as K and V as it does as a hidden state."""
    seen, _ = watch(LateTimer(), LayerPlan(0, 1, 1))
    assert seen.copies(Counter({0: 2, 1: rows}))[0] == told


@pytest.mark.parametrize("shift", [0, 64])
def test_on_a_cpu_a_restoration_that_rotates_says_nothing_of_the_copies(shift: int) -> None:
    """Rotating K takes longer than copying it there."""
    plan, clock = LayerPlan(0, 0, LAYERS), Clock()
    seen, costs = watch(HostTimer(clock), plan)
    sink = SlowSink(ToyPool(BLOCK_TOKENS, LAYERS), clock)
    watched(seen, plan, sink, moved=Moved(b"", shift)).finish()
    assert {resource for resource, *_ in costs.seen} == (
        set() if shift else {Resource.KV_COPY, Resource.PROJECTION}
    )


def test_on_a_device_the_copies_into_free_frames_and_one_projection_are_timed() -> None:
    """What is copied when a frame has become free waits for compute, and is left out."""
    plan, timer = LayerPlan(0, LAYERS, 0), LateTimer()
    seen, costs = watch(timer, plan)
    restore = watched(seen, plan, ToyPool(2 * BLOCK_TOKENS, LAYERS), blocks=2)
    assert timer.made == 2 and costs.seen == []
    for layer in range(LAYERS):
        restore.wait(layer)
    restore.finish()
    timer.reached = timer.made
    seen.poll()
    frames = 2 * BLOCK_TOKENS * sum(PARTS) // HIDDEN_BYTES
    assert costs.seen == [
        (Resource.HIDDEN_COPY, pytest.approx(frames * 0.5e-3), 1.0),
        (Resource.PROJECTION, pytest.approx(2 * BLOCK_TOKENS * 2e-3), 1.0),
    ]


def test_while_another_restoration_is_under_way_no_copies_are_timed() -> None:
    plan, timer = LayerPlan(0, 0, LAYERS), LateTimer()
    device = StreamDevice(0)
    seen = CostWatch(Seen(), plan, timer, SimulatedCopyStream(device))
    device.submit(COMPUTE, None)
    seen.restored()
    watched(seen, plan, ToyPool(BLOCK_TOKENS, LAYERS)).finish()
    assert timer.made == 0
    device.run()
    watched(seen, plan, ToyPool(BLOCK_TOKENS, LAYERS)).finish()
    assert timer.made == 2
