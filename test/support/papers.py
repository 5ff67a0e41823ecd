"""Models of the papers, and what the data sheet of one GPU says they cost."""

from __future__ import annotations

from typing import Any

from sglang_hc.tools.datasheet import datasheet_costs, load_hardware
from sglang_hc.tools.model_shape import ModelShape

LLAMA2_7B: dict[str, Any] = dict(
    model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
    intermediate_size=11008, torch_dtype="float16",
)  # fmt: skip
LLAMA31_8B = LLAMA2_7B | dict(num_key_value_heads=8, intermediate_size=14336)

SHAPE = ModelShape.from_config(LLAMA2_7B)
A100 = datasheet_costs(load_hardware("A100-40G"), SHAPE, 26e9, 6.9e9)
"""Of the 7B model, with a link of 26 GB/s and a disk of 6.9."""
