"""torch in place of the kernels of recurrent layers that SGLang's wheel has for GPUs only:
convolution, gated delta rule, gated norm, and the copy of a state that is kept. The pools and their
layout are SGLang's.

Sums of the delta rule are in float64, so a state hardly depends on where its prefill began.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch._dynamo
from torch.nn import functional

from support import kda_kernels, mamba_kernels
from support.sparse_kernels import in_float64

CHUNK = 64
"""Tokens between two states that a prefill gives."""


def use() -> None:
    """In this process, which has no engine yet and none but these."""
    import os

    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"
    torch._dynamo.config.disable = True
    _without_a_device()
    import sglang.srt.arg_groups.mamba_hook as arguments
    import sglang.srt.layers.attention.hybrid_linear_attn_backend as states
    import sglang.srt.layers.attention.linear.gdn_backend as backend
    import sglang.srt.layers.attention.linear.kernels.gdn_triton as kernels
    import sglang.srt.models.qwen2_moe as experts
    import sglang.srt.models.qwen3_5 as qwen
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm

    arguments._platform_supports_mamba_cache_extra_buffer = lambda: True
    backend.causal_conv1d_fn, backend.causal_conv1d_update = convolve, convolve_one
    backend.fused_gdn_gating = gates
    kernels.chunk_gated_delta_rule = prefill
    kernels.fused_recurrent_gated_delta_rule_packed_decode = decode
    kernels.fused_sigmoid_gating_delta_rule_update = verify
    states.track_mamba_states_all_layers = keep_states
    states.scatter_mamba_states_after_mtp_verify = keep_accepted
    FusedRMSNormGated.forward = RMSNorm.forward = gated_norm
    experts.fused_gate_sigmoid_mul_add = add_gated
    qwen.fused_sigmoid_mul = gated
    mamba_kernels.use()
    kda_kernels.use()
    torch.nn.functional.linear = in_float64(torch.nn.functional.linear)


def _without_a_device() -> None:
    asked = torch.get_device_module
    torch.get_device_module = lambda device=None: torch.cpu if device is None else asked(device)
    torch.cpu.device = lambda _=None: nullcontext()  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]


# -- convolution ---------------------------------------------------------------------------------


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, conv_states: torch.Tensor,
    seq_lens_cpu: Any, cache_indices: torch.Tensor, has_initial_state: torch.Tensor, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """x (channels, tokens) of several requests, weight (channels, width). What comes next needs
    the last inputs of each, which its slot of conv_states (slots, channels, width - 1) keeps."""
    out, at = torch.empty_like(x), 0
    kept = weight.shape[1] - 1
    for request, count in enumerate(map(int, seq_lens_cpu)):
        state = conv_states[int(cache_indices[request])]
        before = state if bool(has_initial_state[request]) else torch.zeros_like(state)
        inputs = torch.cat([before, x[:, at : at + count]], 1)
        out[:, at : at + count] = _convolved(inputs, weight, bias)
        state.copy_(inputs[:, -kept:])
        at += count
    return out


def convolve_one(
    x: torch.Tensor, conv_states: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None = None, activation: str | None = None, *,
    conv_state_indices: torch.Tensor, intermediate_conv_window: torch.Tensor | None = None,
    **verified: Any,
) -> torch.Tensor:  # fmt: skip
    """As `convolve`, of one token a request: x (requests, channels). In a pass that verifies see
    `convolve_tree`."""
    slots = conv_state_indices.long()
    if intermediate_conv_window is not None:
        own = conv_states[slots]
        return convolve_tree(x, own, weight, bias, intermediate_conv_window, **verified)
    inputs = torch.cat([conv_states[slots], x.unsqueeze(2)], 2)
    conv_states[slots] = inputs[:, :, 1:]
    return torch.cat([_convolved(one, weight, bias) for one in inputs], 1).T.contiguous()


def convolve_tree(
    x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    windows: torch.Tensor, retrieve_next_token: torch.Tensor | None,
    retrieve_next_sibling: torch.Tensor | None, retrieve_parent_token: torch.Tensor | None,
    intermediate_state_indices: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """x (requests, channels, rows) of proposed trees, each row behind its parent, the first one
    behind `before` (requests, channels, width - 1). What comes behind a row needs its last inputs,
    which go to windows (requests, rows, channels, width - 1); the states stay as they are. Fills
    `retrieve_parent_token` (requests, rows), which is None where the trees are chains."""
    out = torch.empty_like(x)
    if retrieve_parent_token is not None:
        assert retrieve_next_token is not None and retrieve_next_sibling is not None
        _find_parents(retrieve_next_token, retrieve_next_sibling, retrieve_parent_token)
    for request, own in enumerate(intermediate_state_indices.tolist()):
        for row, parent in enumerate(parents_of(retrieve_parent_token, request, x.shape[2])):
            state = before[request] if parent < 0 else windows[own, parent]
            inputs = torch.cat([state, x[request, :, row : row + 1]], 1)
            out[request, :, row : row + 1] = _convolved(inputs, weight, bias)
            windows[own, row] = inputs[:, 1:]
    return out


def _find_parents(child: torch.Tensor, sibling: torch.Tensor, parents: torch.Tensor) -> None:
    parents.fill_(-1)
    for request, children in enumerate(child.tolist()):
        for parent, first in enumerate(children):
            row = first
            while row >= 0:
                parents[request, row] = parent
                row = int(sibling[request, row])


def parents_of(parents: torch.Tensor | None, request: int, rows: int) -> list[int]:
    """Of each row of a proposed tree; -1 for the first one. parents: None for chains."""
    found: list[int] = list(range(-1, rows - 1)) if parents is None else parents[request].tolist()
    return found


def _convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    windows = inputs.double().unfold(1, weight.shape[1], 1)
    out = (windows * weight.double().unsqueeze(1)).sum(-1)
    out = out if bias is None else out + bias.double().unsqueeze(1)
    return functional.silu(out).to(inputs.dtype)


# -- gated delta rule ----------------------------------------------------------------------------


def gates(
    decay: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a, b (tokens, heads): logarithm of what stays of a state, and how much of it is replaced,
    (1, tokens, heads) each."""
    kept = -decay.float().exp() * functional.softplus(a.float() + bias.float())
    return kept.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor, initial_state_indices: torch.Tensor, cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:  # fmt: skip
    """q, k (1, tokens, key heads, K), v (1, tokens, heads, V) of several requests, whose states are
    in slots of initial_state (slots, heads, V, K). Returns (1, tokens, heads, V), and the state at
    the begin of each chunk of each request, (1, chunks, heads, V, K) float32."""
    g = g if g.ndim == 4 else g.unsqueeze(-1)
    out, states, spans = torch.empty_like(v), [], pairwise(cu_seqlens.tolist())
    for slot, (at, end) in zip(initial_state_indices.tolist(), spans, strict=True):
        parts = (part[0, at:end] for part in (q, k, v, g, beta))
        out[0, at:end], before, last = delta_rule(*parts, initial_state[slot])
        states.append(before)
        initial_state[slot] = last
    return out, None, torch.cat(states).float().unsqueeze(0)


