"""torch in place of the kernels of Kimi Linear's recurrent layers (KDA) that SGLang's wheel has for
GPUs only: a gated delta rule in which each channel of a state has a gate of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def use() -> None:
    """In this process, beside those of `state_kernels`."""
    import sglang.srt.layers.attention.linear.kda_backend as backend
    import sglang.srt.layers.attention.linear.kernels.kda_triton as kernels

    from support.state_kernels import convolve, convolve_one

    backend.causal_conv1d_fn, backend.causal_conv1d_update = convolve, convolve_one
    kernels.chunk_kda, kernels.fused_recurrent_kda_packed_decode = prefill, decode
    kernels.fused_sigmoid_gating_delta_rule_update = verify


def gates(a: torch.Tensor, A_log: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """a (..., heads, K): logarithm of what stays of a channel, of the same shape."""
    heads, key = a.shape[-2:]
    rate = functional.softplus(a.float() + bias.float().view(heads, key))
    return -A_log.float().exp().view(heads, 1) * rate


def prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor, initial_state_indices: torch.Tensor, cu_seqlens: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, output_intermediate_states: bool,
    track_state: torch.Tensor | None, track_chunk_idx: torch.Tensor | None, **_: Any,
) -> Any:  # fmt: skip
    """As `state_kernels.prefill`, with g (1, tokens, heads, K) and beta (1, tokens, heads) before
    their functions. track_chunk_idx (requests,): the chunk of each at whose begin its state goes to
    its row of track_state; below 0 for none. Returns (1, tokens, heads, V), and where they are
    asked for the states at the begin of each chunk."""
    from support.state_kernels import CHUNK
    from support.state_kernels import prefill as by_states

    kept = gates(g, A_log, dt_bias)
    own = initial_state, initial_state_indices, cu_seqlens
    out, _, states = by_states(q, k, v, kept, beta.float().sigmoid(), *own)
    if track_state is not None and track_chunk_idx is not None:
        chunks = -(-cu_seqlens.diff() // CHUNK)
        first = (chunks.cumsum(0) - chunks).tolist()
        for request, chunk in enumerate(track_chunk_idx.tolist()):
            if chunk >= 0:
                track_state[request] = states[0, first[request] + chunk]
    return (out, states) if output_intermediate_states else out


def decode(
    mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor,
    dt_bias: torch.Tensor, initial_state: torch.Tensor, out: torch.Tensor,
    ssm_state_indices: torch.Tensor, **_: Any,
) -> None:  # fmt: skip
    """One token a request, into `out` (requests, 1, heads, V). a (requests, heads * K)."""
    from support.state_kernels import delta_rule

    heads, value, key = initial_state.shape[1:]
    q, k, v = mixed_qkv.split([heads * key, heads * key, heads * value], -1)
    kept = gates(a.view(-1, 1, heads, key), A_log, dt_bias)
    for request, slot in enumerate(ssm_state_indices.tolist()):
        out[request], _, initial_state[slot] = delta_rule(
            q[request].view(1, heads, key), k[request].view(1, heads, key),
            v[request].view(1, heads, value), kept[request],
            b[request : request + 1].float().sigmoid(), initial_state[slot],
        )  # fmt: skip


def verify(
    *, A_log: torch.Tensor, dt_bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **places: Any,
) -> torch.Tensor:  # fmt: skip
    """As `state_kernels.verify_rows`, with a and b before their functions."""
    from support.state_kernels import verify_rows

    heads, key = k.shape[-2:]
    kept = gates(a.reshape(1, -1, heads, key), A_log, dt_bias)
    return verify_rows(q, k, v, kept, b.reshape(1, -1, heads).float().sigmoid(), **places)
