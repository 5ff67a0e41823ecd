"""torch in place of what SGLang's wheel has for GPUs only: the kernels of speculative decoding that
handle trees of proposed tokens, attention over such a tree and in the steps of a draft model, and
sampling. Their arguments are those of SGLang's own CPU build or of its kernels for GPUs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

# -- where tokens lie ----------------------------------------------------------------------------


def assign_extend_locs(
    requests: torch.Tensor, table: torch.Tensor, start: torch.Tensor, end: torch.Tensor,
    out: torch.Tensor, *_: Any,
) -> None:  # fmt: skip
    found = [
        table[request, low:high]
        for request, low, high in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True)
    ]
    slots = torch.cat(found)
    out[: len(slots)] = slots


def write_locs(
    requests: torch.Tensor, table: torch.Tensor, start: torch.Tensor, end: torch.Tensor,
    slots: torch.Tensor, _width: int,
) -> None:  # fmt: skip
    at = 0
    for request, low, high in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        table[request, low:high] = slots[at : at + high - low]
        at += high - low


def assign_draft_locs(
    requests: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor,
    _width: int, topk: int, steps: int,
) -> None:  # fmt: skip
    ends = lengths + topk * steps
    assign_extend_locs(requests, table, lengths, ends, out)


def fill_accepted(index: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    chosen = index.flatten()
    chosen = chosen[chosen >= 0].long()
    out[: len(chosen)] = slots[chosen]


def fill_bonus(
    tokens: torch.Tensor, lengths: torch.Tensor, bonus: torch.Tensor, stride: int
) -> None:
    last = torch.arange(len(lengths)) * stride + lengths.long() - 1
    bonus.copy_(tokens.flatten()[last])


def gather_extras(indices: torch.Tensor, *buffers: torch.Tensor | None) -> tuple[Any, ...]:
    """What a draft model left behind the last pass, with overlap scheduling."""
    return tuple(buffer[indices] if buffer is not None else None for buffer in buffers)


# -- trees ---------------------------------------------------------------------------------------


def reconstruct_indices(
    mask: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor, index: torch.Tensor,
    child: torch.Tensor, sibling: torch.Tensor, requests: int, rows: int,
) -> None:  # fmt: skip
    """mask: (requests * rows * rows,), which rows of its tree each row sees."""
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    tree = mask.reshape(-1, rows, rows)
    depth = tree.to(torch.int64).sum(-1) - 1
    children, siblings = _derive_tree_links(tree.to(torch.bool).numpy(), len(tree), rows)
    positions.copy_((lengths[:, None] + depth).flatten())
    index.copy_(torch.arange(requests * rows).view(requests, rows))
    child.copy_(children)
    sibling.copy_(siblings)


def build_tree(
    parents: torch.Tensor, selected: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor,
    positions: torch.Tensor, index: torch.Tensor, child: torch.Tensor, sibling: torch.Tensor,
    topk: int, _steps: int, rows: int, _mode: int,
) -> None:  # fmt: skip
    """selected: (requests, rows - 1), numbers of the tokens that a draft model proposed, in the
    order of its steps: `topk` behind the root, then `topk` behind each of `topk` tokens. parents:
    for each such group the number of the token that it is behind."""
    trees = torch.zeros((len(lengths), rows, rows), dtype=torch.bool)
    trees[:, range(rows), range(rows)] = True
    for tree, numbers, groups in zip(trees, selected.tolist(), parents.tolist(), strict=True):
        row_of = {number: row for row, number in enumerate(numbers, 1)}
        for number, row in row_of.items():
            group = number // topk
            parent = row_of.get(groups[group]) if group else 0
            if parent is not None:  # it is left out where a child's score is as good as its own
                tree[row] |= tree[parent]
    mask.copy_(trees.flatten())
    reconstruct_indices(mask, lengths, positions, index, child, sibling, len(lengths), rows)


# -- which proposals are accepted ----------------------------------------------------------------


def verify_greedy(
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


def verify_sampled(
    *, predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor,
    candidates: torch.Tensor, retrive_index: torch.Tensor, retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor, uniform_samples: torch.Tensor, target_probs: torch.Tensor,
    **_: Any,
) -> None:  # fmt: skip
    """A token is drawn behind each accepted row; the child that proposes it is accepted. So tokens
    are distributed as without speculation, and with the coins of `coins_by_position` they are the
    same. SGLang's kernel accepts children of other numbers, with the same probabilities."""
    for b, tokens in enumerate(candidates.tolist()):
        rows, child, sibling, coins = (
            part[b].tolist()
            for part in (retrive_index, retrive_next_token, retrive_next_sibling, uniform_samples)
        )
        path, node = [], 0
        while node != -1 and len(path) < accept_index.shape[1]:
            wanted = _drawn(target_probs[b, node], coins[len(path)])
            predicts[rows[node]] = wanted
            path.append(rows[node])
            node = child[node]
            while node != -1 and tokens[node] != wanted:
                node = sibling[node]
        accept_index[b, : len(path)] = torch.tensor(path)
        accept_token_num[b] = len(path) - 1