def decode(
    mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor,
    dt_bias: torch.Tensor, initial_state: torch.Tensor, out: torch.Tensor,
    ssm_state_indices: torch.Tensor, **_: Any,
) -> None:  # fmt: skip
    """One token a request, into `out` (requests, 1, heads, V)."""
    heads, value, key = initial_state.shape[1:]
    of_keys = (mixed_qkv.shape[1] - heads * value) // 2
    q, k, v = mixed_qkv.split([of_keys, of_keys, heads * value], -1)
    kept, replaced = gates(A_log, a, b, dt_bias)
    for request, slot in enumerate(ssm_state_indices.tolist()):
        out[request], _, initial_state[slot] = delta_rule(
            q[request].view(1, -1, key), k[request].view(1, -1, key),
            v[request].view(1, heads, value), kept[0, request : request + 1].unsqueeze(-1),
            replaced[0, request : request + 1], initial_state[slot],
        )  # fmt: skip


def verify(
    *, A_log: torch.Tensor, dt_bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **places: Any,
) -> torch.Tensor:  # fmt: skip
    """As `prefill`, of proposed trees; see `verify_rows`."""
    kept, replaced = gates(A_log, a, b, dt_bias)
    return verify_rows(q, k, v, kept.unsqueeze(-1), replaced, **places)


