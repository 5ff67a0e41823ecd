"""The start-time choice between the compute stream and one beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_hc.device.copy_stream import HostCopyStream
from sglang_hc.forms import StateShape
from sglang_hc.restore.side_stream import LAYERS, fastest_side_stream
from support.streams import COMPUTE, SIDE, SimulatedCopyStream, StreamDevice, StreamPool
from support.tiers import HIDDEN_BYTES, PARTS, project

SHAPE = StateShape(LAYERS + 1, HIDDEN_BYTES, PARTS, "uint8")


@pytest.mark.parametrize("faster", [COMPUTE, SIDE])
def test_the_faster_way_is_taken_and_both_restore(faster: int) -> None:
    device = StreamDevice(3)
    pool = StreamPool(device, 200, SHAPE.num_layers)
    slots = torch.arange(150)
    layers: list[int] = []

    def compute(layer: int) -> None:
        layers.append(layer)
        pool.attend(layer)

    def seconds(work: Callable[[], object]) -> float:
        before = [queue.submitted for queue in device.queues]
        work()
        used = SIDE if device.queues[SIDE].submitted > before[SIDE] else COMPUTE
        return 1.0 if used == faster else 2.0

    side = fastest_side_stream(SimulatedCopyStream(device), SHAPE, pool, slots, compute, seconds)
    assert (side is not None) == (faster == SIDE)
    device.run()
    assert layers == list(range(LAYERS)) * (len(layers) // LAYERS)
    nothing = torch.zeros((128, HIDDEN_BYTES), dtype=torch.uint8)
    for layer, parts in pool.seen:
        wanted = project(layer, nothing, torch.arange(128))
        for part, rows in zip(parts, wanted, strict=True):
            assert torch.equal(part[:128], rows) and not part[128:].any()


@pytest.mark.parametrize("slots", [150, 63])
def test_nothing_is_measured_where_there_is_no_choice(slots: int) -> None:
    def never(work: Callable[[], object]) -> float:
        raise AssertionError

    copy_stream = HostCopyStream() if slots == 150 else SimulatedCopyStream(StreamDevice(0))
    pool = StreamPool(StreamDevice(0), 200, SHAPE.num_layers)
    assert (
        fastest_side_stream(
            copy_stream, SHAPE, pool, torch.arange(slots), lambda layer: None, never
        )
        is None
    )
