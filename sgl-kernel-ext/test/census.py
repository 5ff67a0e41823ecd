"""Counts the kernels that Triton compiles when rows of every count are restored.

    python census.py ARCH       # 90 for sm_90

Prints JSON per case: kernels compiled by the launches at start (`WARM_ROWS`), and after launches of
all row counts of a frame. Needs no GPU: the launches are Triton's own up to the compiled kernel, on
a driver that only says which GPU it is.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from sglang_hc_kernels import Epilogue, KNorm, Rotary, triton_kv, triton_project, triton_rows
from sglang_hc_kernels.ops import WARM_ROWS, PointerTable

ROWS = 8192
"""Most rows of one piece of a restoration: a frame of 32 MiB of 4 KiB a row."""

DTYPE = torch.bfloat16


class Driver:
    """What a launch asks the driver before it compiles."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(kernel: Any) -> int:
    return len(kernel.device_caches[0][0])


class Case:
    """One layer of a model; launches begin at any place in lists of positions and slots."""

    def __init__(
        self, heads: int, dim: int, hidden: int, rich: bool = False, rope: bool = True
    ) -> None:
        width = 2 * heads * dim
        rotary_dim = dim // 2 if rich else dim
        bias = torch.empty(width, dtype=DTYPE) if rich else None
        norm = KNorm(torch.empty(dim, dtype=DTYPE), 1e-6) if rich else None
        rotary = Rotary(torch.empty(64, rotary_dim)) if rope else None
        self.epilogue = Epilogue(bias, norm, rotary)
        self.pools = [torch.empty(1, heads, dim, dtype=DTYPE).expand(4096, -1, -1).clone()] * 2
        self.index = torch.zeros(2 * ROWS, dtype=torch.int64)
        self.hidden = torch.empty((ROWS, hidden), dtype=DTYPE)
        self.kv = torch.empty((ROWS, width), dtype=DTYPE)
        self.weight = torch.empty((width, hidden), dtype=DTYPE)

    def launch_epilogue(self, count: int, first: int) -> None:
        rows = self.index[first : first + count]
        triton_kv.kv_epilogue(self.kv[:count], rows, rows, *self.pools, self.epilogue)

    def launch_projection(self, count: int, first: int) -> None:
        rows = self.index[first : first + count]
        triton_project.project_kv(
            self.hidden[:count], self.weight, rows, rows, *self.pools, self.epilogue
        )


def launch_rows(buffers: PointerTable, index: torch.Tensor, count: int, first: int) -> None:
    """Staging of any size, from any part of a list of slots."""
    staging = torch.empty((2, count, buffers.row_bytes), dtype=torch.uint8)
    triton_rows.gather_rows(buffers, index[first : first + count], staging)


def census(kernel: Any, launch: Any) -> dict[str, int]:
    for cache in kernel.device_caches.values():
        cache[0].clear()
    for count in WARM_ROWS:
        launch(count, 0)
    warmed = compiled(kernel)
    for count in range(1, ROWS + 1):
        launch(count, count)
    return {"warmed": warmed, "served": compiled(kernel)}


def main(arch: int) -> None:
    triton.runtime.driver.set_active(Driver(arch))
    run = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **options)

    triton.JITFunction.run = compile_only
    mha, gqa = Case(32, 128, 4096), Case(8, 128, 4096, rich=True)
    wide, plain = Case(2, 256, 1024), Case(12, 64, 768, rope=False)
    table = PointerTable(list(torch.empty((2, 64, 512), dtype=torch.int64)))
    index = torch.zeros(2 * ROWS, dtype=torch.int64)
    epilogue, project = triton_kv.kv_epilogue_kernel, triton_project.project_kv_kernel
    results = {
        "epilogue-mha": census(epilogue, mha.launch_epilogue),
        "epilogue-gqa-bias-norm-partial": census(epilogue, gqa.launch_epilogue),
        "project-mha": census(project, mha.launch_projection),
        "project-gqa-bias-norm-partial": census(project, gqa.launch_projection),
        "project-head-256": census(project, wide.launch_projection),
        "project-without-rope": census(project, plain.launch_projection),
        "rows": census(triton_rows.gather_rows_kernel, partial(launch_rows, table, index)),
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]))
