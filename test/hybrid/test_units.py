"""Units through two places: whatever the device does first, a unit computes with its own rows.

Computation and copies happen when the fences let them (`support.streams`). Each row says whose it
is: slot, layer and the pass that wrote it. Places are full of NaN until rows come, and so are the
rows of slots that are free: none is read before it was written.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.hybrid.mirror import Mirror
from sglang_hc.hybrid.rows import FIRST_ROW, RoundRows, rounds_of
from sglang_hc.hybrid.slots import FreeSlots
from sglang_hc.hybrid.units import PLACES, Place, Units
from sglang_hc.policy.streaming import Streaming
from sglang_hc.restore.cost_observer import HostTimer
from support.examples import examples
from support.spoiled_units import MISTAKES, SpoiledUnits
from support.streams import COMPUTE, SimulatedCopyStream, StreamDevice

HIDDEN, K, V = 16, 8, 4
"""Bytes of a row."""


class Machine:
    """Requests that come, grow and leave, on a device of which a seed decides what moves. wrong:
    (layer, slot) of rows that were not what was written last.

    Compute work of `kind` is late, too.
    """

    def __init__(
        self, streaming: Streaming, layers: int, seed: int, kind: type[SpoiledUnits] = SpoiledUnits
    ) -> None:
        device = self.device = StreamDevice(seed)

        class Late(kind):  # type: ignore[valid-type,misc]
            def _join(self, *args: Any) -> None:
                device.submit(COMPUTE, partial(super()._join, *args))

            def _keep(self, *args: Any) -> None:
                device.submit(COMPUTE, partial(super()._keep, *args))

            def _spoil_kept(self, row: int) -> None:
                device.submit(COMPUTE, partial(super()._spoil_kept, row))

        self.streaming, self.layers = streaming, layers
        self.slots = FreeSlots(streaming)
        mirror = Mirror(streaming, layers, HIDDEN, (K, V))
        kept = torch.zeros((layers, streaming.device_act, HIDDEN), dtype=torch.uint8)
        self.places = [
            Place(
                torch.zeros((min(streaming.rows, streaming.act_tokens), HIDDEN), dtype=torch.uint8),
                tuple(
                    torch.zeros((FIRST_ROW + streaming.rows, n), dtype=torch.uint8) for n in (K, V)
                ),
            )
            for _ in range(PLACES)
        ]
        copies = SimulatedCopyStream(device)
        self.units = Late(mirror, kept, self.places, copies, HostTimer())
        self.requests: list[list[int]] = []
        self.written: dict[int, int] = {}
        """By slot, the number of the pass that wrote it."""
        self.passes = 0
        self.wrong: list[tuple[int, int]] = []
        self.looked = 0
        self.random = random.Random(seed)

    def run(self, passes: int) -> list[tuple[int, int]]:
        for _ in range(passes):
            self._come_and_go()
            if self.requests:
                self._pass()
        self.device.run()
        return self.wrong

    def _come_and_go(self) -> None:
        choose = self.random
        owners = [one for request in self.requests for one in request]
        for request in list(self.requests):
            if choose.random() < 0.15 and all(owners.count(one) == 1 for one in request):
                self.requests.remove(request)
                self._free(request)
        if self.requests and choose.random() < 0.3:  # a prefix that is shared
            other = choose.choice(self.requests)
            self.requests.append(other[: choose.randrange(len(other) + 1)])
        elif choose.random() < 0.6:
            self.requests.append([])

    def _free(self, slots: list[int]) -> None:
        self.slots.give_back(np.array(slots, dtype=np.int64))
        self.units.forget(slots, self.streaming.act_tokens, self.streaming.device_act)

    def _pass(self) -> None:
        """Some of the requests run; now and then a pass ends early."""
        self.passes += 1
        running, new = [], []
        for request in self.random.sample(self.requests, len(self.requests)):
            wanted = self.random.choice([1, 1, 1, self.random.randrange(1, 12)])
            room = self.streaming.rows - len(request)
            found = self.slots.take(min(wanted, room)) if room > 0 else None
            if found is None:
                continue
            request.extend(found.tolist())
            running.append(request)
            new.append(len(found))
        if not running:
            return
        slots = [np.array(one, dtype=np.int64) for one in running]
        rounds = rounds_of(slots, new, self.streaming)
        flat = [s for one, count in zip(running, new, strict=True) for s in one[len(one) - count :]]
        self.units.begin(rounds)
        end = len(rounds) * self.layers
        stop = self.random.randrange(end) if self.random.random() < 0.1 else end
        for unit in range(stop):
            self._unit(*divmod(unit, len(rounds)), rounds[unit % len(rounds)], slots, flat)
        if stop == end:
            self.written |= dict.fromkeys(flat, self.passes)
            return
        for request, count in zip(running, new, strict=True):
            del request[len(request) - count :]
        self._free(flat)

    def _unit(
        self, layer: int, number: int, one: RoundRows, slots: list[Any], flat: list[int]
    ) -> None:
        place = self.places[self.units.enter(layer, number)]
        rows = {
            slot: row
            for request, found in zip(one.requests, one.rows, strict=True)
            for slot, row in zip(slots[request].tolist(), found.tolist(), strict=True)
        }
        old = {slot: row for slot, row in rows.items() if row < FIRST_ROW + sum(one.old)}
        written = {slot: self.written[slot] for slot in old}
        self.device.submit(COMPUTE, partial(self._look, layer, place, old, written))
        for slot, row in rows.items():
            if slot not in old:
                for index, part in enumerate(place.parts):
                    value = self.value(slot, layer, self.passes, index + 1)
                    self.device.submit(COMPUTE, partial(part[row].fill_, value))
        hidden = None
        if one.new.act:
            values = [
                self.value(flat[token], layer, self.passes, 0) for token in one.act_tokens.tolist()
            ]
            hidden = torch.tensor(values, dtype=torch.uint8)[:, None].repeat(1, HIDDEN)
        self.device.submit(COMPUTE, partial(self._look, layer, place, old, written))
        self.units.leave(layer, number, hidden)
        self.device.step()

    def _look(
        self, layer: int, place: Place, rows: dict[int, int], written: dict[int, int]
    ) -> None:
        for slot, row in rows.items():
            self.looked += 1
            parts = [part[row] for part in place.parts]
            kinds = [1, 2]
            if slot <= self.streaming.act_tokens:
                parts, kinds = [place.hidden[row - FIRST_ROW]], [0]
            for part, kind in zip(parts, kinds, strict=True):
                if set(part.tolist()) != {self.value(slot, layer, written[slot], kind)}:
                    self.wrong.append((layer, slot))

    @staticmethod
    def value(slot: int, layer: int, passed: int, kind: int) -> int:
        """Of each byte of a row; never that of a spoiled one."""
        return (slot * 31 + layer * 7 + passed * 3 + kind) % 251


@st.composite
def streamings(draw: st.DrawFn) -> Streaming:
    tokens = draw(st.integers(1, 70))
    act = draw(st.sampled_from([0, tokens // 2, tokens]))
    device = draw(st.sampled_from([0, act // 3, act]))
    return Streaming(tokens, act, device, draw(st.sampled_from([8, 20, 70])))


@settings(max_examples=examples(120), deadline=None)
@given(streaming=streamings(), layers=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_a_unit_computes_with_its_own_rows(streaming: Streaming, layers: int, seed: int) -> None:
    machine = Machine(streaming, layers, seed)
    assert machine.run(12) == []


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("rows", [70, 20])
def test_a_planted_mistake_is_found(mistake: type[SpoiledUnits], rows: int) -> None:
    streaming = Streaming(70, 35, 10, rows)
    assert any(Machine(streaming, 4, seed, mistake).run(12) for seed in range(40))


def test_a_layer_that_is_left_out_ends_the_pass() -> None:
    """Its rows are in a place, and another layer's are not."""
    machine = Machine(Streaming(20, 10, 0, 20), 3, 0)
    machine.units.begin(rounds_of([np.arange(1, 9)], [8], machine.streaming))
    machine.units.enter(0, 0)
    machine.units.leave(0, 0, None)
    with pytest.raises(RuntimeError, match="round 0 of layer 2 is not what comes next"):
        machine.units.enter(2, 0)


