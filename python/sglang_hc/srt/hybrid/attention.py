"""Attention of a pass whose requests' state passes through the device round by round.

`RadixAttention` calls one attention back end for each layer. Ours has one of SGLang's own for each
round, which sees a smaller batch whose slots are rows of a place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_hc.hybrid.rows import FIRST_ROW, RoundRows, rounds_of
from sglang_hc.hybrid.units import Units
from sglang_hc.srt.engine.passes import prefilled
from sglang_hc.srt.hybrid.inputs import ProjectionInputs
from sglang_hc.srt.hybrid.pool import PlacePool
from sglang_hc.srt.model.projection import by_sglang
from sglang_hc.srt.model.streamed import Streamed


class _Round(NamedTuple):
    """One round of the pass that runs. batch: SGLang's, of its requests. tokens: (n,) int64 on the
    device, the pass's tokens that belong to it; None for all of them, in their order. old: (a,)
    int64 rows of old hidden states, and positions of theirs. act_tokens: as `RoundRows` has them.
    """

    rows: RoundRows
    batch: Any
    tokens: torch.Tensor | None
    old: torch.Tensor
    positions: torch.Tensor
    act_tokens: torch.Tensor


class StreamedAttention(AttentionBackend):
    """SGLang calls `init_forward_metadata` at the top of a pass, and `forward` in each layer."""

    def __init__(
        self,
        runner: Any,
        streamed: Streamed,
        places: PlacePool,
        units: Units,
        hidden: Sequence[torch.Tensor],
        inputs: ProjectionInputs | None,
        child: Callable[[torch.Tensor], AttentionBackend],
    ) -> None:
        """runner: SGLang's model runner. places: K and V of a round. hidden: of each place, (rows,
        hidden size) in the model's type. inputs: of the projections of the pass, None where nothing
        is kept as hidden states. child: makes a back end that reads and writes in the places, given
        a table of rows by request in place of SGLang's of slots."""
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.units, self.streamed = units, streamed
        self.rows = torch.zeros_like(runner.req_to_token_pool.req_to_token)
        """Rows in a place, by request: those of different rounds are in different requests' rows,
        so all rounds share it."""
        self._places, self._hidden, self._inputs = places, hidden, inputs
        self._first = runner.token_to_kv_pool.start_layer
        self._child = child
        self._children = [child(self.rows)]
        self._rounds: list[_Round] = []

    def support_triton(self) -> bool:
        return self._children[0].support_triton()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """SGLang asks for it without graphs too, for the passes by which it tunes kernels."""
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._rounds = []
        if forward_batch.forward_mode.is_idle():
            return
        new = _new_tokens(forward_batch)
        slots = self._slots(forward_batch)
        if not any(map(np.any, slots)):  # SGLang tunes kernels by passes over nobody's slot
            return
        rounds = rounds_of(slots, new, self.streamed.streaming)
        self._write_rows(forward_batch, rounds)
        while len(self._children) < len(rounds):
            self._children.append(self._child(self.rows))
        for rows, child in zip(rounds, self._children, strict=False):
            one = self._round(forward_batch, rows, len(rounds))
            one.batch.kv_loc_plan = _own_plan(child, one.batch)
            child.init_forward_metadata(one.batch)
            self._rounds.append(one)
        self.units.begin(rounds)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if k is None or v is None or not save_kv_cache or layer.is_cross_attention:
            raise RuntimeError(
                "--hc-throughput: this model's attention reads K and V that it has not computed in "
                "the same layer; leave the flag out"
            )
        index = layer.layer_id - self._first
        if forward_batch.forward_mode.is_idle() or not self._rounds:
            self._drop_input(index)
            return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        found: torch.Tensor | None = None
        for number, one in enumerate(self._rounds):
            self._begin_unit(index, number, one)
            parts = (q, k, v) if one.tokens is None else (part[one.tokens] for part in (q, k, v))
            child = self._children[number]
            out = child.forward(*parts, layer, one.batch, save_kv_cache, **kwargs)
            self.units.leave(index, number, self._new_hidden(index, one))
            if one.tokens is None:
                found = out
            else:
                if found is None:
                    found = out.new_empty((q.shape[0], *out.shape[1:]))
                found[one.tokens] = out
        self._drop_input(index)
        assert found is not None
        return found

    def _drop_input(self, layer: int) -> None:
        if self._inputs is not None:
            self._inputs.drop(layer)

    def _begin_unit(self, layer: int, number: int, one: _Round) -> None:
        """K and V of all old tokens of a unit are in its place, once this work is done."""
        place = self._places.place = self.units.enter(layer, number)
        if one.rows.old.act:
            assert self.streamed.layers is not None
            hidden = self._hidden[place][: one.rows.old.act]
            adapter = self.streamed.layers[layer]
            by_sglang(self._places, adapter, layer, hidden, one.positions, one.old)

    def _new_hidden(self, layer: int, one: _Round) -> torch.Tensor | None:
        """(n, hidden bytes) uint8 of the new tokens that are kept so."""
        if not one.rows.new.act:
            return None
        assert self._inputs is not None
        return self._inputs.of(layer)[one.act_tokens].view(torch.uint8)

    def _slots(self, forward_batch: Any) -> list[np.ndarray[Any, Any]]:
        """Of all tokens of each request, the new ones at the end."""
        lengths = forward_batch.seq_lens_cpu.tolist()
        table = self.req_to_token_pool.req_to_token
        found = table[forward_batch.req_pool_indices, : max(lengths)].cpu().numpy()
        return [row[:length].astype(np.int64) for row, length in zip(found, lengths, strict=True)]

    def _write_rows(self, forward_batch: Any, rounds: Sequence[RoundRows]) -> None:
        longest = max(len(rows) for one in rounds for rows in one.rows)
        written = np.zeros((forward_batch.batch_size, longest), dtype=np.int32)
        for one in rounds:
            for request, rows in zip(one.requests, one.rows, strict=True):
                written[request, : len(rows)] = rows
        rows = torch.from_numpy(written).to(self.rows.device, self.rows.dtype)
        self.rows[forward_batch.req_pool_indices, :longest] = rows

    def _round(self, forward_batch: Any, rows: RoundRows, count: int) -> _Round:
        def on_device(numbers: np.ndarray[Any, Any]) -> torch.Tensor:
            return torch.from_numpy(numbers).to(self.rows.device)

        batch, tokens = copy.copy(forward_batch), None
        if count > 1:
            tokens = on_device(rows.new_tokens)
            _choose(batch, list(rows.requests), on_device(np.array(rows.requests)), tokens)
        batch.out_cache_loc = on_device(rows.new_rows)
        old = np.arange(FIRST_ROW, FIRST_ROW + rows.old.act)
        parts = (on_device(part) for part in (old, rows.positions, rows.act_tokens))
        return _Round(rows, batch, tokens, *parts)


