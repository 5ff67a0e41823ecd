"""SGLang's pool of a model with sliding windows: one pool of the layers with full attention, one of
those with windows, which has slots of its own (gpt-oss, Gemma 4, MiMo-V2). Chunks of tokens that a
layer attends to (Llama 4) are windows there: the pool keeps as many tokens as a chunk has."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_hc.forms import BLOCK_TOKENS, EndLayout, WindowLayers
from sglang_hc.srt.binding import parallel
from sglang_hc.srt.model.kv_pool import KvPoolRows, UnsupportedPool


class WindowPool(NamedTuple):
    """rows: of the layers with windows, numbered among themselves. layers: numbers in the model of
    those with full attention, and of those with windows. tokens: before an end that these need."""

    rows: KvPoolRows
    full: tuple[int, ...]
    layers: tuple[int, ...]
    tokens: int

    @property
    def layout(self) -> EndLayout:
        """What is kept of them."""
        return EndLayout(WindowLayers(self.layers, self.tokens, self.rows.part_bytes))

    def numbers(self, drafts: int) -> dict[int, int]:
        """Of the model's layers in their order: those with full attention from 0 on, then, behind
        so many layers of a draft model, those with windows."""
        order = {layer: number for number, layer in enumerate(self.full)}
        windows = enumerate(self.layers, len(self.full) + drafts)
        return dict(sorted((order | {layer: number for number, layer in windows}).items()))


def full_attention(pool: Any) -> Any:
    """The pool of the layers with full attention, which may be all of SGLang's `pool`."""
    return pool.full_kv_pool if type(pool) in (SWAKVPool, HybridLinearKVPool) else pool


def window_pool(pool: Any, allocator: Any, tokens: int | None, page_size: int) -> WindowPool | None:
    """The windows of SGLang's `pool`; None where all layers have full attention. tokens: that a
    window reaches back. Raises UnsupportedPool."""
    if type(pool) is not SWAKVPool:
        return None
    if type(allocator) is not SWATokenToKVPoolAllocator or allocator.swa_req_ring:
        raise UnsupportedPool("sliding windows without slots of their own are not supported")
    if BLOCK_TOKENS % page_size:
        raise UnsupportedPool(
            f"--page-size {page_size}: with sliding windows a page must divide {BLOCK_TOKENS} "
            "tokens; give a smaller one"
        )
    if parallel.pp_size() > 1:
        raise UnsupportedPool(
            "--pp-size above 1 with sliding windows that have a pool of their own was not tested"
        )
    full, layers = (
        tuple(sorted(layer for layer, (_, own) in pool.layers_mapping.items() if own is windows))
        for windows in (False, True)
    )
    if not full or not layers or not tokens:
        raise UnsupportedPool("a model needs layers with full attention and with windows")
    for number, layer in (*enumerate(full), *enumerate(layers)):
        assert pool.layers_mapping[layer][0] == number, "SGLang numbers these layers otherwise"
    if isinstance(pool.full_kv_pool, MLATokenToKVPool):
        raise UnsupportedPool("latent attention beside sliding windows was not tested")
    return WindowPool(KvPoolRows(pool.swa_kv_pool, None), full, layers, tokens)
