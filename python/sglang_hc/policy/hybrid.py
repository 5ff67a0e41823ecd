"""How many tokens of running requests are kept as K and V, and how many as hidden states.

`allocate` is the paper's Algorithm 1 (HybridServe 4.3.1). `best_split` is the exact optimum of the
pass that `streamed_pass` describes, which the algorithm approaches.

The problem that `best_split` solves, for a load of N tokens and for n rounds. Minimise

    max(T_PCIe, T_comp)
    T_PCIe = (L - r) T_load_w + L (T_load_kv #KV_Host + T_load_act #ACT_Host)
    T_comp = L (T_step + T_kv_gen (#ACT_Host + #ACT_GPU) + n T_round) + T_outside

over #KV_Host, #ACT_Host, #ACT_GPU >= 0 and whole r from 0 to L, so that

    #KV_Host + #ACT_Host + #ACT_GPU = N
    (L - r) S_W + L (S_KV #KV_Host + S_ACT #ACT_Host) <= host memory
    r S_W + ring(r) + L S_ACT #ACT_GPU + places(N, n) <= device memory

with L layers, r of them resident, and S_W, S_KV, S_ACT the bytes of a layer's weights, K and V of a
token, and its hidden state. The paper's equations 9 and 10 leave out T_load_act, T_step, T_outside
and r.

Why a few candidates are enough: with r and x = #ACT_Host + #ACT_GPU given, as many of the x as have
room belong on the device, because they compute the same there and do not cross. What is left is one
variable. Both times are linear in x on either side of the x that fills the device, so their maximum
is smallest at an end of x, there, or where they cross.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from sglang_hc.policy.streamed_pass import Load, Split, StreamedModel


class Allocation(NamedTuple):
    """Tokens that memory is divided for: the paper's #ACT_GPU, #ACT_Host and #KV_Host."""

    act_gpu: float
    act_host: float
    kv_host: float

    def split(self, tokens: float) -> Split:
        """Where the `tokens` of running requests go. Each request keeps the ratio of the whole
        (4.3.2, equation 11), and hidden states fill the device before they go to the host."""
        whole = sum(self)
        act = tokens * (self.act_gpu + self.act_host) / whole if whole else 0.0
        device = min(act, self.act_gpu)
        return Split(tokens - act, act - device, device)


def allocate(model: StreamedModel, act_gpu: float) -> Allocation:
    """Algorithm 1 (section 4.3.1): how the host memory of `model` is divided.

    Input: #ACT_GPU, T_load_w, T_kv_gen(), T_load_kv() and the size of host memory. In tokens, where
    the paper counts blocks, and with all weights in host memory:

    1. Initial allocation. If T_kv_gen(#ACT_GPU) < T_load_w, the device would idle:
       T_kv_gen(#ACT_GPU + #ACT_init) = T_load_w and #KV_init = 0. Else the link would:
       T_load_w + T_load_kv(#KV_init) = T_kv_gen(#ACT_GPU) and #ACT_init = 0.
    2. Remaining allocation of M, the host memory without weights and the first step:
       S_ACT #ACT_rem + S_KV #KV_rem = M and T_kv_gen(#ACT_rem) = T_load_kv(#KV_rem).

    Result: #ACT_Host = #ACT_init + #ACT_rem and #KV_Host = #KV_init + #KV_rem. So the times of
    equations 9 and 10 are equal, and the memory is full. Where it has no room for the first step,
    which the paper does not speak of, it gets as much as there is.

    The steps are those that the section describes. `model.kv_gen` must be finite. Raises ValueError
    when host memory does not hold the weights.
    """
    room = model.host / model.layers - model.weights
    if room < 0:
        raise ValueError("host memory does not hold the weights")
    idle = model.load_w - model.kv_gen * act_gpu
    act_init = min(max(idle, 0.0) / model.kv_gen, room / model.act)
    kv_init = min(max(-idle, 0.0) / model.load_kv, room / model.kv)
    remaining = room - model.act * act_init - model.kv * kv_init
    kv_for_each_act = model.kv_gen / model.load_kv
    act_rem = remaining / (model.act + model.kv * kv_for_each_act)
    return Allocation(act_gpu, act_init + act_rem, kv_init + kv_for_each_act * act_rem)


def best_split(
    model: StreamedModel,
    load: Load,
    rounds: int,
    *,
    act: float | None = None,
    most_resident: int | None = None,
    most_on_device: float = math.inf,
) -> Split | None:
    """The split with the shortest pass, of equal ones that with the least to copy; None when
    nothing fits. See the module for the problem.

    act: the share of tokens that must be kept as hidden states, from 0 to 1; None for any.
    most_resident: at most so many layers are resident; None for any number. most_on_device: hidden
    states that stay on the device at most, in tokens.
    """
    if math.isinf(model.kv_gen):
        act = 0.0
    low, high = (0.0, load.tokens) if act is None else (act * load.tokens,) * 2
    most = model.layers if most_resident is None else most_resident
    best, shortest = None, (math.inf, math.inf)
    for resident in range(most + 1):
        room = device_room(model, load.tokens, rounds, resident)
        on_device = min(room, most_on_device)
        for split in _candidates(model, load, rounds, resident, (low, high), on_device):
            times = model.times(load, split, rounds)
            if (times.ahead, times.link) < shortest and model.fits(split, rounds):
                best, shortest = split, (times.ahead, times.link)
    return best


def device_room(model: StreamedModel, tokens: float, rounds: int, resident: int = 0) -> float:
    """Tokens whose hidden states have room on the device, beside resident layers and the places for
    what crosses (#ACT_GPU); negative when these do not fit."""
    taken = resident * model.weights + model.ring(resident) + model.places(tokens, rounds)
    return (model.device - taken) / (model.layers * model.act)


def _candidates(
    model: StreamedModel,
    load: Load,
    rounds: int,
    resident: int,
    act: tuple[float, float],
    on_device: float,
) -> Iterator[Split]:
    """The splits among which the best with so many resident layers is. Not all of them fit.

    act: tokens that are kept as hidden states, at least and at most. on_device: those of them that
    the device has room for; negative when places and weights do not fit.
    """
    tokens, (low, high) = load.tokens, act
    weights = (model.layers - resident) / model.layers
    host = model.host / model.layers - weights * model.weights
    if on_device < 0 or host < 0:
        return
    # Of one layer: what the link works longer than the device when nothing is projected, and what
    # is missing in host memory then.
    idle = weights * model.load_w + model.load_kv * tokens - model.step(load)
    idle -= model.per_round * rounds + model.outside / model.layers
    missing = model.kv * tokens - host
    saved = model.load_kv + model.kv_gen  # of `idle`, by a token that is projected on the device
    found = [low, high, on_device, missing / model.kv]
    if low < high:
        found.append(idle / saved)
        crossing = saved - model.load_act
        if crossing:
            found.append((idle - model.load_act * on_device) / crossing)
    if model.kv != model.act:
        found.append((missing - model.act * on_device) / (model.kv - model.act))
    for projected in {min(max(low, each), high) for each in found}:
        device = min(projected, on_device)
        yield Split(tokens - projected, projected - device, device, 0.0, resident)
