"""SGLang's speculative decoding on a machine without an accelerator.

Its workers, batches, allocations and bookkeeping run as they are. What its wheel has for a GPU only
is replaced by torch: the kernels that handle trees of proposed tokens, attention over such a tree
and in the steps of a draft model, and the copy of accepted rows. The corpus that NGRAM proposes
from, which would have to be compiled, is replaced by `Oracle`: it proposes trees of which a known
path is right. Draft models propose chains (top-k of 1).
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_hc.srt import cpu
from support.core import Core

ROWS = 6
"""Tokens that a verify pass computes for each request."""

NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(ROWS))


class Oracle:
    """Proposes trees in the place of SGLang's n-gram corpus.

    What follows every sequence is taught. Where a tree's right path lies and how long it is depends
    on the sequence's length alone, so two engines propose the same for the same sequence.
    """

    taught: list[list[int]] = []  # noqa: RUF012  SGLang makes the object; tests teach the class

    def __init__(self, *, draft_token_num: int, **_: Any) -> None:
        self._rows = draft_token_num

    def batch_get(
        self, rids: list[str], ends: list[list[int]], lengths: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (requests * rows,) and masks (requests * rows * rows,), as SGLang's corpus."""
        trees = [self._tree(end, length) for end, length in zip(ends, lengths, strict=True)]
        tokens = np.concatenate([tree[0] for tree in trees])
        return tokens, np.concatenate([tree[1].reshape(-1) for tree in trees])

    def _tree(self, end: list[int], length: int) -> tuple[np.ndarray, np.ndarray]:
        rng = random.Random(length)
        right = self._right(end, length)[: rng.randrange(self._rows)]
        wrong = rng.randrange(self._rows - len(right))
        tokens, parents = [end[-1]], [-1]

        def chain(added: Sequence[int]) -> None:
            parent = 0
            for token in added:
                parents.append(parent)
                parent = len(tokens)
                tokens.append(token)

        def other(count: int) -> list[int]:
            return [rng.randrange(900, 1000) for _ in range(count)]

        chain(other(wrong))  # before the right path, whose rows are then not the first ones
        chain(right)
        chain(other(self._rows - len(tokens)))
        mask = np.zeros((self._rows, self._rows), dtype=np.int64)
        for row, parent in enumerate(parents):
            if parent >= 0:
                mask[row] = mask[parent]
            mask[row, row] = 1
        return np.asarray(tokens, dtype=np.int64), mask

    def _right(self, end: list[int], length: int) -> list[int]:
        for known in self.taught:
            if known[length - len(end) : length] == end:
                return known[length : length + self._rows - 1]
        return []

    def _nothing(self, *_: Any) -> None:
        return None

    batch_put = erase_match_state = synchronize = reset = _nothing


