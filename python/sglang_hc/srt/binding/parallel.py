"""The ranks of one model, and the groups in which they exchange tensors.

`owner`: SGLang's model runner or scheduler, whose ranks are asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed import get_world_group, tensor_model_parallel_all_reduce
from sglang.srt.distributed.parallel_state_wrapper import ParallelState


def tp_rank(owner: Any) -> int:
    """This rank among those that have the same layers."""
    return owner.ps.tp_rank


def tp_size(owner: Any) -> int:
    """Ranks that have the same layers, each its part of them."""
    return owner.ps.tp_size


def pp_rank(owner: Any) -> int:
    """The stage of this rank."""
    return owner.ps.pp_rank


def pp_size(owner: Any) -> int:
    """Stages of the pipeline, each with some of the layers."""
    return owner.ps.pp_size


def dp_rank(owner: Any) -> int:
    """The data-parallel replica of this rank; 0 for the only one."""
    return owner.ps.dp_rank or 0


def tp_group(runner: Any) -> Any:
    """SGLang's group of the ranks that have the same layers: `all_gather(tensor, dim)` on the
    device, and `cpu_group`, a gloo group."""
    return runner.tp_group


def world_cpu_group() -> Any:
    """The gloo group of all ranks of a model."""
    return get_world_group().cpu_group


def sum_over_ranks(rows: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over the ranks that have the same layers, as the model takes it; `rows`
    may be overwritten."""
    return tensor_model_parallel_all_reduce(rows)


def one_rank(gpu: int) -> ParallelState:
    """The state of a process that has all of the model, on this GPU."""
    return ParallelState(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, dp_rank=None, dp_size=1,
        attn_tp_rank=0, attn_tp_size=1, attn_cp_rank=0, attn_cp_size=1,
        attn_dp_rank=0, attn_dp_size=1, moe_ep_rank=0, moe_ep_size=1,
        moe_dp_rank=None, moe_dp_size=1, dcp_size=1, gpu_id=gpu,
    )  # fmt: skip
