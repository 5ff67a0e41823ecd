"""Host memory that holds the state of all tokens, by slot: what the device has no room for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sglang_hc.policy.streaming import Streaming
from sglang_hc.store.host_memory import mapped


class Mirror:
    """Rows of every slot and layer.

    hidden: (layers, slots kept as hidden states beside those on the device, hidden bytes) uint8.
    parts: K and V, each (layers, slots kept so, bytes) uint8. `hybrid.rows` says whose a row is.
    """

    def __init__(
        self, streaming: Streaming, layers: int, hidden_bytes: int, part_bytes: Sequence[int]
    ) -> None:
        """Raises OSError when there is not so much memory."""
        act = streaming.act_tokens - streaming.device_act
        kv = streaming.tokens - streaming.act_tokens
        shapes = [(layers, act, hidden_bytes), *((layers, kv, size) for size in part_bytes)]
        self.memory = mapped(sum(map(math.prod, shapes)))
        rest = torch.frombuffer(self.memory, dtype=torch.uint8)
        arrays = []
        for shape in shapes:
            size = math.prod(shape)
            arrays.append(rest[:size].view(shape))
            rest = rest[size:]
        self.hidden, self.parts = arrays[0], tuple(arrays[1:])

    @property
    def layers(self) -> int:
        return self.hidden.shape[0]

    @property
    def bytes(self) -> int:
        """That are used."""
        return self.hidden.numel() + sum(part.numel() for part in self.parts)