def _drawn(weights: torch.Tensor, coin: float) -> int:
    """A number with the probability of its weight. coin: in [0, 1)."""
    sums = weights.double().cumsum(0)
    return min(int(torch.searchsorted(sums, coin * sums[-1], right=True)), len(weights) - 1)


def _coin(position: int) -> float:
    return random.Random(position).random()


def coins_by_position(
    seq_lens: torch.Tensor, draft_token_num: int, **_: Any
) -> tuple[torch.Tensor, None]:
    """In place of random numbers, so that two engines throw the same: they depend on the place in
    the sequence alone, that of the token behind which another one is drawn."""
    rows = [[_coin(length + row) for row in range(draft_token_num)] for length in seq_lens.tolist()]
    return torch.tensor(rows, dtype=torch.float64), None


def sample_by_position(
    probs: torch.Tensor, sampling_seed: None, positions: torch.Tensor
) -> torch.Tensor:
    """The same where nothing is proposed."""
    drawn = [_drawn(row, _coin(p)) for row, p in zip(probs, positions.tolist(), strict=True)]
    return torch.tensor(drawn, dtype=torch.int32)


# -- attention -----------------------------------------------------------------------------------


def _attend(
    backend: Any, layer: Any, query: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Rows (n, heads, width) of one request over what lies in its slots. mask: (n, slots) bool."""
    pool = backend.token_to_kv_pool
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    parts = (part.transpose(0, 1).unsqueeze(0) for part in (query, keys[slots], values[slots]))
    found = scaled_dot_product_attention(
        *parts, attn_mask=mask, scale=layer.scaling,
        enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
    )  # fmt: skip
    return found.squeeze(0).transpose(0, 1)


def draft_extension(runner: Any) -> Any:
    """An attention back end for the pass of a draft model behind one that verified."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(runner)


def draft_steps(runner: Any, steps: int, topk: int) -> Any:
    """An attention back end for each step of a draft model, in which a request has `topk` rows.

    Each row sees what is stored of its request, and the slots of its own number: `steps` of them
    lie behind the request's end for each row.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class Step(TorchNativeAttnBackend):
        def __init__(self, step: int) -> None:
            super().__init__(runner)
            self.step = step

        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *rest: Any, **more: Any
        ) -> Any:
            _store(self, layer, forward_batch, k, v)
            query = q.reshape(-1, 1, layer.tp_q_head_num, layer.qk_head_dim)
            found = []
            for request, length in _requests(forward_batch):
                row = self.req_to_token_pool.req_to_token[request]
                for branch in range(topk):
                    first = length + branch * steps
                    slots = torch.cat([row[:length], row[first : first + self.step + 1]])
                    found.append(_attend(self, layer, query[len(found)], slots, None))
            return torch.cat(found).view(len(found), -1)

    return SimpleNamespace(
        attn_backends=[Step(step) for step in range(steps)],
        init_forward_metadata=lambda batch: None,
    )


def verify_attention(
    self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: Any
) -> torch.Tensor:
    """Rows of a tree see what is stored of their request, and their ancestors."""
    _store(self, layer, batch, k, v)
    query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    found = [
        _attend(self, layer, query[rows], slots, seen) for rows, slots, seen in trees(self, batch)
    ]
    return torch.cat(found).view(q.shape[0], -1)


def trees(backend: Any, batch: Any) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Of each request of a verify pass its rows in the pass, the slots of all its tokens and of its
    tree, in this order, and which of them each row sees: all tokens, and its ancestors."""
    count, table = batch.spec_info.draft_token_num, backend.req_to_token_pool.req_to_token
    masks = batch.spec_info.custom_mask.view(-1, count, count).to(torch.bool)
    for number, (request, length) in enumerate(_requests(batch)):
        stored = torch.ones((count, length), dtype=torch.bool)
        seen = torch.cat([stored, masks[number]], dim=1)
        rows = slice(number * count, (number + 1) * count)
        yield rows, table[request, : length + count].long(), seen


def _store(self: Any, layer: Any, batch: Any, k: torch.Tensor, v: torch.Tensor) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)


def _requests(batch: Any) -> list[tuple[int, int]]:
    """Row in SGLang's table of slots and length of each request of a batch."""
    return list(zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True))


def with_verification(forward_extend: Callable[..., Any]) -> Callable[..., Any]:
    """An attention back end's method that knows verify passes too."""

    def extend(
        self: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            return verify_attention(self, q, k, v, layer, forward_batch)
        return forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache)

    return extend
