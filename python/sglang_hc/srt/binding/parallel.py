"""The ranks of one model, and the groups in which they exchange tensors.

SGLang keeps both for the process, which runs one rank: known once it has published its arguments,
the groups once its scheduler has made them.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.distributed.bootstrap import init_layer_runtime, init_parallel_runtime
from sglang.srt.runtime_context import SpawnRanks, get_device, get_parallel


def tp_rank() -> int:
    """This rank among those that have the same layers."""
    return get_parallel().tp_rank


def tp_size() -> int:
    """Ranks that have the same layers, each its part of them."""
    return get_parallel().tp_size


def pp_rank() -> int:
    """The stage of this rank."""
    return get_parallel().pp_rank


def pp_size() -> int:
    """Stages of the pipeline, each with some of the layers."""
    return get_parallel().pp_size


def dp_rank() -> int:
    """The data-parallel replica of this rank; 0 for the only one."""
    return get_parallel().dp_rank or 0


def tp_group() -> Any:
    """SGLang's group of the ranks that have the same layers: `all_gather(tensor, dim)` on the
    device, and `cpu_group`, a gloo group."""
    return get_parallel().tp_group


def world_cpu_group() -> Any:
    """The gloo group of all ranks of a model."""
    return get_parallel().world_group.cpu_group


def sum_over_ranks(rows: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over the ranks that have the same layers, as the model takes it; `rows`
    may be overwritten."""
    return tensor_model_parallel_all_reduce(rows)


def one_rank(gpu: int) -> SpawnRanks:
    """The place of a process that has all of the model, on this GPU."""
    return SpawnRanks(world_rank=0, gpu_id=gpu)


def make_groups(args: Any, model_config: Any, port: int) -> None:
    """The groups of a process without a scheduler, once its arguments are published. port: for the
    ranks to meet at."""
    init_parallel_runtime(server_args=args, device=get_device().device, dist_port=port)
    init_layer_runtime(model_config=model_config)
