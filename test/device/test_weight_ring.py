"""The weight ring alone: whatever is asked of it, no layer computes with another's weights.

Computation and copies happen when the fences let them (`support.streams`). What a layer computed
with is looked at when the device gets there, at the memory that was its weights' when the work was
submitted, as a kernel does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_hc.device import weight_ring
from sglang_hc.device.copy_stream import HostCopyStream
from sglang_hc.device.weight_ring import ALIGNED, PLACES, Parked, WeightRing
from support.copy_streams import LateCopyStream
from support.examples import examples
from support.streams import COMPUTE, SimulatedCopyStream, StreamDevice

CPU = torch.device("cpu")
SHAPES = [(5, 7), (16, 3), (2, 3, 4), (1, 130)]
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_ring, "PIECE_BYTES", 3 * ALIGNED)


def matrices(layer: int, count: int) -> list[torch.nn.Parameter]:
    """Of one layer, like no other's. Every second one is transposed, as quantised weights are."""
    found = []
    for index in range(count):
        number = layer + index
        data = torch.full(SHAPES[number % len(SHAPES)], layer + 1.0)
        data = data.to(DTYPES[(layer * 3 + index) % len(DTYPES)])
        data = data.transpose(-1, -2) if index % 2 else data
        found.append(torch.nn.Parameter(data, requires_grad=False))
    return found


class Machine:
    """A ring of layers with so many matrices each, on a device of which a seed decides what moves.
    wrong: layers that computed with other weights than their own."""

    def __init__(self, counts: list[int], seed: int, kind: type[WeightRing] = WeightRing) -> None:
        self.device = StreamDevice(seed)
        self.parameters = [matrices(layer, count) for layer, count in enumerate(counts)]
        self.originals = [[p.data.clone() for p in layer] for layer in self.parameters]
        self.copies = SimulatedCopyStream(self.device)
        self.ring = kind([Parked(layer) for layer in self.parameters], CPU, self.copies)
        self.wrong: list[int] = []

    def compute(self, layer: int) -> None:
        """Submit work with a layer's weights."""
        for parameter, original in zip(self.parameters[layer], self.originals[layer], strict=True):
            assert parameter.shape == original.shape and parameter.stride() == original.stride()
            self.device.submit(COMPUTE, partial(self._look, layer, parameter.data, original))

    def _look(self, layer: int, found: torch.Tensor, original: torch.Tensor) -> None:
        if not torch.equal(found.to(torch.float32), original.to(torch.float32)):
            self.wrong.append(layer)

    def run(self, passes: list[tuple[int, list[int]]]) -> list[int]:
        """passes: (layers that run before the pass is left, layers whose weights others ask for in
        the midst of each of them). Returns `wrong`."""
        layers = len(self.parameters)
        for length, borrowed in passes:
            for layer in range(min(length, layers)):
                self.ring.enter(layer)
                self.compute(layer)
                for other in borrowed:
                    self.ring.ready(other % layers)
                    self.compute(other % layers)
                    self.device.step()
                self.compute(layer)  # the rest of the layer, behind what others did
            for other in borrowed:
                self.ring.ready(other % layers)
                self.compute(other % layers)
        self.device.run()
        return self.wrong


COUNTS = st.lists(st.integers(1, 4), min_size=1, max_size=7)
PASSES = st.lists(
    st.tuples(st.integers(0, 7), st.lists(st.integers(0, 6), max_size=3)), min_size=1, max_size=6
)


@settings(max_examples=examples(200), deadline=None)
@given(counts=COUNTS, passes=PASSES, seed=st.integers(0, 2**32))
def test_no_layer_computes_with_anothers_weights(
    counts: list[int], passes: list[tuple[int, list[int]]], seed: int
) -> None:
    """Passes of any length, one behind the other, each left wherever."""
    assert Machine(counts, seed).run(passes) == []


@settings(max_examples=examples(100), deadline=None)
@given(
    counts=COUNTS,
    calls=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=20),
    seed=st.integers(0, 2**32),
)
def test_layers_may_come_in_any_order(
    counts: list[int], calls: list[tuple[bool, int]], seed: int
) -> None:
    machine = Machine(counts, seed)
    running: int | None = None
    valid: set[int | None] = set()
    for enters, number in calls:
        layer = number % len(counts)
        if enters:
            machine.ring.enter(layer)
            running = layer
            valid = {layer}
        else:
            machine.ring.ready(layer)
            valid = {running, layer}
        assert [n for n in range(len(counts)) if machine.ring.is_valid(n)] == sorted(valid - {None})
        machine.compute(layer)
        if running is not None:
            machine.compute(running)
    machine.device.run()
    assert machine.wrong == []


