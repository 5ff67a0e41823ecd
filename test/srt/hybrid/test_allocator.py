"""What SGLang asks of an allocator, of one with two kinds of slots."""

from __future__ import annotations

import torch

from sglang_hc.policy.streaming import Streaming
from sglang_hc.srt.hybrid.allocator import TwoKindsAllocator


def made() -> TwoKindsAllocator:
    return TwoKindsAllocator(Streaming(12, 4, 2, 12), torch.float32, "cpu", None)


def test_a_slot_is_given_out_as_long_as_one_of_either_kind_is_free() -> None:
    """SGLang ends the server at None."""
    allocator = made()
    found = [allocator.alloc(1) for _ in range(12)]
    assert all(one is not None and one.dtype == torch.int64 for one in found)
    assert allocator.alloc(1) is None and allocator.available_size() == 0
    assert sorted(torch.cat(found).tolist()) == list(range(1, 13))


def test_slots_that_are_freed_in_a_group_are_free_at_its_end() -> None:
    allocator = made()
    slots = allocator.alloc(5)
    assert slots is not None
    row = slots.clone()
    allocator.free_group_begin()
    allocator.free(row[:2])
    allocator.free(row[2:])
    row.zero_()  # SGLang may reuse the memory before the group ends
    assert allocator.available_size() == 7
    allocator.free_group_end()
    assert allocator.available_size() == 12
    assert allocator.get_all_free_pages().tolist() == list(range(1, 13))


def test_all_are_free_when_it_is_cleared() -> None:
    allocator = made()
    allocator.alloc(9)
    allocator.free(torch.empty(0, dtype=torch.int64))
    assert allocator.available_size() == 3
    allocator.clear()
    assert allocator.available_size() == 12 and allocator.slots.act == 4
