"""Weights that come when their layer begins, to compare with those that come ahead of it."""

from __future__ import annotations

from sglang_hc.device.weight_ring import WeightRing


class InLineRing(WeightRing):
    """A ring that copies nothing ahead, as SGLang's own offloading does, unless `ahead` is set."""

    ahead = False

    def enter(self, layer: int) -> None:
        if self.ahead:
            super().enter(layer)
            return
        self._make_ready(layer, 1 - self._last)
        self._last = self._held.index(layer)
        self._entered, self._asked = layer, None
