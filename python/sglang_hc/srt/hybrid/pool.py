"""SGLang's KV pools where state lies in host memory: one that has slots alone, and one with the
places through which state passes."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, NoOpMHATokenToKVPool

from sglang_hc.hybrid.units import PLACES


class PlacePool(MHATokenToKVPool):
    """K and V of one round, in as many "layers" as there are places. Back ends read and write the
    one that is set, whichever layer they name."""

    place = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(
            *args, **{**kwargs, "layer_num": PLACES, "start_layer": 0, "end_layer": PLACES - 1}
        )

    def _get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return super()._get_key_buffer(self.place)

    def _get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return super()._get_value_buffer(self.place)

    def set_kv_buffer(self, layer: Any, loc_info: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["layer_id_override"] = self.place
        super().set_kv_buffer(layer, loc_info, *args, **kwargs)

    def rows(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a place, (rows, bytes) uint8 each."""
        k, v = self.k_buffer[place], self.v_buffer[place]
        return k.flatten(1).view(torch.uint8), v.flatten(1).view(torch.uint8)


class SlotsOnly(NoOpMHATokenToKVPool):
    """What SGLang counts slots by. Nobody reads or writes state here."""

    places: PlacePool

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        raise RuntimeError(
            "--hc-throughput: this model reads the KV pool by a way on which state does not come "
            "from host memory; leave the flag out"
        )

    get_value_buffer = get_key_buffer