def _new_tokens(forward_batch: Any) -> list[int]:
    """Of each request in a pass."""
    if forward_batch.forward_mode.is_extend():
        return [count for count, _ in prefilled(forward_batch)]
    return [1] * forward_batch.batch_size


def _choose(batch: Any, requests: list[int], index: torch.Tensor, tokens: torch.Tensor) -> None:
    """Leave a batch of SGLang's with some of its requests and tokens. What is not named here is of
    the whole batch, and no attention asks for it."""
    batch.batch_size = len(requests)
    for name in ("req_pool_indices", "seq_lens", "orig_seq_lens"):
        setattr(batch, name, getattr(batch, name)[index])
    batch.seq_lens_cpu = batch.seq_lens_cpu[requests]
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    batch.req_pool_indices_cpu = None
    batch.input_ids, batch.positions = batch.input_ids[tokens], batch.positions[tokens]
    batch.global_num_token_non_padded_cpu = len(tokens)
    if batch.forward_mode.is_extend():
        for name in ("extend_seq_lens", "extend_prefix_lens"):
            setattr(batch, name, getattr(batch, name)[index])
        for name in ("extend_seq_lens_cpu", "extend_prefix_lens_cpu"):
            setattr(batch, name, [getattr(batch, name)[one] for one in requests])
        batch.extend_num_tokens = len(tokens)
        lengths = batch.extend_seq_lens
        batch.extend_start_loc = torch.cumsum(lengths, 0, dtype=lengths.dtype) - lengths


def _own_plan(child: AttentionBackend, batch: Any) -> Any:
    """SGLang's plan of the slots of a batch, of those of a place."""
    translator = child.kv_index_translator
    return None if translator is None else translator.own_plan(batch)
