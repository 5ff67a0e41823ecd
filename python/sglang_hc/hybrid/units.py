"""State of running requests passes through two places on the device, unit by unit.

A unit is one round in one layer (HybridServe 4.2, Figure 8). While one attends in its place, the
next one's rows come into the other:

    begin     the first two units' rows begin to come
    enter     wait until a unit's rows are there; hidden states that never left join them
    (project, attend: the new rows are written into the place too)
    leave     its new rows go home; the rows of the next unit but one begin to come

Three orders matter, and nothing else is waited for: a unit computes when its rows have come; a
place is refilled when its last unit has computed and its new rows are home; and a host row is read
when it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from sglang_hc.device.copy_stream import CopyStream
from sglang_hc.device.cuda_copies import Ranges
from sglang_hc.device.gather_scatter import scatter, select
from sglang_hc.hybrid.mirror import Mirror
from sglang_hc.hybrid.rows import Kinds, RoundRows, Runs
from sglang_hc.store.scatter_queue import Event

PLACES = 2


class Place(NamedTuple):
    """One place on the device. hidden: (rows, hidden bytes) uint8. parts: K and V, each (rows,
    bytes) uint8."""

    hidden: torch.Tensor
    parts: tuple[torch.Tensor, ...]


class Timer(Protocol):
    """Points in the compute work, and what lies between two."""

    def compute(self) -> Any:
        """Now, in the order of the compute work."""

    def seconds(self, begin: Any, end: Any) -> float | None:
        """None while the later point is still to come."""


@dataclass
class Passed:
    """What passed since the start. seconds: of passes, each from its first unit to the end of its
    last; `timed` of them. rounds: of all passes. kv_in, act_in: bytes that came to the device as K
    and V and as hidden states; kv_out, act_out: that went home. new: tokens of passes. rows: other
    tokens that were attended to in a round, by how they are kept."""

    passes: int = 0
    timed: int = 0
    seconds: float = 0.0
    rounds: int = 0
    kv_in: int = 0
    act_in: int = 0
    kv_out: int = 0
    act_out: int = 0
    new: int = 0
    rows: Kinds = field(default_factory=lambda: Kinds(0, 0, 0))


class Units:
    """Belongs to the thread that runs the model; compute is the stream that is current in calls.

    A pass that ends early, by an exception, leaves nothing behind that the next one trips over.
    """

    def __init__(
        self,
        mirror: Mirror,
        kept: torch.Tensor,
        places: Sequence[Place],
        inward: CopyStream,
        timer: Timer,
    ) -> None:
        """kept: (layers, rows, hidden bytes) uint8 on the device, hidden states that never leave
        it. inward: copies to the device; those home take its opposite."""
        assert len(places) == PLACES
        self._mirror = mirror
        self._kept = kept
        self._places = places
        self._in, self._out = inward, inward.opposite()
        self._timer = timer
        self._rounds: Sequence[RoundRows] = ()
        self._indices: list[tuple[torch.Tensor, torch.Tensor]] = []
        none = self._out.record()
        self._arrived: list[Event] = [none] * PLACES
        self._emptied: list[Event] = [none] * PLACES
        """By place: what its last unit sent home is there."""
        self._home: list[Event] = [none] * mirror.layers
        """By layer: all that was sent is there."""
        self._next = 0
        """The unit that is to be entered."""
        self._begun: Any = None
        self._timing: tuple[Any, Any] | None = None
        self.passed = Passed()

    def begin(self, rounds: Sequence[RoundRows]) -> None:
        """A pass of these rounds, at least one."""
        self.take_time()
        self._rounds = rounds
        device = self._kept.device
        self._indices = [
            (torch.from_numpy(one.kept).to(device), torch.from_numpy(one.to_keep).to(device))
            for one in rounds
        ]
        self._next = 0
        self._begun = self._timer.compute()
        for unit in range(PLACES):
            self._fill(unit)

    def enter(self, layer: int, number: int) -> int:
        """Round `number` is to compute in `layer`; returns its place. Units of a pass come in their
        order, all rounds of a layer, then the next layer: RuntimeError for another one."""
        unit = self._unit(layer, number)
        if unit != self._next:
            raise RuntimeError(f"round {number} of layer {layer} is not what comes next")
        self._next, index = unit + 1, unit % PLACES
        self._in.before_compute(self._arrived[index])
        kept, _ = self._indices[number]
        if len(kept):
            self._join(self._places[index].hidden[: len(kept)], self._kept[layer], kept)
        return index

    def leave(self, layer: int, number: int, hidden: torch.Tensor | None) -> None:
        """All work of a unit was submitted. hidden: (n, hidden bytes) uint8, of those of its new
        tokens that become hidden states, in the order of `RoundRows.act_tokens`; None for none."""
        unit = self._unit(layer, number)
        index, rows = unit % PLACES, self._rounds[number]
        if hidden is not None:
            first, (_, to_keep) = rows.old.act, self._indices[number]
            new = self._places[index].hidden[first : first + len(hidden)]
            self._keep(new, self._kept[layer], to_keep, hidden)
        self._out.after(self._out.computed())
        self._send_home(layer, rows, self._places[index])
        self._emptied[index] = self._home[layer] = self._out.record()
        self._fill(unit + PLACES)
        if unit + 1 == len(self._rounds) * self._mirror.layers:
            self._timing = self._begun, self._timer.compute()
            self.passed.passes += 1
            self.passed.rounds += len(self._rounds)
            self.passed.new += sum(len(one.new_tokens) for one in self._rounds)

    def take_time(self) -> None:
        """Count the last pass's seconds, if they are known."""
        if self._timing is None:
            return
        seconds = self._timer.seconds(*self._timing)
        if seconds is not None:
            self.passed.seconds += seconds
            self.passed.timed += 1
            self._timing = None

    def _unit(self, layer: int, number: int) -> int:
        """Its number in the pass."""
        return layer * len(self._rounds) + number

    def _join(self, into: torch.Tensor, kept: torch.Tensor, rows: torch.Tensor) -> None:
        """Compute work: a round's hidden states that never left come into its place."""
        select(kept, rows, into)

    def _keep(
        self, into: torch.Tensor, kept: torch.Tensor, rows: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Compute work: new hidden states come into the place, and the first ones of them, which
        never leave, into their rows."""
        into.copy_(hidden)
        if len(rows):
            scatter(kept, rows, hidden[: len(rows)])

    def _fill(self, unit: int) -> None:
        """Have the rows of a unit come, if the pass has it."""
        layer, number = divmod(unit, len(self._rounds))
        if layer >= self._mirror.layers:
            return
        index, rows = unit % PLACES, self._rounds[number]
        self._in.after(self._in.computed())
        self._in.after(self._emptied[index])
        self._in.after(self._home[layer])
        self._bring(layer, rows, self._places[index])
        self._arrived[index] = self._in.record()
        if not layer:
            rows_before = self.passed.rows
            self.passed.rows = Kinds(*map(sum, zip(rows_before, rows.old, strict=True)))

    def _bring(self, layer: int, rows: RoundRows, place: Place) -> None:
        passed, mirror = self.passed, self._mirror
        if rows.old.host_act:
            _copy(self._in, place.hidden, mirror.hidden[layer], rows.hidden_in, False)
            passed.act_in += rows.old.host_act * place.hidden.shape[1]
        if rows.old.kv:
            for target, source in zip(place.parts, mirror.parts, strict=True):
                _copy(self._in, target, source[layer], rows.kv_in, False)
                passed.kv_in += rows.old.kv * target.shape[1]

    def _send_home(self, layer: int, rows: RoundRows, place: Place) -> None:
        passed, mirror = self.passed, self._mirror
        if rows.new.host_act:
            _copy(self._out, mirror.hidden[layer], place.hidden, rows.hidden_out, True)
            passed.act_out += rows.new.host_act * place.hidden.shape[1]
        if rows.new.kv:
            for target, source in zip(mirror.parts, place.parts, strict=True):
                _copy(self._out, target[layer], source, rows.kv_out, True)
                passed.kv_out += rows.new.kv * source.shape[1]


def _copy(
    stream: CopyStream, target: torch.Tensor, source: torch.Tensor, runs: Runs, homewards: bool
) -> None:
    """Runs of rows between host memory and a place; both (rows, bytes) uint8."""
    size = np.int64(target.shape[1])
    home, place, counts = (column * size for column in runs)
    sources, targets = (place, home) if homewards else (home, place)
    stream.copy_ranges(target, source, Ranges(sources, targets, counts))
