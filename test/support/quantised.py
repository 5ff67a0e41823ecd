"""Weights of 8 bits, and torch in place of what SGLang has for a GPU, AMX or Arm only to multiply
with them. How weights are loaded, fused and kept is SGLang's."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LARGEST = 127.0


def make(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint whose projections are whole numbers, with a scale for each row."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    kept = {}
    for name, value in load_file(file).items():
        if not name.endswith("_proj.weight"):
            kept[name] = value
            continue
        scale = value.abs().amax(1, keepdim=True) / LARGEST
        kept[name] = torch.round(value / scale).to(torch.int8)
        kept[f"{name}_scale"] = scale
    save_file(kept, file, metadata={"format": "pt"})
    return folder


def use() -> None:
    """In this process, which has no engine yet and none but these."""
    import sglang.srt.layers.quantization.w8a8_int8 as method

    method._is_cpu = False  # there weights are laid out for AMX
    method.per_token_quant_int8 = rounded
    method.int8_scaled_mm = product


def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, size) of 16 bits -> int8, and a scale (n, 1) float32 for each row."""
    scales = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
    return torch.round(rows.float() / scales).to(torch.int8), scales


def product(
    rows: torch.Tensor, weight: torch.Tensor, row_scales: torch.Tensor,
    weight_scales: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """rows (n, size) and weight (size, width) int8 -> (n, width). Sums of whole numbers are exact,
    however many rows there are."""
    found = (rows.float() @ weight.float()) * row_scales * weight_scales.view(1, -1)
    return (found if bias is None else found + bias).to(out_dtype)
