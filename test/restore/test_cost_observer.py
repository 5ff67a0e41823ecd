"""What is seen of the costs: each resource by itself, nothing that is mixed with other work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
import torch

from sglang_hc.device.copy_stream import HostCopyStream
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.policy.correction import Resource
from sglang_hc.policy.cost_model import CostModel
from sglang_hc.restore.cost_observer import PENDING, CostObserver, HostTimer, timer_for
from sglang_hc.restore.path import Restoration, RestorePath
from sglang_hc.restore.restore_pass import LayerGate, RestorePass
from sglang_hc.restore.staging import StagingRing
from sglang_hc.store.host_pool import HostPool
from sglang_hc.tree.block_tree import BlockNode, Moved
from support.clock import Clock
from support.profiles import cost_model
from support.streams import COMPUTE, SimulatedCopyStream, StreamDevice
from support.tiers import CPU, HIDDEN_BYTES, PARTS, ToyPool

COST = cost_model(host=1e-3, disk=5e-3, project=2e-3, prefill=1e-2)
LAYERS = 4
ALL_KV = LayerPlan(0, 0, LAYERS)


class Seen(CostModel):
    """Notes what is observed."""

    def __init__(self) -> None:
        super().__init__(**vars_of(COST))
        self.seen: list[tuple[dict[Resource, float], float]] = []

    def observe(self, parts: Mapping[Resource, float], seconds: float) -> None:
        self.seen.append((dict(parts), seconds))


def vars_of(cost: CostModel) -> dict[str, Any]:
    return {one.name: getattr(cost, one.name) for one in fields(cost)}


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


def layout_of(plan: LayerPlan) -> BlockLayout:
    return BlockLayout(plan, StateShape(LAYERS, HIDDEN_BYTES, PARTS, "uint8"))


def observer_of(
    timer: Any, plan: LayerPlan = ALL_KV, copy_stream: Any = None
) -> tuple[CostObserver, Seen]:
    costs = Seen()
    return CostObserver(costs, layout_of(plan), timer, copy_stream or HostCopyStream()), costs


def test_copies_of_a_host_are_timed_by_its_clock() -> None:
    assert isinstance(timer_for(HostCopyStream()), HostTimer)


def test_what_the_device_has_not_reached_is_taken_in_later_and_in_order() -> None:
    timer = LateTimer()
    observer, costs = observer_of(timer)
    for predicted in (1.0, 2.0):
        begin, end = timer.compute(), timer.compute()
        observer.between({Resource.PREFILL: predicted}, begin, end)
    assert costs.seen == []
    timer.reached = 3
    observer.poll()
    assert costs.seen == [({Resource.PREFILL: 1.0}, 1.0)]
    timer.reached = 4
    observer.poll()
    assert [parts[Resource.PREFILL] for parts, _ in costs.seen] == [1.0, 2.0]


@pytest.mark.parametrize("extra", [0, 1])
def test_no_more_than_a_bound_wait_for_the_device(extra: int) -> None:
    timer = LateTimer()
    observer, costs = observer_of(timer)
    for _ in range(PENDING + extra):
        observer.between({Resource.PREFILL: 1.0}, timer.compute(), timer.compute())
    timer.reached = timer.made
    observer.poll()
    assert len(costs.seen) == PENDING


class Gate:
    """A gate, and what is told of its passes."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.observer, costs = observer_of(HostTimer(self.clock))
        self.gate, self.seen = LayerGate(self.observer), costs.seen

    def run(self, count: int = LAYERS) -> None:
        """A forward pass: each layer asks twice, for K and for V, and takes two seconds."""
        for layer in range(count):
            self.gate.wait_until(layer)
            self.gate.wait_until(layer)
            self.clock.now += 2.0
        self.observer.pass_ended()


def test_a_prefill_is_timed_from_its_first_attention_to_its_last() -> None:
    one = Gate()
    one.observer.prefill_begins([(100, 0), (28, 500)])
    one.run()
    parts = {Resource.PREFILL: (LAYERS - 1) * 128 * 1e-2, Resource.ATTENTION: 0.0}
    assert one.seen == [(pytest.approx(parts), 2.0 * (LAYERS - 1))]
    one.run()
    assert len(one.seen) == 1, "the next pass may be anything"


@pytest.mark.parametrize(("new", "timed"), [(BLOCK_TOKENS - 1, False), (BLOCK_TOKENS, True)])
def test_a_prefill_of_less_than_a_block_says_nothing(new: int, timed: bool) -> None:
    one = Gate()
    one.observer.prefill_begins([(new, 900)])
    one.run()
    assert bool(one.seen) == timed


def test_a_prefill_with_a_restoration_in_it_says_nothing() -> None:
    one = Gate()

    class Restore:
        restorations = ()

        def wait(self, layer: int) -> None:
            one.clock.now += 5.0

        def finish(self) -> None:
            return None

    one.gate.set_consumer(one.gate.produce(Restore()))  # type: ignore[arg-type]
    one.observer.prefill_begins([(256, 0)])
    one.run()
    assert one.seen == []
    one.gate.finish()
    one.observer.prefill_begins([(256, 0)])
    one.run()
    assert len(one.seen) == 1


