"""torch in place of the kernels of Mamba2's recurrent layers that SGLang's wheel has for GPUs only.
One token after the other, with sums in float64: a state does not depend on where its prefill
began."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional


def use() -> None:
    """In this process, beside those of `state_kernels`."""
    import sglang.srt.layers.attention.hybrid_linear_attn_backend as states
    import sglang.srt.layers.attention.mamba.mamba as mixer
    from sglang.srt.layers.attention.mamba.mixer2_rms_norm_gated import Mixer2RMSNormGated

    from support.state_kernels import convolve, convolve_one, keep_states

    def keep(conv: torch.Tensor, state: torch.Tensor, *places: Any, **_: Any) -> None:
        keep_states(conv.unsqueeze(0), state.unsqueeze(0), *places)

    mixer.causal_conv1d_fn = mixer.causal_conv1d_fn_triton = convolve
    mixer.causal_conv1d_update = mixer.causal_conv1d_update_triton = convolve_one
    mixer.mamba_chunk_scan_combined, mixer.selective_state_update = prefill, decode
    states.track_mamba_states_if_needed = keep
    Mixer2RMSNormGated.forward = Mixer2RMSNormGated.forward_native


def prefill(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    chunk_size: int, D: torch.Tensor, dt_bias: torch.Tensor, cu_seqlens: torch.Tensor,
    initial_states: torch.Tensor | None, track_seq_idx: torch.Tensor | None,
    track_end_locs: torch.Tensor | None, out: torch.Tensor, state_dtype: torch.dtype, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """x (1, tokens, heads, P), dt (1, tokens, heads), B and C (1, tokens, groups, N) of several
    requests, initial_states (requests, heads, P, N); outputs go to `out`, as x. Returns the states
    at multiples of chunk_size of all tokens, those behind each request, and those before the tokens
    that are asked for."""
    heads, tokens = x.shape[2], x.shape[1]
    wanted = [] if track_end_locs is None else track_end_locs.tolist()
    last: list[torch.Tensor] = []
    before: dict[int, torch.Tensor] = {}
    for request, (at, end) in enumerate(pairwise(cu_seqlens.tolist())):
        state = torch.zeros((heads, x.shape[3], B.shape[3]), dtype=torch.float64)
        if initial_states is not None:
            state = initial_states[request].double()
        for token in range(at, end):
            if token % chunk_size == 0 or token in wanted:
                before[token] = state
            parts = (part[0, token] for part in (x, dt, B, C))
            state, out[0, token] = step(state, *parts, A, D, dt_bias)
        last.append(state)
    grid = torch.stack([before[token] for token in range(0, tokens, chunk_size)])
    asked = torch.stack([before[token] for token in wanted]) if wanted else grid[:0]
    kinds = grid.unsqueeze(0), torch.stack(last), asked.unsqueeze(0)
    found, ends, tracked = (kind.to(state_dtype) for kind in kinds)
    return found, ends, tracked


def decode(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    C: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor, state_batch_indices: torch.Tensor,
    out: torch.Tensor, intermediate_states_buffer: torch.Tensor | None = None, **verified: Any,
) -> None:  # fmt: skip
    """One token a request: x (requests, heads, P); what is one number a head is repeated. In a pass
    that verifies see `verify`."""
    own, rows = (A[:, 0, 0], D[:, 0], dt_bias[:, 0]), (x, dt[..., 0], B, C)
    slots = state_batch_indices.tolist()
    if intermediate_states_buffer is not None:
        verify(state, rows, own, slots, out, intermediate_states_buffer, **verified)
        return
    for request, slot in enumerate(slots):
        parts = (part[request] for part in rows)
        state[slot], out[request] = step(state[slot].double(), *parts, *own)


def verify(
    state: torch.Tensor, rows: Sequence[torch.Tensor], own: Sequence[torch.Tensor],
    slots: list[int], out: torch.Tensor, states: torch.Tensor,
    intermediate_state_indices: torch.Tensor, retrieve_parent_token: torch.Tensor | None,
    cache_steps: int, **_: Any,
) -> None:  # fmt: skip
    """Trees of `cache_steps` proposed tokens: rows (requests, cache_steps, ...). The state behind
    each goes to states (requests, cache_steps, heads, P, N), and none to its slot."""
    from support.state_kernels import parents_of

    for request, slot in enumerate(slots):
        kept = int(intermediate_state_indices[request])
        for row, parent in enumerate(parents_of(retrieve_parent_token, request, cache_steps)):
            before = state[slot] if parent < 0 else states[kept, parent]
            parts = (part[request, row] for part in rows)
            states[kept, row], out[request, row] = step(before.double(), *parts, *own)


def step(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    A: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The state (heads, P, N) behind a token, and its output (heads, P), both float64."""
    each = len(x) // len(B)
    keys, queries = (part.double().repeat_interleave(each, 0).unsqueeze(1) for part in (B, C))
    rate = functional.softplus(dt.double() + dt_bias.double())
    rows = x.double()
    added = (rate.unsqueeze(1) * rows).unsqueeze(2) * keys
    state = state * (rate * A.double()).exp().view(-1, 1, 1) + added
    return state, (state * queries).sum(-1) + D.double().unsqueeze(1) * rows
