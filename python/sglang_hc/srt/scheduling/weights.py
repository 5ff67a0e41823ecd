"""Weights that change: state before and behind a change is told apart by their version.

Weights in host memory are neither replaced nor read: a parameter shows what lies in its place on
the device now, and what is written there is gone when the next layer comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqOutput,
    CheckWeightsReqOutput,
    EndWeightUpdateReqOutput,
    GetWeightsByNameReqOutput,
    UpdateWeightFromDiskReqOutput,
    UpdateWeightsFromDistributedReqOutput,
    UpdateWeightsFromIPCReqOutput,
    UpdateWeightsFromTensorReqOutput,
)

from sglang_hc.srt.engine.guard import tree_of
from sglang_hc.srt.model.offload import WHY, weights_of

logger = logging.getLogger(__name__)

UPDATES: dict[str, type[Any]] = {
    "update_weights_from_disk": UpdateWeightFromDiskReqOutput,
    "update_weights_from_distributed": UpdateWeightsFromDistributedReqOutput,
    "update_weights_from_tensor": UpdateWeightsFromTensorReqOutput,
    "update_weights_from_ipc": UpdateWeightsFromIPCReqOutput,
    "begin_weight_update": BeginWeightUpdateReqOutput,
    "end_weight_update": EndWeightUpdateReqOutput,
    "check_weights": CheckWeightsReqOutput,
}
"""What SGLang answers to each call that may change weights. The last update ends several, and may
pack the weights in another way."""

IN_SESSION = {
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "end_weight_update",
}
"""Those that SGLang refuses, before it touches a weight, where no session of updates is open."""

READING_CHECKS = {"snapshot", "compare", "checksum"}

IN_MEMORY = ("release_memory_occupation", "resume_memory_occupation")
"""Between these two weights may have no memory, and behind them hold anything."""

OTHERS: dict[str, type[Any] | None] = {
    "get_weights_by_name": GetWeightsByNameReqOutput,
    "save_remote_model": None,
    "save_sharded_model": None,
}
"""What else reads or changes them. None: an error is answered."""


def in_host_memory(updater: Any) -> bool:
    """Whether the model of SGLang's weight updater has weights in host memory."""
    return weights_of(updater.tp_worker.model_runner).ring is not None


def refusal(name: str) -> Any:
    """What is answered to a call of this name. Raises ValueError where an error is."""
    logger.warning("sglang-hc: %s is refused: %s", name, WHY)
    made = (UPDATES | OTHERS)[name]
    if made is None:
        raise ValueError(WHY)
    if made is GetWeightsByNameReqOutput:
        return made(parameter=None)
    return made(success=False, message=WHY)


def changes_none(name: str, updater: Any, recv_req: Any) -> bool:
    """Whether a call of `UPDATES` leaves the weights as they are, whatever they are."""
    if name == "check_weights":
        return recv_req.action in READING_CHECKS
    return name in IN_SESSION and updater._session is None


def change(tree: Any, original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """SGLang's answer to a call that may change weights. They have no version before it, and one
    behind it unless more is to come: a session is open, in which others may write to them at any
    time, or they have no memory. Where SGLang fails they keep none.

    A flush that belongs to it is of the device alone.
    """
    with tree.weights_change(lambda: [runner.model for _, runner in updater._select_runners()]):
        result = original(updater, recv_req)
    if updater._session is None and GPU_MEMORY_TYPE_WEIGHTS not in updater.offload_tags:
        tree.weights_settled()
    return result


def move_weights(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """AROUND each of IN_MEMORY."""
    tree = tree_of(self.scheduler)
    moved = not recv_req.tags or GPU_MEMORY_TYPE_WEIGHTS in recv_req.tags
    if tree is None or not moved or in_host_memory(self):
        return original(self, recv_req)
    return change(tree, original, self, recv_req)


def use_weights(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """AROUND each of OTHERS."""
    return refusal(original.__name__) if in_host_memory(self) else original(self, recv_req)
