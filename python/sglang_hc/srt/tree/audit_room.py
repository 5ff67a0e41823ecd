"""Where an audit computes: device slots that nobody else has, of each kind that the model needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sglang_hc.srt.model.recompute import ROW


class Freed(NamedTuple):
    """How many slots of each kind are free again."""

    slots: int = 0
    windows: int = 0
    states: int = 0


@dataclass(frozen=True)
class AuditRoom:
    """slots: (n,) int64, of tokens in their order. windows: (m,) int64 second slots, which the
    tokens have in turn: as many as a pass reads and writes; none without sliding windows. state:
    (1,) int64, of the recurrent layers; None without them."""

    tree: Any
    slots: torch.Tensor
    windows: torch.Tensor
    state: torch.Tensor | None

    @classmethod
    def taken(cls, tree: Any, tokens: int, chunk: int) -> AuditRoom | None:
        """Of the `HcRadixCache` tree, for passes of at most `chunk` tokens; None where there is no
        room."""
        count = -(-tokens // tree.page_size) * tree.page_size
        second = torch.empty(0, dtype=torch.int64, device=tree.device)
        slots: torch.Tensor | None
        if tree.kept:
            apart = tree.allocate_apart(count, min(count, tree.kept + chunk))
            slots, second = (None, second) if apart is None else apart
        else:
            slots = tree.allocate(count)
        if slots is None:
            return None
        room, state = cls(tree, slots, second, None), None
        if tree.states is None:
            return room
        try:
            state = tree.states.allocate(tree)
        finally:
            if state is None:
                room.give_back()
        return None if state is None else cls(tree, slots, second, state)

    @property
    def held(self) -> Freed:
        """Slots of each kind."""
        return Freed(len(self.slots), len(self.windows), 0 if self.state is None else 1)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [one for one in (self.slots, self.windows, self.state) if one is not None]

    def second(self, start: int, stop: int) -> torch.Tensor:
        """Second slots of tokens [start, stop), which have them since `pair`."""
        numbers = torch.arange(start, stop, device=self.windows.device)
        return self.windows[numbers % len(self.windows)]

    def pair(self, start: int, stop: int) -> None:
        """Tokens [start, stop) get second slots for a pass. On the current stream, which is that of
        all who give slots."""
        if len(self.windows):
            pairs = self.slots[start:stop], self.second(start, stop)
            self.tree.token_to_kv_pool_allocator.set_full_to_swa_mapping(*pairs)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A pass begins with the state, and leaves it. On the compute stream."""
        if self.state is None:
            yield
            return
        states = self.tree.req_to_token_pool.req_index_to_mamba_index_mapping
        before = states[ROW].clone()
        states[ROW] = self.state[0].to(states.dtype)
        try:
            yield
        finally:
            states[ROW] = before

    def give_back(self) -> Freed:
        """Whoever gets them next writes behind what is still written, on the same stream."""
        allocator = self.tree.token_to_kv_pool_allocator
        if len(self.windows):
            first, others = self.slots[: len(self.windows)], self.slots[len(self.windows) :]
            allocator.clear_full_to_swa_mapping(self.slots)
            allocator.set_full_to_swa_mapping(first, self.windows)  # with which they are freed
            allocator.free(first)
            allocator.free_full(others)  # `free` would give back a second slot for each of them
        else:
            allocator.free(self.slots)
        if self.state is not None:
            self.tree.req_to_token_pool.mamba_allocator.free(self.state)
        return self.held
