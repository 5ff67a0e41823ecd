"""Compiles the kernels and prints facts about each cubin as JSON; needs no GPU.

python compile_cubins.py                  # all kernels for sm_90, some projections for the others
python compile_cubins.py --every [ARCH]   # every kind of projection, for every or one architecture
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError

from sglang_hc_kernels import Epilogue, KNorm, Rotary, triton_kv, triton_project, triton_rows
from sglang_hc_kernels.ops import WARM_ROWS

ARCHITECTURES = (80, 86, 89, 90)
TIMED_ROWS = 4096
"""Rows with which a server times the ways to project, when it starts."""

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.uint8: "u8",
}


Facts = dict[str, int]


def facts(arch: int, kernel: Any, arguments: dict[str, Any], **options: int) -> Facts:
    """Compiles with the types and divisibility that a launch with these arguments would have."""
    constants, signature, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        divisible = False
        if parameter.is_constexpr:
            constants[parameter.name] = value
            signature[parameter.name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + NAMES[value.dtype]
            divisible = not parameter.do_not_specialize_on_alignment
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif parameter.do_not_specialize:
            signature[parameter.name] = "i32"
        elif value == 1:  # a launch makes it a constant
            constants[parameter.name] = value
            signature[parameter.name] = "constexpr"
        else:
            signature[parameter.name] = "i32"
            divisible = value % 16 == 0
        if divisible:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = built.asm["ptx"]
    return {
        "cubin_bytes": len(built.asm["cubin"]),
        "shared_bytes": built.metadata.shared,
        "matrix_instructions": len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)", ptx)),
        "vector_stores": len(re.findall(r"st\.global\.(?:v4\.b32|v2\.b64)", ptx)),
        "spilled_bytes": spilled(built.asm["cubin"]),
    }


def spilled(cubin: bytes) -> int:
    """Bytes of stack that a thread of the cubin's kernel uses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [str(CUOBJDUMP), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    return max(int(size) for size in re.findall(r"STACK:(\d+)", usage.stdout))


@dataclass(frozen=True)
class Layer:
    """Of a model. rotary_dim: 0 without RoPE. rich: with bias and k-norm. fp8: the pool's type."""

    heads: int
    dim: int
    rotary_dim: int
    interleaved: bool = False
    rich: bool = False
    fp8: bool = False
    dtype: torch.dtype = torch.bfloat16

    def arguments(self, count: int, min_block: int) -> dict[str, Any]:
        """Launch arguments with so many rows."""
        dtype, heads, dim = self.dtype, self.heads, self.dim
        cache = Rotary(torch.empty(8, self.rotary_dim), self.interleaved)
        bias = torch.empty(2 * heads * dim, dtype=dtype) if self.rich else None
        norm = KNorm(torch.empty(dim, dtype=dtype), 1e-6) if self.rich else None
        pool = torch.empty(2, heads, dim, dtype=torch.float8_e4m3fn if self.fp8 else dtype)
        index = torch.empty(count, dtype=torch.int64)
        like = torch.empty(count, 1, dtype=dtype)
        epilogue = Epilogue(bias, norm, cache if self.rotary_dim else None)
        made = triton_kv.epilogue_arguments(like, index, index, pool, pool, epilogue, min_block)
        return {**made, "kv": like, "kv_stride": 2 * heads * dim}


def projection(arch: int, layer: Layer, count: int) -> Facts:
    arguments = layer.arguments(count, 16)
    tile = triton_project.tile_for(count, arguments)
    matrix = arguments["kv"]
    arguments |= {"hidden": matrix, "hidden_stride": 4096, "weight": matrix, "depth": 4096}
    arguments |= {"weight_stride": 4096, "TOKENS": tile.tokens, "DEPTH": tile.depth, "GROUP": 8}
    kernel = triton_project.project_kv_kernel
    return facts(arch, kernel, arguments, num_warps=tile.warps, num_stages=tile.stages)


def epilogue(arch: int, layer: Layer) -> Facts:
    arguments = {**layer.arguments(64, 1), "TOKENS": 16}
    return facts(arch, triton_kv.kv_epilogue_kernel, arguments, num_warps=4)


def rows(arch: int, word: Any, wide: bool) -> Facts:
    index = torch.empty(1, dtype=torch.int64)
    sizes = ("source_count", "source_stride", "layer_stride", "row_stride", "row_words")
    arguments: dict[str, Any] = dict.fromkeys(("source_table", "slots"), index)
    arguments["staging"] = torch.empty(1, dtype=torch.uint8)
    arguments |= dict.fromkeys(sizes, 1024 if wide else 1001)
    arguments |= {"WORD": word, "WIDE": wide, "BLOCK": 1024}
    return facts(arch, triton_rows.gather_rows_kernel, arguments, num_warps=8)


def refused(compiled: Callable[[], Facts]) -> Facts:
    """Whether Triton refuses a type of numbers that the architecture does not have."""
    try:
        return {**compiled(), "refused": 0}
    except CompilationError as error:
        assert "fp8e4nv not supported" in str(error.__cause__ or error), error
        return {"refused": 1}


MHA, GQA = Layer(32, 128, 128), Layer(8, 128, 64, rich=True)


def usual() -> dict[str, Facts]:
    """Every kernel for sm_90; for the others what needs most shared memory, and fp8."""
    fp16 = Layer(32, 80, 80, interleaved=True, dtype=torch.float16)
    results = {
        "sm_90 epilogue mha": epilogue(90, MHA),
        "sm_90 epilogue gqa interleaved bias norm": epilogue(90, replace(GQA, interleaved=True)),
        "sm_90 project gqa bias norm fp8 one row": projection(90, replace(GQA, fp8=True), 1),
        "sm_90 project fp16 interleaved head 80": projection(90, fp16, 1024),
        "sm_90 rows wide": rows(90, tl.int64, True),
        "sm_90 rows odd bytes": rows(90, tl.int8, False),
    }
    for arch in ARCHITECTURES:
        for layer, count in (
            (MHA, TIMED_ROWS), (Layer(12, 64, 0), TIMED_ROWS), (Layer(32, 128, 0), 512),
        ):  # fmt: skip
            name = f"sm_{arch} project {layer.dim}, RoPE {layer.rotary_dim}, {count} rows"
            results[name] = projection(arch, layer, count)
        fp8 = replace(GQA, interleaved=True, fp8=True)
        results[f"sm_{arch} epilogue fp8"] = refused(partial(epilogue, arch, fp8))
    return results


def every(architectures: tuple[int, ...]) -> dict[str, Facts]:
    """Projections of every kind, with the rows that a start launches."""
    results = {}
    for arch, dim in product(architectures, (64, 80, 128, 256)):
        for rotary in (dim, dim // 4 * 2, 0):
            layer = Layer(8, dim, rotary)
            tiles = {
                triton_project.tile_for(count, layer.arguments(count, 16)): count
                for count in (*WARM_ROWS, TIMED_ROWS)
            }
            for count in tiles.values():
                name = f"sm_{arch} project {dim}, RoPE {rotary}, {count} rows"
                results[name] = projection(arch, layer, count)
    return results


def main(words: list[str]) -> None:
    chosen = tuple(map(int, words[1:])) or ARCHITECTURES
    print(json.dumps(every(chosen) if words[:1] == ["--every"] else usual(), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
