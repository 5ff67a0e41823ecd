"""SGLang's allocator of slots, by kinds (`hybrid.slots`)."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from sglang_hc.hybrid.slots import FreeSlots
from sglang_hc.policy.streaming import Streaming


class TwoKindsAllocator(TokenToKVPoolAllocator):
    """For pages of one token. SGLang ends the server when a request gets no slot, so one kind takes
    the place of the other as long as any is free."""

    def __init__(self, streaming: Streaming, dtype: torch.dtype, device: str, kvcache: Any) -> None:
        self.slots = FreeSlots(streaming)
        super().__init__(streaming.tokens, dtype, device, kvcache, need_sort=False)

    def clear(self) -> None:
        self.slots.clear()
        self.free_group = None

    def available_size(self) -> int:
        return self.slots.count

    def get_all_free_pages(self) -> torch.Tensor:
        return torch.from_numpy(self.slots.all()).to(self.device)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        found = self.slots.take(need_size)
        return None if found is None else torch.from_numpy(found).to(self.device)

    def free(self, free_index: torch.Tensor) -> None:
        if self.free_group is not None:
            self.free_group.append(self._copy_for_free_group(free_index))
        elif free_index.numel():
            self.slots.give_back(free_index.to("cpu", torch.int64).numpy())
