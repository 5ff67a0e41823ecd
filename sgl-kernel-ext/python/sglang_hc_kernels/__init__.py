"""Kernels of sglang-hc: K/V from hidden states into a paged pool, and rows out of it.

Use `sglang_hc_kernels.ops`. Without the package the main project does the same with torch.
"""

from sglang_hc_kernels.contracts import ArgumentError, Epilogue, KNorm, Rotary
from sglang_hc_kernels.ops import (
    WARM_ROWS,
    PointerTable,
    gather_rows,
    kv_epilogue,
    project_kv,
)

__all__ = [
    "WARM_ROWS",
    "ArgumentError",
    "Epilogue",
    "KNorm",
    "PointerTable",
    "Rotary",
    "gather_rows",
    "kv_epilogue",
    "project_kv",
]