def test_what_passed_is_counted() -> None:
    streaming = Streaming(100, 40, 10, 100)
    copies = SimulatedCopyStream(device := StreamDevice(0))
    places = [
        Place(torch.zeros((40, HIDDEN), dtype=torch.uint8), tuple(
            torch.zeros((101, size), dtype=torch.uint8) for size in (K, V)
        ))
        for _ in range(PLACES)
    ]  # fmt: skip
    kept = torch.zeros((3, 10, HIDDEN), dtype=torch.uint8)
    clock = iter([5.0, 7.5])
    units = Units(
        Mirror(streaming, 3, HIDDEN, (K, V)), kept, places, copies, HostTimer(lambda: next(clock))
    )
    rounds = rounds_of([np.arange(5, 65)], [20], streaming)  # old: 5 to 44, new: 45 to 64
    units.begin(rounds)
    for layer in range(3):
        units.enter(layer, 0)
        units.leave(layer, 0, None)
    units.take_time()
    device.run()
    passed = units.passed
    assert passed.rows == (6, 30, 4) and (passed.passes, passed.rounds) == (1, 1)
    assert (passed.act_in, passed.kv_in) == (3 * 30 * HIDDEN, 3 * 4 * (K + V))
    assert (passed.act_out, passed.kv_out) == (0, 3 * 20 * (K + V))
    assert passed.new == 20
    assert (passed.timed, passed.seconds) == (1, 2.5)