class NeverWaits(WeightRing):
    """Computes before the copies are over."""

    def _make_ready(self, layer: int, place: int) -> None:
        if layer not in self._held:
            self._fill(place, layer)


class RefillsTooEarly(WeightRing):
    """Copies over what the device has yet to compute with."""

    def __init__(self, layers: Any, device: torch.device, copy_stream: Any) -> None:
        super().__init__(layers, device, copy_stream)
        copy_stream.after = lambda computed: None


class TakesTheRunningPlace(WeightRing):
    """Whoever asks in the midst of a layer takes that layer's place."""

    def ready(self, layer: int) -> None:
        self._make_ready(layer, self._last)


@pytest.mark.parametrize("mistake", [NeverWaits, RefillsTooEarly, TakesTheRunningPlace])
def test_a_planted_mistake_is_found(mistake: type[WeightRing]) -> None:
    passes = [(4, [2]), (2, []), (4, [0, 3])]
    runs = [Machine([2, 1, 3, 2], seed, mistake).run(passes) for seed in range(20)]
    assert any(runs)


@pytest.fixture
def late() -> Iterator[tuple[LateCopyStream, Callable[[int], bool]]]:
    """A ring whose copies happen when they are waited for and whose places are spoiled; whether a
    layer's weights are all NaN."""
    layers = [[torch.nn.Parameter(torch.full((3, 5), n + 1.0))] for n in range(4)]
    for parameter in (one for layer in layers for one in layer):
        parameter.requires_grad_(False)
    stream = LateCopyStream()
    ring = WeightRing([Parked(layer) for layer in layers], CPU, stream, spoil=True)
    yield ring, lambda number: bool(layers[number][0].isnan().all())  # type: ignore[misc]


def test_who_does_not_ask_reads_no_number(late: Any) -> None:
    ring, is_nan = late
    assert all(map(is_nan, range(4)))
    ring.enter(0)
    assert not is_nan(0) and is_nan(1), "1 was copied before it was waited for"
    ring.enter(1)
    assert not is_nan(1) and is_nan(2)
    ring.ready(3)
    assert not is_nan(1) and not is_nan(3)


def test_the_next_layer_comes_while_one_runs() -> None:
    machine = Machine([2, 2, 2], 0)
    for layer in (0, 1, 2, 0):
        machine.ring.enter(layer)
        assert set(machine.ring._held) == {layer, (layer + 1) % 3}


def test_a_layer_that_stays_is_not_copied_again() -> None:
    machine = Machine([2, 2], 0)
    machine.ring.enter(0)
    machine.ring.enter(1)
    calls = machine.copies.calls
    for layer in (0, 1, 0):
        machine.ring.enter(layer)
        machine.ring.ready(1 - layer)
    assert machine.copies.calls == calls


def test_memory_that_torch_locked_is_given_back_as_layers_leave_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [matrices(layer, 2) for layer in range(3)]
    before = [layer[0].data_ptr() for layer in layers]
    left: list[int] = []

    def note() -> None:
        moved = (p[0].data_ptr() != at for p, at in zip(layers, before, strict=True))
        left.append(sum(moved))

    monkeypatch.setattr(weight_ring, "give_back_pinned", note)
    WeightRing([Parked(layer) for layer in layers], CPU, HostCopyStream())
    assert left == [1, 2, 3]


def test_what_the_layers_took_is_given_back() -> None:
    """Host memory holds each matrix once, and the device its two places."""
    layers = [matrices(layer, 4) for layer in range(5)]
    before = [StorageWeakRef(p.untyped_storage()) for layer in layers for p in layer]
    assert not any(storage.expired() for storage in before)
    ring = WeightRing([Parked(layer) for layer in layers], CPU, HostCopyStream())
    assert all(storage.expired() for storage in before)
    assert len(ring.places) == PLACES
    assert ring.places[0].numel() == max(Parked(layer).bytes for layer in layers)
    assert ring.bytes == sum(Parked(layer).bytes for layer in layers)
    assert all(p.data_ptr() % 16 == 0 for layer in layers for p in layer)
