"""What is stored of a block beside what its tokens give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
from sglang.srt.layers.moe.topk import TopK

from sglang_hc.capture.taps import TapBuffer
from sglang_hc.forms import Form
from sglang_hc.policy.audit import STATE_FACTORS, bound
from sglang_hc.srt.model.kv_pool import KvPoolRows
from sglang_hc.srt.model.recompute import COARSE
from sglang_hc.srt.model.startup_checks import TOLERANCE
from sglang_hc.srt.model.state_pool import StatePool
from sglang_hc.srt.model.window_pool import WindowPool
from sglang_hc.srt.tree.audit_room import AuditRoom
from sglang_hc.store.host_memory import HostMemory
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.ends import EndPart


class Difference(NamedTuple):
    """A layer whose state is not what the tokens give. error: relative, as `error_of`."""

    form: Form
    layer: int
    error: float


class _Pair(NamedTuple):
    """Of one layer what is stored, and what was computed again: (rows, width) each. dtype: by which
    it is rounded."""

    form: Form
    layer: int
    stored: torch.Tensor
    again: torch.Tensor
    dtype: torch.dtype


def chooses(model: torch.nn.Module) -> bool:
    """Whether a layer of the model chooses, experts or tokens, among others that are nearly as
    good: then rounding may choose others, behind the first layer."""
    return any(isinstance(module, TopK | Indexer) for module in model.modules())


def error_of(again: torch.Tensor, stored: torch.Tensor, most: bool) -> float:
    """The largest difference in a row, relative to the largest magnitude of `again`: of the row
    that differs most, or of the median row. nan where an element of any row is."""
    again, stored = again.float(), stored.float()
    rows = (again - stored).abs().flatten(1).amax(1)
    found = rows.median() if most else rows.max()
    return float(found) / (float(again.abs().max()) or 1.0)


class Comparison:
    """Reads what an audit computed, and the same blocks in host memory."""

    def __init__(
        self, memory: HostMemory, pool: KvPoolRows, windows: WindowPool | None,
        states: StatePool | None, taps: TapBuffer | None, runner: Any,
    ) -> None:  # fmt: skip
        """pool: of the layers with full attention."""
        self._stored, self._ends = memory.pool, memory.ends
        self._pool, self._windows, self._states = pool, windows, states
        self._taps = taps
        self._kv_dtype: torch.dtype = runner.kv_cache_dtype
        self._dtype: torch.dtype = runner.dtype
        self._chooses = chooses(runner.model)
        layout = memory.pool.layout
        full = range(layout.plan.num_layers)
        if layout.ends is not None:
            others = len(layout.ends.window.layers) + len(layout.ends.state.layers)
            self._full: Sequence[int] = layout.ends.full_layers(len(full) + others)
        else:
            self._full = full

    def differences(
        self, node: BlockNode, row: int, room: AuditRoom, first: int
    ) -> list[Difference]:
        """Of each form of a block the first layer that is wrong. row: of the block in the last
        pass, which ended behind it where its state is compared. first: its first token."""
        wrong: dict[Form, Difference] = {}
        for pair in self._pairs(node, row, room, first):
            behind_choice = self._chooses and pair.layer > 0
            tolerance = TOLERANCE.get(pair.dtype, COARSE)
            if pair.form is Form.STATE:  # which may be kept in more digits than its factors
                tolerance = STATE_FACTORS * max(tolerance, TOLERANCE.get(self._dtype, COARSE))
            error = error_of(pair.again, pair.stored, behind_choice)
            if not error <= bound(tolerance, pair.layer, behind_choice):
                wrong.setdefault(pair.form, Difference(pair.form, pair.layer, error))
        return list(wrong.values())

    def _pairs(self, node: BlockNode, row: int, room: AuditRoom, first: int) -> Iterator[_Pair]:
        plan, rows = self._stored.layout.plan, node.num_tokens
        for index, layer in enumerate(plan.hidden_layers):
            assert self._taps is not None
            again = self._taps.states[index, row : row + rows]
            kept = torch.from_numpy(self._stored.hidden[node.slot, index, :rows])
            yield _Pair(Form.HIDDEN, layer, kept.view(again.dtype), again.cpu(), again.dtype)
        slots = room.slots[first : first + rows]
        stored = [part[node.slot] for part in self._stored.kv]
        for layer, *pair in self._rows(self._pool, plan.kv_layers, slots, stored, rows):
            yield _Pair(Form.KV, self._full[layer], *pair)
        if node.end is not None and node.end.ready:
            yield from self._end_pairs(node.end, room, first)

    def _end_pairs(self, part: EndPart, room: AuditRoom, first: int) -> Iterator[_Pair]:
        assert self._ends is not None
        rows = part.node.num_tokens
        if self._windows is not None:
            pool, layers = self._windows.rows, self._windows.layers
            slots, stored = room.second(first, first + rows), self._ends.window
            parts = [kept[part.slot] for kept in stored]
            for index, *pair in self._rows(pool, range(len(layers)), slots, parts, rows):
                yield _Pair(Form.WINDOW, layers[index], *pair)
        if self._states is not None and room.state is not None:
            names = self._states.layers.dtypes
            for kept, again, name in zip(
                self._ends.state, self._states.copy(room.state), names, strict=True
            ):
                dtype, stored_part = getattr(torch, name), torch.from_numpy(kept[part.slot])
                for index, layer in enumerate(self._states.layers.layers):
                    pair = stored_part[index].view(dtype), again[index].cpu().view(dtype)
                    yield _Pair(Form.STATE, layer, *pair, dtype)

    def _rows(
        self, pool: KvPoolRows, layers: Sequence[int], slots: torch.Tensor, stored: Sequence[Any],
        rows: int,
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.dtype]]:  # fmt: skip
        """Of each layer, and each part of its rows: its number, what is stored in the first `rows`
        of `stored`, (layers, rows, bytes) uint8, what the device has in `slots`, and by which type
        both are rounded."""
        if not len(layers):
            return
        shape = len(layers), rows
        again = [
            torch.empty((*shape, width), dtype=torch.uint8, device=pool.device)
            for width in pool.part_bytes
        ]
        pool.gather(layers, slots, again, 0)
        for index, layer in enumerate(layers):
            kept = [torch.from_numpy(part[index, :rows]) for part in stored]
            found = [part[index].cpu() for part in again]
            values = (pool.values(parts, self._kv_dtype) for parts in (kept, found))
            for one, other in zip(*values, strict=True):
                yield layer, one.rows, other.rows, one.dtype
