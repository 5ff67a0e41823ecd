"""How long a pass takes whose weights come through the ring, on a clock of its own: copies run
beside the computation, in the order that the real ring submits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.harness.in_line import InLineRing
from sglang_hc.device.weight_ring import ALIGNED, PLACES, Parked, WeightRing
from sglang_hc.policy.offload import spread
from support.examples import examples
from support.timed import TimedCopyStream

COMPUTE_S = 0.001
"""Of a layer."""


def parked(units: int) -> Parked:
    """A layer of so many times ALIGNED bytes."""
    data = torch.zeros(units, ALIGNED, dtype=torch.uint8)
    return Parked([torch.nn.Parameter(data, requires_grad=False)])


class Machine:
    """A model of which some layers are in a ring, in seconds.

    compute: of each layer. weights: by layer in the ring, its size in ALIGNED bytes.
    """

    def __init__(
        self,
        compute: list[float],
        weights: dict[int, int],
        bytes_per_s: float,
        kind: type[WeightRing] = WeightRing,
    ) -> None:
        self.compute = compute
        self.numbers = {layer: number for number, layer in enumerate(weights)}
        self.device = TimedCopyStream(bytes_per_s)
        layers = [parked(units) for units in weights.values()]
        self.ring = kind(layers, torch.device("cpu"), self.device)

    @property
    def link(self) -> float:
        """Seconds of all copies of a pass."""
        return self.ring.bytes / self.device.bytes_per_s

    def run(self) -> float:
        """Seconds of a pass that follows others."""
        self.one_pass()
        begin = self.device.computing
        self.one_pass()
        return self.device.computing - begin

    def one_pass(self) -> None:
        for layer, seconds in enumerate(self.compute):
            if layer in self.numbers:
                self.ring.enter(self.numbers[layer])
            self.device.compute(seconds)


def machine(hosted: int, layers: int, link: float, kind: type[WeightRing] = WeightRing) -> Machine:
    """Equal layers. link: its rate over that at which a pass's copies take as long as its layers'
    computation."""
    chosen = dict.fromkeys(spread(hosted, layers), 64)
    balance = sum(chosen.values()) * ALIGNED / (layers * COMPUTE_S)
    return Machine([COMPUTE_S] * layers, chosen, link * balance, kind)


LINKS = [0.5, 1.0, 2.0]
SHARES = [(32, 32), (16, 32), (8, 32)]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(("hosted", "layers"), SHARES)
def test_a_pass_takes_as_long_as_the_slower_of_link_and_compute(
    hosted: int, layers: int, link: float
) -> None:
    ahead = machine(hosted, layers, link)
    slower = max(ahead.link, layers * COMPUTE_S)
    assert slower <= ahead.run() <= 1.1 * slower


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(("hosted", "layers"), SHARES)
def test_without_copying_ahead_it_does_not(hosted: int, layers: int, link: float) -> None:
    in_line = machine(hosted, layers, link, InLineRing)
    found = in_line.run()
    assert found > 1.1 * max(in_line.link, layers * COMPUTE_S)
    assert found == pytest.approx(in_line.link + layers * COMPUTE_S)


class WaitsForItself(WeightRing):
    """The next layer's copies begin behind the computation of the one that runs."""

    def enter(self, layer: int) -> None:
        if self._entered is not None:
            following = (self._entered + 1) % len(self._layers)
            if following not in self._held:
                self._fill(1 - self._last, following)
        self._make_ready(layer, self._last)
        self._last = self._held.index(layer)
        self._entered, self._asked = layer, None


def test_copies_that_begin_too_late_are_found() -> None:
    """The weights are right, and every pass takes twice as long."""
    late = machine(32, 32, 1.0, WaitsForItself)
    assert late.run() > 1.1 * max(late.link, 32 * COMPUTE_S)


@settings(max_examples=examples(100), deadline=None)
@given(
    layers=st.lists(
        st.tuples(st.floats(0.1, 10.0), st.integers(1, 8)), min_size=PLACES + 1, max_size=9
    ),
    rate=st.floats(0.1, 10.0),
)
def test_each_layer_takes_its_computation_or_the_next_ones_copy(
    layers: list[tuple[float, int]], rate: float
) -> None:
    """Whichever is longer, and nothing else: however unequal the layers are."""
    compute = [seconds for seconds, _ in layers]
    weights = {layer: units for layer, (_, units) in enumerate(layers)}
    found = Machine(compute, weights, rate * ALIGNED).run()
    copies = [weights[(layer + 1) % len(layers)] / rate for layer in range(len(layers))]
    assert found == pytest.approx(sum(map(max, compute, copies)))
