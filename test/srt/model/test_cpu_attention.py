"""Prefill attention on a CPU against plain attention over each request's own rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_hc.srt.model import cpu_attention
from sglang_hc.srt.model.cpu_attention import ROWS

SLOTS, HEADS, DIM = 4000, 2, 16


def never(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("this is plain causal attention")


def attended(k: torch.Tensor, v: torch.Tensor, requests: list[tuple[int, int]]) -> float:
    """Largest difference for requests of (new, context) tokens whose rows lie anywhere."""
    rng = torch.Generator().manual_seed(len(requests))
    tables = torch.stack([torch.randperm(SLOTS, generator=rng) for _ in requests]).to(torch.int32)
    new = sum(count for count, _ in requests)
    query = torch.randn((new, HEADS, DIM), generator=rng)
    output = torch.empty((new, HEADS, v.shape[2]))
    counts = [(length + context, context, length) for length, context in requests]
    cpu_attention.extend(
        never, None, query, output, k, v, tables, torch.arange(len(requests)),
        *(torch.tensor(column) for column in zip(*counts, strict=True)), causal=True,
    )  # fmt: skip
    start, worst = 0, 0.0
    for table, (length, context) in zip(tables.long(), requests, strict=True):
        seen = table[: context + length]
        mask = torch.ones((length, context + length), dtype=torch.bool).tril(context)
        expected = scaled_dot_product_attention(
            query[start : start + length].transpose(0, 1),
            k[seen].float().transpose(0, 1),
            v[seen].float().transpose(0, 1),
            attn_mask=mask,
        ).transpose(0, 1)
        worst = max(worst, float((output[start : start + length] - expected).abs().max()))
        start += length
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_rows_of_longer_and_shorter_contexts_are_those_of_their_own_request(
    dtype: torch.dtype,
) -> None:
    """The memory into which they are gathered is kept from call to call."""
    rng = torch.Generator().manual_seed(1)
    k, v = (torch.randn((SLOTS, HEADS, DIM), generator=rng).to(dtype) for _ in range(2))
    for requests in ([(3, 40)], [(64, 600), (1, 9), (20, 0)], [(2, 5)], [(100, 600)]):
        assert attended(k, v, requests) < 1e-5


@pytest.mark.parametrize("new", [ROWS - 1, ROWS, ROWS + 1, 2 * ROWS, 2 * ROWS + 5])
def test_many_tokens_behind_a_prefix_run_in_parts(new: int) -> None:
    """A mask that is kept fits fewer rows and columns too, whichever come first."""
    rng = torch.Generator().manual_seed(3)
    k, v = (torch.randn((SLOTS, HEADS, DIM), generator=rng) for _ in range(2))
    assert attended(k, v, [(new, 1), (7, 300), (new, 1500), (new, 0), (30, 2000)]) < 1e-5


def test_a_part_sees_no_token_behind_its_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would compute what the mask hides."""
    seen = []

    def attend(q: torch.Tensor, k: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        seen.append((q.shape[2], k.shape[2]))
        return scaled_dot_product_attention(q, k, *_, **options)

    monkeypatch.setattr(cpu_attention, "scaled_dot_product_attention", attend)
    k = torch.randn((SLOTS, HEADS, DIM), generator=torch.Generator().manual_seed(4))
    attended(k, k, [(ROWS + 20, 500), (ROWS + 20, 0)])
    assert seen == [(ROWS, 500 + ROWS), (20, 520 + ROWS), (ROWS + 20, ROWS + 20)]


def test_values_that_are_part_of_a_latent_row() -> None:
    """Multi-head latent attention keeps one row, and its values are the first part of it."""
    rows = torch.randn((SLOTS, HEADS, DIM), generator=torch.Generator().manual_seed(2))
    assert attended(rows, rows[..., :8], [(7, 130), (64, 64)]) < 1e-5


def test_memory_taken_in_inference_mode_is_written_outside_of_it_too() -> None:
    """SGLang runs the model in that mode if asked to; recomputed layers run without gradients."""
    gathered = cpu_attention._Gathered()
    cache = torch.randn((SLOTS, HEADS, DIM))
    with torch.inference_mode():
        gathered.rows(cache, torch.arange(90))
    with torch.no_grad():
        assert torch.equal(gathered.rows(cache, torch.arange(9)), cache[:9])


def test_a_context_of_half_the_length_takes_no_new_memory() -> None:
    gathered = cpu_attention._Gathered()
    cache = torch.randn((SLOTS, HEADS, DIM))
    first = gathered.rows(cache, torch.arange(600))
    again = gathered.rows(cache, torch.arange(300, 600))
    assert again.data_ptr() == first.data_ptr() and torch.equal(again, cache[300:600])
