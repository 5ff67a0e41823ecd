"""Weights in host memory are neither replaced nor read: a parameter shows what lies in its place on
the device now, and what is written there is gone when the next layer comes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

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

from sglang_hc.srt.model.offload import WHY, weights_of

logger = logging.getLogger(__name__)

BEGIN = "begin_weight_update"
"""It opens a session of updates: weights are unpacked, and none changes yet."""

UPDATES: dict[str, type[Any]] = {
    "update_weights_from_disk": UpdateWeightFromDiskReqOutput,
    "update_weights_from_distributed": UpdateWeightsFromDistributedReqOutput,
    "update_weights_from_tensor": UpdateWeightsFromTensorReqOutput,
    "update_weights_from_ipc": UpdateWeightsFromIPCReqOutput,
    BEGIN: BeginWeightUpdateReqOutput,
    "end_weight_update": EndWeightUpdateReqOutput,
}
"""What SGLang answers to each weight update. The last one ends several, and may pack the weights in
another way."""

OTHERS: dict[str, type[Any] | None] = {
    "check_weights": CheckWeightsReqOutput,
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


def use_weights(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """AROUND each of OTHERS."""
    return refusal(original.__name__) if in_host_memory(self) else original(self, recv_req)
