"""How long a pass takes whose state comes from host memory, on a clock of its own: units and
weights as a pass submits them, copies beside the computation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sglang_hc.device.weight_ring import ALIGNED, Parked, WeightRing
from sglang_hc.hybrid.mirror import Mirror
from sglang_hc.hybrid.rows import FIRST_ROW, RoundRows, rounds_of
from sglang_hc.hybrid.units import PLACES, Place, Units
from sglang_hc.policy.streaming import Streaming
from sglang_hc.restore.cost_observer import HostTimer
from support.timed import TimedCopyStream

LAYERS, REQUESTS, LENGTH = 32, 6, 40
HIDDEN, PART = 64, 64
COMPUTE_S = 0.001
"""Of a layer, all rounds of it together."""


class InLineUnits(Units):
    """Nothing comes ahead: each unit's rows are asked for when it begins."""

    def enter(self, layer: int, number: int) -> int:
        super()._fill(self._unit(layer, number))
        return super().enter(layer, number)

    def _fill(self, unit: int) -> None:
        return None


class Machine:
    """Requests of one length that decode. act: the share of their tokens that are hidden states.
    link: its rate over that at which a pass's copies take as long as its computation. weights: in
    ALIGNED bytes, of a layer."""

    def __init__(
        self, act: float, rounds: int, link: float, weights: int = 0, kind: type[Units] = Units
    ) -> None:
        tokens = REQUESTS * LENGTH
        rows = -(-tokens // rounds)
        self.streaming = Streaming(tokens, round(act * tokens), 0, rows)
        slots = np.random.default_rng(1).permutation(np.arange(1, tokens + 1))
        self.slots = list(slots.reshape(REQUESTS, LENGTH).astype(np.int64))
        mirror = Mirror(self.streaming, LAYERS, HIDDEN, (PART, PART))
        old = rounds_of(self.slots, [1] * REQUESTS, self.streaming)
        assert len(old) == rounds
        kv = sum(one.old.kv for one in old)
        self.bytes = LAYERS * (2 * PART * kv + HIDDEN * sum(one.old.act for one in old))
        self.bytes += LAYERS * weights * ALIGNED
        self.device = TimedCopyStream(link * self.bytes / (LAYERS * COMPUTE_S))
        places = [
            Place(
                torch.zeros((min(rows, self.streaming.act_tokens), HIDDEN), dtype=torch.uint8),
                tuple(torch.zeros((FIRST_ROW + rows, PART), dtype=torch.uint8) for _ in range(2)),
            )
            for _ in range(PLACES)
        ]
        kept = torch.zeros((LAYERS, 0, HIDDEN), dtype=torch.uint8)
        self.units = kind(mirror, kept, places, self.device, HostTimer())
        data = [torch.zeros(weights, ALIGNED, dtype=torch.uint8) for _ in range(LAYERS)]
        parked = [Parked([torch.nn.Parameter(one, requires_grad=False)]) for one in data]
        cpu = torch.device("cpu")
        self.ring = WeightRing(parked, cpu, self.device) if weights else None

    @property
    def slower(self) -> float:
        return max(self.bytes / self.device.bytes_per_s, LAYERS * COMPUTE_S)

    def run(self) -> float:
        """Seconds of a pass that follows others."""
        self.one_pass()
        begin = self.device.computing
        self.one_pass()
        return self.device.computing - begin

    def one_pass(self) -> None:
        rounds = rounds_of(self.slots, [1] * REQUESTS, self.streaming)
        self.units.begin(rounds)
        for layer in range(LAYERS):
            if self.ring is not None:
                self.ring.enter(layer)
            for number, rows in enumerate(rounds):
                self.units.enter(layer, number)
                self.device.compute(COMPUTE_S / len(rounds))
                self.units.leave(layer, number, hidden_of(rows))


def hidden_of(rows: RoundRows) -> Any:
    return torch.zeros((rows.new.act, HIDDEN), dtype=torch.uint8) if rows.new.act else None


LINKS = [0.5, 1.0, 2.0]
CASES = [
    *((act, rounds, 0) for act in (0.0, 0.5, 1.0) for rounds in (1, 3)),
    *((act, 1, 200) for act in (0.0, 0.5)),
]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(("act", "rounds", "weights"), CASES)
def test_a_pass_takes_as_long_as_the_slower_of_link_and_compute(
    act: float, rounds: int, weights: int, link: float
) -> None:
    """weights: beside state, over the same link."""
    machine = Machine(act, rounds, link, weights)
    assert machine.slower * 0.999 <= machine.run() <= 1.1 * machine.slower


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("rounds", [1, 3])
def test_without_copying_ahead_it_does_not(rounds: int, link: float) -> None:
    machine = Machine(0.5, rounds, link, kind=InLineUnits)
    assert machine.run() > 1.1 * machine.slower
