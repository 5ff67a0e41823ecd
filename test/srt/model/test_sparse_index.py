"""The index of sparse attention in the KV pool, in the published model's own shape: each token's
key and scale are parts of its row, wherever SGLang has them in a page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from sglang_hc.srt.model.columns import Columns
from sglang_hc.srt.model.kv_pool import KvPoolRows, UnsupportedPool
from support.sparse_kernels import DIM, PAGE, SCALE, keys_of, scales_of
from support.sparse_pool import LAYERS, PAGES, pool_of
from support.waiting import HANGS_S

SLOTS = st.lists(st.integers(0, PAGES * PAGE - 1), min_size=1, max_size=80, unique=True)


def read(rows: KvPoolRows, layers: Sequence[int], slots: list[int]) -> list[torch.Tensor]:
    """Parts of rows as they are saved, (layers, slots, bytes), from the middle of their target."""
    targets = [
        torch.zeros((len(layers), len(slots) + 2, width), dtype=torch.uint8)
        for width in rows.part_bytes
    ]
    rows.gather(layers, torch.tensor(slots), targets, 1)
    assert not any(bool(part[:, at].any()) for part in targets for at in (0, -1))
    return [part[:, 1:-1] for part in targets]


def by_pages(pool: Any, layer: int, slots: list[int]) -> list[torch.Tensor]:
    """The same, as SGLang's kernels find them."""
    at = torch.tensor(slots)
    index = pool.index_k_with_scale_buffer[layer]
    return [
        pool.kv_buffer[layer].flatten(1)[at].view(torch.uint8),
        keys_of(index)[at // PAGE, at % PAGE],
        scales_of(index)[at // PAGE, at % PAGE],
    ]


@pytest.mark.parametrize(
    ("dtype", "width", "latent"),
    [(torch.bfloat16, 576, 1152), (torch.float8_e4m3fn, 656, 656), (torch.float8_e4m3fn, 576, 576)],
    ids=["bfloat16", "8 bits with scales", "8 bits"],
)
@given(slots=SLOTS)
def test_a_row_is_the_latent_its_key_and_its_scale(
    dtype: torch.dtype, width: int, latent: int, slots: list[int]
) -> None:
    pool = pool_of(dtype, width)
    rows = KvPoolRows(pool, None)
    assert rows.part_bytes == (latent, DIM, SCALE)
    saved = read(rows, range(LAYERS), slots)
    for layer in range(LAYERS):
        for part, wanted in zip(saved, by_pages(pool, layer, slots), strict=True):
            assert torch.equal(part[layer], wanted)


@given(source=SLOTS, data=st.data())
def test_rows_that_come_back_elsewhere_are_the_same_and_touch_no_other(
    source: list[int], data: st.DataObject
) -> None:
    places = st.permutations(range(PAGES * PAGE)).map(lambda order: order[: len(source)])
    target = data.draw(places)
    pool, layer = pool_of(), 1
    rows = KvPoolRows(pool, None)
    before = [by_pages(pool, one, list(range(PAGES * PAGE))) for one in range(LAYERS)]
    saved = [part[0] for part in read(rows, [layer], source)]
    rows.write_kv(layer, saved, torch.tensor(target))
    for part, old in zip(before[layer], saved, strict=True):
        part[torch.tensor(target)] = old
    for one in range(LAYERS):
        for part, got in zip(
            before[one], by_pages(pool, one, list(range(PAGES * PAGE))), strict=True
        ):
            assert torch.equal(part, got)


@given(source=SLOTS, data=st.data())
def test_sglangs_own_move_moves_our_rows(source: list[int], data: st.DataObject) -> None:
    free = sorted(set(range(PAGES * PAGE)) - set(source))
    target = data.draw(st.permutations(free))[: len(source)]
    pool = pool_of()
    rows = KvPoolRows(pool, None)
    saved = read(rows, range(LAYERS), source)
    pool.move_kv_cache(torch.tensor(target), torch.tensor(source))
    for old, moved in zip(saved, read(rows, range(LAYERS), target), strict=True):
        assert torch.equal(old, moved)


def test_sglangs_kernels_write_what_we_read_and_read_what_we_write() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.interpreted_index"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"},
        capture_output=True, check=True, timeout=HANGS_S,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"we_read": True, "they_read": True}


class _Together:
    """All ranks' parts of the rows that are being written."""

    def __init__(self, parts: list[list[torch.Tensor]]) -> None:
        self._parts = [torch.cat(ranks, dim=1) for ranks in zip(*parts, strict=True)]

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        return next(whole for whole in self._parts if whole.shape[1] == 2 * part.shape[1])


def test_two_ranks_keep_halves_of_each_part() -> None:
    pool, slots = pool_of(), list(range(60, 70))

    def of_rank(rank: int, group: Any = None) -> KvPoolRows:
        def half(width: int) -> Columns:
            return Columns(rank * width // 2, width // 2, 2, group)

        return KvPoolRows(pool, None, columns=half)

    halves = [[part[0] for part in read(of_rank(rank), [2], slots)] for rank in range(2)]
    assert [part.shape[1] for part in halves[0]] == [576, DIM // 2, SCALE // 2]
    wanted = by_pages(pool, 2, slots)
    for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer):
        buffer.zero_()
    of_rank(1, _Together(halves)).write_kv(2, halves[1], torch.tensor(slots))
    for part, got in zip(wanted, by_pages(pool, 2, slots), strict=True):
        assert torch.equal(part, got)


def test_the_index_of_a_draft_model_goes_with_its_rows() -> None:
    draft = pool_of(layers=1)
    rows, slots = KvPoolRows(pool_of(), None, draft=draft), [3, 64, 130]
    saved = read(rows, [LAYERS], slots)
    for part, wanted in zip(saved, by_pages(draft, 0, slots), strict=True):
        assert torch.equal(part[0], wanted)
    rows.write_kv(LAYERS, [part[0] for part in saved], torch.tensor([200, 5, 64]))
    for part, got in zip(saved, by_pages(draft, 0, [200, 5, 64]), strict=True):
        assert torch.equal(part[0], got)


def test_a_layer_without_an_index_of_its_own_keeps_zeros_for_it() -> None:
    """It attends to what the layer before it chose."""
    pool = pool_of(skip_topk_layers=[False, True, False])
    rows, slots = KvPoolRows(pool, None), [70, 3]
    latent, keys, scales = read(rows, range(LAYERS), slots)
    assert latent[1].any() and not keys[1].any() and not scales[1].any()
    for layer in (0, 2):
        assert torch.equal(keys[layer], by_pages(pool, layer, slots)[1])
    rows.write_kv(1, [latent[1], keys[1], scales[1]], torch.tensor([9, 8]))
    assert torch.equal(read(rows, [1], [9, 8])[0][0], latent[1])


class Derived(DSATokenToKVPool):
    """SGLang has pools of the kind with another layout, by this name or that."""


def test_other_layouts_are_refused() -> None:
    pooled = pool_of(page_size=2 * PAGE, index_kpool=2)
    with pytest.raises(UnsupportedPool, match="stands for several tokens"):
        KvPoolRows(pooled, None)
    pool = pool_of()
    pool.index_key_cache.buffer = [buffer[:, :-4] for buffer in pool.index_key_cache.buffer]
    with pytest.raises(UnsupportedPool, match="pages of the sparse-attention index"):
        KvPoolRows(pool, None)
    pool = pool_of()
    pool.__class__ = Derived
    with pytest.raises(UnsupportedPool, match="KV pool Derived is not supported"):
        KvPoolRows(pool, None)
