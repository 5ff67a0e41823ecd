"""Kernels of sglang-hc: K/V from hidden states into a paged pool, and row copies.

Use `sglang_hc_kernels.ops`. Without the package the main project does the same with torch.
"""

from sglang_hc_kernels.contracts import ArgumentError, Epilogue, KNorm, Rotary
from sglang_hc_kernels.ops import (
    WARM_ROWS,
    gather_rows,
    kv_epilogue,
    project_kv,
    scatter_rows,
)

__all__ = [
    "WARM_ROWS",
    "ArgumentError",
    "Epilogue",
    "KNorm",
    "Rotary",
    "gather_rows",
    "kv_epilogue",
    "project_kv",
    "scatter_rows",
]
