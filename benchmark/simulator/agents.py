"""Learned pauses against the queue's order, fixed pins and the clairvoyant bound, under agents that
call tools and under the same load without pattern. A part of `reproduce`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_hc.forms import BlockLayout, LayerPlan
from sglang_hc.tools.model_shape import ModelShape
from sglang_hc.tools.simulator.models import SERVER_HOST_WORK, SimulatedModel
from sglang_hc.tools.simulator.run import Setup
from sglang_hc.tools.workloads.agents import agents

LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "torch_dtype": "float16",
}  # fmt: skip

SESSIONS, RATE, GPUS, CONTEXT = 150, 0.1, 2, 131_072
PINS = (3.0, 30.0, 300.0)
"""Seconds for which every answer is pinned, as `hc_pin` does it in a server."""

SCARCE, PLENTY = 6e9, 12e9
"""Bytes of host memory."""


def pauses(_: object) -> Iterator[tuple[dict[str, Any], Setup]]:
    shape = ModelShape.from_config(LLAMA_8B)
    layout = BlockLayout(LayerPlan(0, 0, shape.num_layers), shape.state_shape())
    model = SimulatedModel("llama-3.1-8b", shape, layout, CONTEXT, GPUS, SERVER_HOST_WORK)
    for pattern in (True, False):
        load = agents(sessions=SESSIONS, rate=RATE, pattern=pattern)
        for dram in (SCARCE, PLENTY):
            arms: list[tuple[str, dict[str, Any]]] = [
                (policy, {"policy": policy}) for policy in ("queue", "learned", "belady")
            ]
            if pattern and dram == SCARCE:
                arms += [(f"pin {seconds:g} s", {"hold": seconds}) for seconds in PINS]
            for arm, options in arms:
                setup = Setup(load, model, dram=dram, disk=0, **options)
                yield {"load": load.name, "dram": dram / 1e9, "arm": arm}, setup