def test_a_pass_that_leaves_early_is_forgotten() -> None:
    one = Gate()
    one.observer.prefill_begins([(256, 0)])
    one.run(LAYERS - 1)
    one.clock.now += 100.0
    one.gate.wait_until(LAYERS - 1)
    assert one.seen == []


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


class SlowRotation:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def move(self, layer: int, parts: Any, old: Any, new: Any) -> Any:
        self.clock.now += 50.0
        return parts


def observed(
    observer: CostObserver,
    plan: LayerPlan,
    sink: Any,
    blocks: int = 1,
    rotation: SlowRotation | None = None,
) -> RestorePass:
    """A restoration of `blocks` blocks whose copies are enqueued. rotation: they have moved."""
    nodes = []
    for slot in range(blocks):
        node = BlockNode(None, b"", bytes(4 * BLOCK_TOKENS), None)
        node.slot, node.moved = slot, Moved(b"", 64) if rotation is not None else None
        nodes.append(node)
    copy_stream, tokens = HostCopyStream(), blocks * BLOCK_TOKENS
    # Two frames, of one block as KV each: not all of a restoration fits.
    ring = StagingRing(2, BLOCK_TOKENS * sum(PARTS), CPU, copy_stream)
    span = Restoration(tuple(nodes), 0, tokens, torch.arange(tokens))
    path = RestorePath(HostPool(layout_of(plan), blocks), sink, ring, rotation=rotation)
    return RestorePass(path, [span], observer=observer)


def test_a_restoration_on_a_cpu_tells_projections_and_copies_apart() -> None:
    plan = LayerPlan(0, 2, 2)
    clock = Clock()
    observer, costs = observer_of(HostTimer(clock), plan)
    restore = observed(observer, plan, SlowSink(ToyPool(BLOCK_TOKENS, LAYERS), clock))
    clock.now += 1000.0  # other work
    for layer in range(LAYERS):
        restore.wait(layer)
        restore.wait(layer)
    clock.now += 1000.0
    restore.finish()
    restore.finish()
    copies = {Resource.HIDDEN_COPY: 2 * 64 * 0.5e-3, Resource.KV_COPY: 2 * 64 * 1e-3}
    assert costs.seen == [
        (pytest.approx(copies), 2.0),
        ({Resource.PROJECTION: pytest.approx(2 * 64 * 2e-3)}, 6.0),
    ], "told once"


def test_on_a_cpu_rotating_k_is_no_part_of_the_copies() -> None:
    """It takes longer than copying there."""
    plan, clock = LayerPlan(0, 0, LAYERS), Clock()
    observer, costs = observer_of(HostTimer(clock), plan)
    sink = SlowSink(ToyPool(BLOCK_TOKENS, LAYERS), clock)
    observed(observer, plan, sink, rotation=SlowRotation(clock)).finish()
    assert clock.now >= LAYERS * 51.0
    assert costs.seen == [({Resource.KV_COPY: pytest.approx(LAYERS * 64 * 1e-3)}, LAYERS * 1.0)]


def test_on_a_device_the_copies_into_free_frames_and_one_projection_are_timed() -> None:
    """What is copied when a frame has become free waits for compute, and is left out."""
    plan, timer = LayerPlan(0, LAYERS, 0), LateTimer()
    observer, costs = observer_of(timer, plan)
    restore = observed(observer, plan, ToyPool(2 * BLOCK_TOKENS, LAYERS), blocks=2)
    assert timer.made == 2 and costs.seen == []
    for layer in range(LAYERS):
        restore.wait(layer)
    restore.finish()
    timer.reached = timer.made
    observer.poll()
    frames = 2 * BLOCK_TOKENS * sum(PARTS) // HIDDEN_BYTES
    assert costs.seen == [
        ({Resource.HIDDEN_COPY: pytest.approx(frames * 0.5e-3)}, 1.0),
        ({Resource.PROJECTION: pytest.approx(2 * BLOCK_TOKENS * 2e-3)}, 1.0),
    ]


def test_while_another_restoration_is_under_way_no_copies_are_timed() -> None:
    plan, timer = LayerPlan(0, 0, LAYERS), LateTimer()
    device = StreamDevice(0)
    observer, _ = observer_of(timer, plan, SimulatedCopyStream(device))
    device.submit(COMPUTE, None)
    observer.restored()
    observed(observer, plan, ToyPool(BLOCK_TOKENS, LAYERS)).finish()
    assert timer.made == 0
    device.run()
    observed(observer, plan, ToyPool(BLOCK_TOKENS, LAYERS)).finish()
    assert timer.made == 2


def test_a_few_rows_say_nothing() -> None:
    observer, _ = observer_of(LateTimer(), LayerPlan(0, 1, 3))
    assert observer.copied({0: BLOCK_TOKENS - 1, 1: BLOCK_TOKENS - 1}) == {}
    assert set(observer.copied({0: BLOCK_TOKENS, 1: 1})) == {
        Resource.HIDDEN_COPY, Resource.KV_COPY,
    }  # fmt: skip
