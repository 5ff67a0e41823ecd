"""Passes of nobody: SGLang tunes kernels by them before it serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_hc.srt.hybrid.attention import StreamedAttention

LAYER: Any = SimpleNamespace(layer_id=0, tp_q_head_num=2, v_head_dim=4, is_cross_attention=False)


def test_a_pass_over_nobodys_slot_moves_nothing() -> None:
    """SGLang's own has as many tokens as it likes, all with slot 0, in one request's row."""
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((2, 4), dtype=torch.int32)),
        token_to_kv_pool=SimpleNamespace(start_layer=0),
    )
    units: Any = mock.Mock(spec=())
    streamed: Any = SimpleNamespace(streaming=None)
    inputs, child = mock.Mock(), mock.Mock(spec=AttentionBackend)
    backend = StreamedAttention(runner, streamed, mock.Mock(), units, [], inputs, lambda _: child)
    tokens = 9
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=tokens,
        req_pool_indices=torch.zeros(tokens, dtype=torch.int64),
        seq_lens_cpu=torch.full((tokens,), backend.get_cuda_graph_seq_len_fill_value()),
    )
    backend.init_forward_metadata(batch)
    q, k = torch.full((tokens, 8), torch.nan), torch.zeros((tokens, 2, 4))
    out = backend.forward(q, k, k, LAYER, batch)
    assert out.shape == (tokens, 8) and not out.any()
    assert not child.method_calls
    inputs.drop.assert_called_once_with(0)
