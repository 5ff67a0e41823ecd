"""Units whose places are full of NaN until rows come, and mistakes planted in them."""

from __future__ import annotations

import torch

from sglang_hc.hybrid.rows import RoundRows
from sglang_hc.hybrid.units import PLACES, Place, Units

SPOILED = 0xFF
"""In every byte: a NaN in every floating-point type."""


class SpoiledUnits(Units):
    """A place is spoiled, in the order of the copies, before its next unit's rows come."""

    def _bring(self, layer: int, rows: RoundRows, place: Place) -> None:
        for part in (place.hidden, *place.parts):
            self._in.copy(part, torch.full_like(part, SPOILED))
        super()._bring(layer, rows, place)

    def forget(self, slots: list[int], act_tokens: int, device_act: int) -> None:
        """Rows of slots that are given back are spoiled as soon as what was sent there is."""
        mirror = self._mirror
        for slot in slots:
            if slot <= device_act:
                self._spoil_kept(slot - 1)
                continue
            act = slot <= act_tokens
            row = slot - 1 - (device_act if act else act_tokens)
            for part in (mirror.hidden,) if act else mirror.parts:
                for target in part[:, row]:
                    self._out.copy(target, torch.full_like(target, SPOILED))

    def _spoil_kept(self, row: int) -> None:
        """Compute work."""
        self._kept[:, row].fill_(SPOILED)


class NeverWaits(SpoiledUnits):
    """Units compute before their rows are there."""

    def enter(self, layer: int, number: int) -> int:
        index = (layer * len(self._rounds) + number) % PLACES
        self._arrived[index] = self._in.computed()
        return super().enter(layer, number)


class RefillsTooEarly(SpoiledUnits):
    """A place is refilled beside the computation of the unit in it."""

    def enter(self, layer: int, number: int) -> int:
        index = super().enter(layer, number)
        self._refill(layer * len(self._rounds) + number + PLACES)
        return index

    def _refill(self, unit: int) -> None:
        super()._fill(unit)

    def _fill(self, unit: int) -> None:
        if unit < PLACES:
            super()._fill(unit)


class ReadsTooEarly(SpoiledUnits):
    """Host rows are read, and places refilled, before what was sent home is there."""

    def leave(self, layer: int, number: int, hidden: torch.Tensor | None) -> None:
        index = (layer * len(self._rounds) + number) % PLACES
        before = self._emptied[index], self._home[layer]
        fill, self._fill = self._fill, lambda _: None  # type: ignore[method-assign]
        super().leave(layer, number, hidden)
        self._emptied[index], self._home[layer] = before
        self._fill = fill  # type: ignore[method-assign]
        fill(layer * len(self._rounds) + number + PLACES)


MISTAKES = (NeverWaits, RefillsTooEarly, ReadsTooEarly)
