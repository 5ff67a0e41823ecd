"""torch in place of what SGLang's wheel has for GPUs only of models with sliding windows: attention
to a window, with sinks, and the activation of gpt-oss. The pools, the mapping from one to the other
and what is freed when are SGLang's.

SGLang's table of these models lists `intel_amx` for a CPU, and takes torch_native where a CPU has
no AMX: both are replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from support.speculation_kernels import trees

BACKEND = "intel_amx"


def use() -> None:
    """In this process, which has no engine yet and none but these."""
    import sglang.srt.layers.moe.fused_moe_native as moe
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    moe.swiglu_gpt_oss_sigmoid_alpha = gated
    ATTENTION_BACKENDS[BACKEND] = ATTENTION_BACKENDS["torch_native"] = _backend
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.cpu.device = lambda *_: contextlib.nullcontext()  # type: ignore[attr-defined]


def gated(rows: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """(n, 2 * width) gate and up in turn -> (n, width), as in gpt-oss."""
    gate, up = rows[..., ::2].clamp(max=limit), rows[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def _backend(runner: Any) -> Any:
    """In place of SGLang's back end for these models."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    class WindowAttention(TorchNativeAttnBackend):
        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any,
            save_kv_cache: bool = True, sinks: Any = None, **_: Any,
        ) -> Any:  # fmt: skip
            pool = self.token_to_kv_pool
            if save_kv_cache and k is not None:
                new = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
                pool.set_kv_buffer(layer, new, k, v)
            keys, values = (
                pool.get_key_buffer(layer.layer_id),
                pool.get_value_buffer(layer.layer_id),
            )
            window = layer.sliding_window_size
            window = None if window is None or window < 0 else window
            own = getattr(pool, "layers_mapping", {}).get(layer.layer_id, (0, False))[1]
            queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            out = queries.new_empty((len(queries), layer.tp_q_head_num, layer.v_head_dim))
            chunk = runner.attention_chunk_size if layer.use_irope else None
            for rows, slots, seen in spans(self, forward_batch, window, chunk):
                places = pool.translate_loc_from_full_to_swa(slots) if own else slots
                assert bool((places > 0).all()), "a row of the window is not in its pool"
                shape = layer.tp_k_head_num, layer.tp_q_head_num // layer.tp_k_head_num
                heads = queries[rows].unflatten(1, shape).double()
                scores = torch.einsum("nkgd,tkd->kgnt", heads, keys[places].double())
                scores = scores * layer.scaling
                if layer.logit_cap:
                    scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
                scores = scores.masked_fill(~seen, -torch.inf)
                if sinks is not None:
                    sink = sinks.double().view(*shape, 1, 1).expand(*scores.shape[:3], 1)
                    scores = torch.cat([scores, sink], -1)
                share = scores.softmax(-1)[..., : len(slots)]
                found = torch.einsum("kgnt,tkd->nkgd", share, values[places].double())
                out[rows] = found.flatten(1, 2).to(out.dtype)
            return out.flatten(1)

        forward_decode = forward_extend

    return WindowAttention(runner)


def spans(
    backend: Any, batch: Any, window: int | None, chunk: int | None = None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Of each request its rows in the pass, the slots of the tokens that they see, and which of
    these each row may see: itself and the `window` tokens before it, or those of its chunk of
    `chunk` tokens up to it (Llama 4), or all."""
    if batch.forward_mode.is_target_verify():
        yield from _verified(backend, batch, window)
        return
    lengths = batch.seq_lens.tolist()
    decodes = batch.forward_mode.is_decode()
    new = [1] * len(lengths) if decodes else batch.extend_seq_lens.tolist()
    table, at = backend.req_to_token_pool.req_to_token, 0
    for request, length, count in zip(batch.req_pool_indices.tolist(), lengths, new, strict=True):
        first = 0 if window is None else max(0, length - count - window)
        if chunk is not None:
            first = (length - count) // chunk * chunk
        keys, own = torch.arange(first, length), torch.arange(length - count, length).unsqueeze(1)
        seen = keys <= own
        if window is not None:
            seen &= keys >= own - window
        if chunk is not None:
            seen &= keys // chunk == own // chunk
        yield slice(at, at + count), table[request, first:length].long(), seen
        at += count


def _verified(
    backend: Any, batch: Any, window: int | None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """As `spans`, of a pass that verifies: a window ends at the place of a row in its text."""
    for rows, all_slots, sees in trees(backend, batch):
        own = batch.positions[rows]
        length, first = len(all_slots) - len(own), 0
        seen = sees
        if window is not None:
            first = max(0, length - window)  # what is before that may have no row any more
            places = torch.cat([torch.arange(length), own])
            seen = sees & (places >= own.unsqueeze(1) - window)
        yield rows, all_slots[first:], seen[:, first:]
