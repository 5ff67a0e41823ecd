"""Device slots of an audit: all that it needs, or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_hc.srt.tree.audit_room import AuditRoom, Freed

SLOTS = 64


def tree_of(slots: TokenToKVPoolAllocator, states: TokenToKVPoolAllocator, fails: bool) -> Any:
    def allocate(_: Any) -> torch.Tensor | None:
        if fails:
            raise RuntimeError("planted")
        return states.alloc(1)

    return SimpleNamespace(
        page_size=16, kept=0, device="cpu", allocate=slots.alloc,
        states=SimpleNamespace(allocate=allocate), token_to_kv_pool_allocator=slots,
        req_to_token_pool=SimpleNamespace(mamba_allocator=states),
    )  # fmt: skip


def allocator(size: int) -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(size, torch.float32, "cpu", None, need_sort=False)


@pytest.mark.parametrize("there", [0, 1])
def test_without_a_state_there_are_no_slots(there: int) -> None:
    slots, states = allocator(SLOTS), allocator(1)
    if not there:
        states.alloc(1)
    room = AuditRoom.taken(tree_of(slots, states, fails=False), 33, 64)
    assert slots.available_size() == SLOTS - 48 * there
    assert (room is not None) == bool(there)
    if room is not None:
        assert room.give_back() == Freed(slots=48, states=1)
        assert (slots.available_size(), states.available_size()) == (SLOTS, 1)


def test_an_error_on_the_way_to_a_state_costs_no_slots() -> None:
    slots, states = allocator(SLOTS), allocator(1)
    with pytest.raises(RuntimeError, match="planted"):
        AuditRoom.taken(tree_of(slots, states, fails=True), 33, 64)
    assert slots.available_size() == SLOTS


@pytest.mark.parametrize("page", [1, 16])
def test_windows_are_given_back_once_however_many_slots_there_are(page: int) -> None:
    """A history longer than a pass has more slots than second slots. In pages of 1 the others each
    gave back slot 0, which was then lent to several tokens at once, or the audit ended halfway."""
    full, windows = 8 * page, 6 * page
    pool = SWAKVPool(
        full, windows, page, torch.float32, 1, 1, [0], [1], "cpu", enable_memory_saver=False
    )
    slots = SWATokenToKVPoolAllocator(
        full, windows, page, torch.float32, "cpu", pool, need_sort=False
    )

    def apart(count: int, seconds: int) -> tuple[torch.Tensor, torch.Tensor]:
        return slots.full_attn_allocator.alloc(count), slots.swa_attn_allocator.alloc(seconds)

    tree = SimpleNamespace(
        page_size=page, kept=page, device="cpu", allocate_apart=apart, states=None,
        token_to_kv_pool_allocator=slots,
    )  # fmt: skip
    room = AuditRoom.taken(tree, 5 * page, page)
    assert room is not None and room.held == Freed(slots=5 * page, windows=2 * page)
    for start in range(0, 5 * page, page):
        room.pair(start, start + page)
    room.give_back()
    assert (slots.full_available_size(), slots.swa_available_size()) == (full, windows)
