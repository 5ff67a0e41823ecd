"""A restorer that says how long its passes took, without waiting for any of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sglang_hc.forms import BlockLayout, Form
from sglang_hc.policy.restore_plan import RestorePlan
from sglang_hc.restore.cost_observer import timer_for
from sglang_hc.restore.path import Restoration
from sglang_hc.restore.restore_pass import RestorePass
from sglang_hc.restore.restorer import Restorer
from sglang_hc.store.scatter_queue import Event

PENDING = 64
"""Most passes that wait for the device; further ones are not timed."""


class Timed(NamedTuple):
    """A restore pass: from its first copy to its last on the copy stream; on a CPU, which copies
    between the layers that it computes, from its beginning to the end of the forward pass.

    tokens: how many were restored. plans: what was decided of the requests that asked for it; none
    for blocks that are restored before the pass of their request."""

    seconds: float
    tokens: int
    plans: Sequence[RestorePlan]


class _Begun(NamedTuple):
    at: Any
    tokens: int
    plans: Sequence[RestorePlan]


def row_bytes(layout: BlockLayout, first: int = 0) -> int:
    """Bytes of a token in the stored layers from `first` on."""
    size = {Form.HIDDEN: layout.shape.hidden_bytes, Form.KV: layout.shape.kv_bytes}
    return sum(size[layout.form(layer)] for layer in layout.stored_layers if layer >= first)


class TimedRestorer(Restorer):
    """See the module. on_timed: told of each pass, in a later `poll`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.on_timed: Callable[[Timed], object] = lambda timed: None
        self.restored_bytes = 0
        """Copied from the host tier to the device; of ranks each its own part."""
        self._timer = timer_for(self.path.copy_stream)
        self._plans: list[RestorePlan] = []
        self._planned = 0
        """Restorations that are queued and have one of these plans."""
        self._last = _Begun(None, 0, ())
        self._begun: dict[int, _Begun] = {}
        self._pending: deque[tuple[_Begun, Any]] = deque()

    def decided(self, plan: RestorePlan) -> None:
        """What was queued since the last call is restored by this plan; perhaps nothing was."""
        if self.num_queued != self._planned:
            self._planned = self.num_queued
            self._plans.append(plan)

    def start(self) -> int:
        index = super().start()
        self._planned = 0
        if index >= 0:
            self._begun[index] = self._last._replace(plans=tuple(self._plans))
            self._plans.clear()
        return index

    def restore_early(self, restorations: Sequence[Restoration]) -> Event:
        event = super().restore_early(restorations)
        self._ended(self._last)
        return event

    def poll(self) -> None:
        super().poll()
        while self._pending:
            begun, end = self._pending[0]
            seconds = self._timer.seconds(begun.at, end)
            if seconds is None:
                return
            self._pending.popleft()
            self.on_timed(Timed(seconds, begun.tokens, begun.plans))

    def _pass(self, restorations: Sequence[Restoration]) -> RestorePass:
        tokens = 0
        for one in restorations:
            count = one.stop - one.start
            tokens += count
            size = row_bytes(self.path.pool.layout, one.recompute)
            self.restored_bytes += count * size
        self._last = _Begun(self._timer.copies(), tokens, ())
        return super()._pass(restorations)

    def _finish_pass(self) -> bool:
        index = self.gate.current
        had = super()._finish_pass()
        begun = self._begun.pop(index, None)
        if begun is not None:
            self._ended(begun)
        return had

    def _ended(self, begun: _Begun) -> None:
        if len(self._pending) < PENDING:
            self._pending.append((begun, self._timer.copies()))
