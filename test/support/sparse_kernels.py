"""torch in place of the kernels of sparse attention that SGLang's wheel has for GPUs only: the
index that chooses tokens, and attention to them. The pool and its layout are SGLang's. The index is
whole: there is no shorter way where all tokens would be chosen.

Sums are in float64, so the state of a token does not depend on the other rows of its pass, whose
number decides how a matrix product of this machine rounds: one bit can choose other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from support import speculation_kernels
from support.speculation_kernels import trees

PAGE, DIM, SCALE = 64, 128, 4
"""Rows of a page of the index, bytes of a key, bytes of its scale."""


def use() -> None:
    """In this process, which has no engine yet and none but these."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.mem_cache import allocation

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.nn.functional.linear = in_float64(torch.nn.functional.linear)
    torch.bmm = in_float64(torch.bmm)
    Indexer.forward_native = Indexer.forward_cuda = chosen_tokens
    ATTENTION_BACKENDS["dsa"] = _backend
    allocation.get_last_loc_triton = allocation.get_last_loc_torch
    speculation_kernels.draft_extension = _backend
    speculation_kernels.draft_steps = _draft_steps


def in_float64(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A product of tensors with sums in float64, rounded to the type of the first."""

    def rounded(*tensors: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        assert tensors[0] is not None
        wide = (tensor if tensor is None else tensor.double() for tensor in tensors)
        found = product(*wide).to(tensors[0].dtype)
        return found if out is None else out.copy_(found)

    return rounded


# -- the index -----------------------------------------------------------------------------------


def write_index(buffer: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
    """keys (n, DIM) float32 into the pages of `buffer` (pages, PAGE * (DIM + SCALE)) uint8: the
    8-bit keys of a page, then their scales."""
    values, scales = rounded_to_8_bits(keys)
    page, row = slots // PAGE, slots % PAGE
    keys_of(buffer)[page, row] = values.view(torch.uint8)
    scales_of(buffer)[page, row] = scales.view(torch.uint8)


def read_index(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Keys (n, DIM) float64 of slots."""
    page, row = slots // PAGE, slots % PAGE
    keys = keys_of(buffer)[page, row].view(torch.float8_e4m3fn)
    return keys.double() * scales_of(buffer)[page, row].view(torch.float32).double()


def keys_of(buffer: torch.Tensor) -> torch.Tensor:
    return buffer[:, : PAGE * DIM].unflatten(1, (PAGE, DIM))


def scales_of(buffer: torch.Tensor) -> torch.Tensor:
    return buffer[:, PAGE * DIM :].unflatten(1, (PAGE, SCALE))


def rounded_to_8_bits(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., DIM) -> float8 values, and (..., 1) float32 scales, powers of two."""
    top = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scales = torch.exp2(torch.ceil(torch.log2(top / torch.finfo(torch.float8_e4m3fn).max)))
    return (rows.float() / scales).to(torch.float8_e4m3fn), scales


def chosen_tokens(
    self: Any, x: torch.Tensor, q_lora: torch.Tensor, positions: torch.Tensor, forward_batch: Any,
    layer_id: int, return_indices: bool = True,
) -> torch.Tensor | None:  # fmt: skip
    """In place of `Indexer.forward`: (tokens, index_topk) int32 positions, -1 behind the last."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend, rotated = get_attn_backend(), self.rope_head_dim
    queries = self.wq_b(q_lora)[0].view(-1, self.n_heads, self.head_dim)
    keys = self.k_norm(self.wk(x)[0].float()).to(queries.dtype).unsqueeze(1)
    turned = self.rotary_emb(
        positions, queries[..., :rotated].contiguous(), keys[..., :rotated].contiguous()
    )
    queries, keys = (
        torch.cat([part.view(*rows.shape[:2], rotated), rows[..., rotated:]], -1)
        for part, rows in zip(turned, (queries, keys), strict=True)
    )
    buffer = backend.token_to_kv_pool.get_index_k_with_scale_buffer(layer_id)
    write_index(buffer, forward_batch.out_cache_loc.long(), keys.squeeze(1))
    values, scales = rounded_to_8_bits(queries)
    weights = torch.nn.functional.linear(x.float(), self.weights_proj.weight.float()).double()
    found = torch.full((len(x), self.index_topk), -1, dtype=torch.int32)
    for rows, slots, mask in spans(backend, forward_batch):
        score = torch.einsum("nhd,td->nht", values[rows].double(), read_index(buffer, slots))
        score = torch.einsum("nht,nh->nt", score.relu(), weights[rows] * scales[rows, :, 0])
        # Where scores are equal, and many are 0, the first ones, however many tokens there are.
        order = score.masked_fill(~mask, -torch.inf).sort(descending=True, stable=True)
        top, chosen = (part[:, : self.index_topk] for part in order)
        chosen = chosen.int().masked_fill(top == -torch.inf, -1)
        found[rows, : chosen.shape[1]] = chosen
    return found if return_indices else None


def spans(backend: Any, batch: Any) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Of each request its rows in the pass, the slots of all its tokens, and which of these each
    row may see."""
    if batch.forward_mode.is_target_verify():
        yield from trees(backend, batch)
        return
    lengths = [length + backend.ahead for length in batch.seq_lens.tolist()]
    decodes = batch.forward_mode.is_decode()
    new = [1] * len(lengths) if decodes else batch.extend_seq_lens.tolist()
    table, at = backend.req_to_token_pool.req_to_token, 0
    for request, length, count in zip(batch.req_pool_indices.tolist(), lengths, new, strict=True):
        places = torch.arange(length)
        mask = places <= places[length - count :].unsqueeze(1)
        yield slice(at, at + count), table[request, :length].long(), mask
        at += count


# -- attention -----------------------------------------------------------------------------------


def _backend(runner: Any) -> Any:
    """In place of SGLang's back end "dsa"."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class SparseAttention(TorchNativeAttnBackend):
        use_mha = False
        ahead = 0
        """Tokens that a draft model has proposed already, of which lengths do not tell."""

        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any,
            save_kv_cache: bool = True, *, q_rope: Any, k_rope: Any, topk_indices: Any, **_: Any,
        ) -> Any:  # fmt: skip
            heads, rank = layer.tp_q_head_num, layer.v_head_dim
            rows = torch.cat([k.view(-1, 1, rank), k_rope.view(len(k), 1, -1)], -1)
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, rows, rows)
            latents = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
            queries = torch.cat(
                [q.view(-1, heads, rank), q_rope.view(-1, heads, rows.shape[-1] - rank)], -1
            )
            out = torch.empty((len(queries), heads, rank), dtype=q.dtype)
            for own, slots, mask in spans(self, forward_batch):
                seen = latents[slots, 0].double()
                last = mask.shape[1]  # where -1 goes
                chosen = topk_indices[own].long()
                chosen = torch.where(chosen < 0, last, chosen)
                picked = torch.zeros((len(mask), last + 1), dtype=torch.bool)
                picked = picked.scatter_(1, chosen, True)[:, :last]
                score = torch.einsum("nhd,td->hnt", queries[own].double(), seen) * layer.scaling
                share = score.masked_fill(~picked, -torch.inf).softmax(-1)
                out[own] = torch.einsum("hnt,td->nhd", share, seen[:, :rank]).to(q.dtype)
            return out.flatten(1)

        forward_decode = forward_extend

    return SparseAttention(runner)


def _draft_steps(runner: Any, steps: int, topk: int) -> Any:
    """In place of `speculation_kernels.draft_steps`, of chains."""
    assert topk == 1
    backends = [_backend(runner) for _ in range(steps)]
    for step, backend in enumerate(backends, 1):
        backend.ahead = step
    return SimpleNamespace(attn_backends=backends, init_forward_metadata=lambda batch: None)