def _chains(mask: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Depth, first child and next sibling of each row of masks (requests * rows * rows,)."""
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    tree = mask.reshape(-1, rows, rows)
    links = _derive_tree_links(tree.to(torch.bool).numpy(), len(tree), rows)
    return tree.to(torch.int64).sum(-1) - 1, *links


def _reconstruct_indices(
    mask: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor, index: torch.Tensor,
    child: torch.Tensor, sibling: torch.Tensor, requests: int, rows: int,
) -> None:  # fmt: skip
    depth, children, siblings = _chains(mask, rows)
    positions.copy_((lengths[:, None] + depth).flatten())
    index.copy_(torch.arange(requests * rows).view(requests, rows))
    child.copy_(children)
    sibling.copy_(siblings)


def _assign_extend_locs(
    requests: torch.Tensor, table: torch.Tensor, start: torch.Tensor, end: torch.Tensor,
    out: torch.Tensor, *_: Any,
) -> None:  # fmt: skip
    found = [
        table[request, low:high]
        for request, low, high in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True)
    ]
    slots = torch.cat(found)
    out[: len(slots)] = slots


def _write_locs(
    requests: torch.Tensor, table: torch.Tensor, start: torch.Tensor, end: torch.Tensor,
    slots: torch.Tensor, _width: int,
) -> None:  # fmt: skip
    at = 0
    for request, low, high in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        table[request, low:high] = slots[at : at + high - low]
        at += high - low


def _verify_greedy(
    predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor,
    candidates: torch.Tensor, retrive_index: torch.Tensor, retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor, target_predict: torch.Tensor,
) -> None:  # fmt: skip
    wanted = target_predict.flatten().tolist()
    for b, tokens in enumerate(candidates.tolist()):
        rows, child, sibling = (
            part[b].tolist() for part in (retrive_index, retrive_next_token, retrive_next_sibling)
        )
        path, node = [0], child[0]
        while node != -1 and len(path) < accept_index.shape[1]:
            if tokens[node] == wanted[rows[path[-1]]]:
                path.append(node)
                node = child[node]
            else:
                node = sibling[node]
        for depth, node in enumerate(path):
            accept_index[b, depth] = rows[node]
            predicts[rows[node]] = wanted[rows[node]]
        accept_token_num[b] = len(path) - 1


def _fill_accepted(index: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    chosen = index.flatten()
    chosen = chosen[chosen >= 0].long()
    out[: len(chosen)] = slots[chosen]


def _build_chain(
    _parents: torch.Tensor, _selected: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor,
    positions: torch.Tensor, index: torch.Tensor, child: torch.Tensor, sibling: torch.Tensor,
    topk: int, _steps: int, rows: int, _mode: int,
) -> None:  # fmt: skip
    assert topk == 1, "only chains are built here"
    requests = len(lengths)
    mask.copy_(torch.ones((rows, rows), dtype=torch.bool).tril().repeat(requests, 1).flatten())
    positions.copy_((lengths[:, None] + torch.arange(rows)).flatten())
    index.copy_(torch.arange(requests * rows).view(requests, rows))
    child.copy_(torch.tensor([*range(1, rows), -1]).repeat(requests, 1))
    sibling.fill_(-1)


def _fill_bonus(
    tokens: torch.Tensor, lengths: torch.Tensor, bonus: torch.Tensor, stride: int
) -> None:
    last = torch.arange(len(lengths)) * stride + lengths.long() - 1
    bonus.copy_(tokens.flatten()[last])


def _assign_draft_locs(
    requests: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor,
    _width: int, topk: int, steps: int,
) -> None:  # fmt: skip
    ends = lengths + topk * steps
    _assign_extend_locs(requests, table, lengths, ends, out)


def _draft_steps(runner: Any, steps: int) -> Any:
    """An attention back end for each step of a draft model, in which a request has one row."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class Step(TorchNativeAttnBackend):
        def __init__(self, step: int) -> None:
            super().__init__(runner)
            self.step = step

        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *rest: Any, **more: Any
        ) -> Any:
            lengths = forward_batch.seq_lens
            forward_batch.seq_lens = lengths + self.step + 1
            try:
                return super().forward_decode(q, k, v, layer, forward_batch, *rest, **more)
            finally:
                forward_batch.seq_lens = lengths

    return SimpleNamespace(
        attn_backends=[Step(step) for step in range(steps)],
        init_forward_metadata=lambda batch: None,
    )