def verify_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *,
    initial_state_source: torch.Tensor, initial_state_indices: torch.Tensor,
    intermediate_states_buffer: torch.Tensor, intermediate_state_indices: torch.Tensor,
    cache_steps: int, retrieve_parent_token: torch.Tensor | None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """As `prefill`, of trees of `cache_steps` proposed tokens each; the state behind each goes to
    intermediate_states_buffer (requests, cache_steps, heads, V, K), and none to its slot."""
    out, states = torch.empty_like(v), intermediate_states_buffer
    for request, slot in enumerate(initial_state_indices.tolist()):
        own = int(intermediate_state_indices[request])
        for row, parent in enumerate(parents_of(retrieve_parent_token, request, cache_steps)):
            state = initial_state_source[slot] if parent < 0 else states[own, parent]
            at = slice(request * cache_steps + row, request * cache_steps + row + 1)
            parts = (part[0, at] for part in (q, k, v, g, beta))
            out[0, at], _, states[own, row] = delta_rule(*parts, state)
    return out


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Tokens of one request in chunks: within one, what each token adds follows from the others by
    one triangular system. q, k (tokens, key heads, K), v (tokens, heads, V), g (tokens, heads, 1),
    or K in place of 1 where each channel has its own, beta (tokens, heads), state (heads, V, K).
    Returns what `prefill` does, and the last state, float64."""
    tokens, heads = beta.shape
    each, chunks = heads // q.shape[1], -(-tokens // CHUNK)

    def chunked(part: torch.Tensor) -> torch.Tensor:
        """(tokens, heads, width) -> (chunks, heads, CHUNK, width) float64."""
        padded = functional.pad(part.double(), (0, 0, 0, 0, 0, chunks * CHUNK - tokens))
        return padded.unflatten(0, (chunks, CHUNK)).transpose(1, 2)

    query = chunked(_unit(q).repeat_interleave(each, 1)) * q.shape[-1] ** -0.5
    key = chunked(_unit(k).repeat_interleave(each, 1))
    value, rate = chunked(v), chunked(beta.unsqueeze(-1))
    decay = chunked(g).cumsum(2)
    back = (key * (-decay).exp()).transpose(2, 3)
    mixed = (rate * decay.exp() * key) @ back
    system = torch.eye(CHUNK, dtype=torch.float64) + mixed.tril(-1)
    sides = torch.cat([rate * value, rate * decay.exp() * key], -1)
    added, erased = torch.linalg.solve_triangular(
        system, sides, upper=False, unitriangular=True
    ).split([value.shape[-1], key.shape[-1]], -1)
    seen = ((query * decay.exp()) @ back).tril()
    now, out, states = state.double(), torch.empty_like(value), []
    for i in range(chunks):
        states.append(now)
        new = added[i] - erased[i] @ now.transpose(1, 2)
        out[i] = (query[i] * decay[i].exp()) @ now.transpose(1, 2) + seen[i] @ new
        last = decay[i, :, -1:]
        now = now * last.exp() + new.transpose(1, 2) @ (key[i] * (last - decay[i]).exp())
    found = out.transpose(1, 2).flatten(0, 1)[:tokens]
    return found.to(v.dtype), torch.stack(states), now


def _unit(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.double()
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)


def keep_states(
    conv: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor,
    kept: torch.Tensor, requests: int, **_: Any,
) -> None:  # fmt: skip
    """Of the requests that mask (requests,) names, the states of all layers in `slots` go to the
    slots `kept` too."""
    own, to = slots[:requests][mask].long(), kept[:requests][mask].long()
    for part in (conv, state):
        part[:, to] = part[:, own]


def keep_accepted(
    caches: Any, slots: torch.Tensor, steps: torch.Tensor, kept: torch.Tensor | None,
    kept_steps: torch.Tensor | None, **_: Any,
) -> None:  # fmt: skip
    """Of a pass that verified, the states behind the last accepted rows, `steps` (requests,), go to
    `slots`, those behind `kept_steps`, -1 for none, to the slots `kept`."""
    pairs = [
        (caches.temporal, caches.intermediate_ssm),
        *zip(caches.conv, caches.intermediate_conv_window, strict=True),
    ]
    for to, rows in ((slots, steps), (kept, kept_steps)):
        if to is None or rows is None:
            continue
        for request, row in enumerate(rows.tolist()):
            for state, of_rows in pairs if row >= 0 else ():
                state[:, int(to[request])] = of_rows[:, request, row]


# -- around it -----------------------------------------------------------------------------------


def gated_norm(self: Any, x: torch.Tensor, z: torch.Tensor | None = None, *_: Any) -> torch.Tensor:
    rows = x.double()
    rows = rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + self.eps)
    rows = rows * self.weight.double()
    gate = torch.sigmoid if self.activation == "sigmoid" else functional.silu
    return (rows if z is None else rows * gate(z.double())).to(x.dtype)


def add_gated(
    hidden: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, out: torch.Tensor
) -> None:
    """What the shared expert adds, `shared` (tokens, width), goes to `out` by its gate."""
    out += torch.sigmoid(hidden @ weight).unsqueeze(1) * shared


def gated(rows: torch.Tensor, gate: torch.Tensor, **_: Any) -> torch.Tensor:
    return rows.mul_(torch.sigmoid(gate.reshape(rows.shape)))