def _verify_attention(
    self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: Any
) -> torch.Tensor:
    """Rows of a tree see what is stored of their request, and their ancestors."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool, rows = self.token_to_kv_pool, batch.spec_info.draft_token_num
    pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    trees = batch.spec_info.custom_mask.view(-1, rows, rows).to(torch.bool)
    out = torch.empty_like(q.view(-1, layer.tp_q_head_num, layer.v_head_dim))
    table = self.req_to_token_pool.req_to_token
    for b, (request, length) in enumerate(
        zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
    ):
        slots = table[request, : length + rows]
        mask = torch.cat([torch.ones((rows, length), dtype=torch.bool), trees[b]], dim=1)
        span = slice(b * rows, (b + 1) * rows)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)[span]
        parts = (part.transpose(0, 1).unsqueeze(0) for part in (query, keys[slots], values[slots]))
        found = scaled_dot_product_attention(
            *parts, attn_mask=mask, scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )  # fmt: skip
        out[span] = found.squeeze(0).transpose(0, 1)
    return out.view(q.shape[0], -1)


def _attention(original: Any) -> Any:
    def forward_extend(
        self: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            return _verify_attention(self, q, k, v, layer, forward_batch)
        return original(self, q, k, v, layer, forward_batch, save_kv_cache)

    return forward_extend


def install(overlap: bool) -> None:
    """Put the stand-ins in place, in a child of `run_in_child`. What SGLang asks `_is_cpu` of has
    kernels for its own CPU build, whose names and arguments the stand-ins have.

    overlap: one pass is launched before the result of the last one is known, as on a GPU; SGLang
    switches that off for speculative decoding on a CPU.
    """
    os.environ["SGLANG_NATIVE_MOVE_KV_CACHE"] = "1"
    for name in ("sgl_kernel", "sgl_kernel.speculative"):
        sys.modules[name] = ModuleType(name)
    ops = {
        "assign_draft_cache_locs_contiguous_cpu": _assign_draft_locs,
        "assign_extend_cache_locs_cpu": _assign_extend_locs,
        "assign_req_to_token_pool_cpu": _write_locs,
        "fill_accept_out_cache_loc_cpu": _fill_accepted,
        "fill_bonus_tokens_cpu": _fill_bonus,
        "sgl_build_tree_kernel_efficient_cpu": _build_chain,
        "sgl_verify_tree_greedy_cpu": _verify_greedy,
    }
    sys.modules["sgl_kernel.speculative"].__dict__.update(
        reconstruct_indices_from_tree_mask=_reconstruct_indices
    )
    for name in (
        "sglang.kernels.ops.speculative.cache_locs",
        "sglang.kernels.ops.speculative.eagle",
        "sglang.srt.mem_cache.allocation",
        "sglang.srt.speculative.eagle_utils",
        "sglang.srt.speculative.spec_utils",
        "sglang.srt.speculative.eagle_worker_common",
        "sglang.srt.speculative.ngram_worker",
    ):
        importlib.import_module(name).__dict__.update(ops, _is_cpu=True)
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.speculative import ngram_worker
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    cpu.check_speculation = lambda args: None
    if overlap:
        speculative_hook._disable_overlap_schedule_for_cpu = lambda args: None
    DraftBackendFactory.create_decode_backend = lambda self: _draft_steps(
        self.draft_model_runner, self.speculative_num_steps
    )
    DraftBackendFactory.create_draft_extend_backend = lambda self: TorchNativeAttnBackend(
        self.draft_model_runner
    )
    ngram_worker.NgramCorpus = Oracle
    memory_pool.copy_all_layer_kv_cache_func = lambda *_: None  # runs once, to compile itself
    TorchNativeAttnBackend.forward_extend = _attention(TorchNativeAttnBackend.forward_extend)


class SpeculativeCore(Core):
    """A `Core` that decodes speculatively.

    speculation: the flags of an algorithm. taught: whole sequences that its oracle knows. overlap:
    see `install`.
    """

    def __init__(
        self, speculation: Sequence[str], *flags: str, taught: Sequence[list[int]] = (),
        overlap: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        install(overlap)
        Oracle.taught = list(taught)
        super().__init__(*speculation, *flags, **more)
        self.proposed: list[list[int]] = []
        """Tokens of every verify pass."""
        from sglang.srt.speculative import eagle_worker_common, ngram_worker

        for module in (eagle_worker_common, ngram_worker):
            module.eagle_sample = self._noting(module.eagle_sample)

    def verified(self, rid: str) -> tuple[int, dict[int, int]]:
        """Verify passes of a finished request, and how many of them accepted so many proposals."""
        req = self.requests[rid]
        counts = enumerate(req.spec_correct_drafts_histogram)
        return req.spec_verify_ct, {drafts: count for drafts, count in counts if count}

    def draft_kv(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """As `kv`, of the draft model's layers."""
        pool = self.scheduler.draft_worker.draft_worker.draft_runner.token_to_kv_pool
        slots = self.slots(tokens)
        parts = zip(pool.k_buffer, pool.v_buffer, strict=True)
        return [part[slots].numpy() for pair in parts for part in pair]

    def _noting(self, original: Any) -> Any:
        def eagle_sample(verify_input: Any, *rest: Any, **more: Any) -> Any:
            self.proposed.append(verify_input.draft_token.tolist())
            return original(verify_input, *rest, **more)

        return eagle_sample


__all__ = ["NGRAM", "ROWS", "Oracle", "SpeculativeCore", "install"]
