"""Compiles the kernels for sm_90 and prints facts about each cubin as JSON; needs no GPU."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_hc_kernels import Epilogue, KNorm, Rotary, triton_kv, triton_project, triton_rows

TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.uint8: "u8",
}


def facts(kernel: Any, arguments: dict[str, Any], **options: int) -> dict[str, int]:
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
    built = triton.compile(source, target=TARGET, options=options)
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


def kv_arguments(
    count: int,
    heads: int,
    dim: int,
    rotary_dim: int,
    interleaved: bool,
    rich: bool,
    dtype: torch.dtype,
    min_block: int,
) -> dict[str, Any]:
    """Launch arguments of a layer; `rich` adds bias, k-norm and an fp8 pool."""
    cache = Rotary(torch.empty(8, rotary_dim), interleaved) if rotary_dim else None
    bias = torch.empty(2 * heads * dim, dtype=dtype) if rich else None
    norm = KNorm(torch.empty(dim, dtype=dtype), 1e-6) if rich else None
    pool = torch.empty(2, heads, dim, dtype=torch.float8_e4m3fn if rich else dtype)
    index = torch.empty(count, dtype=torch.int64)
    like = torch.empty(count, 1, dtype=dtype)
    epilogue = Epilogue(bias, norm, cache)
    made = triton_kv.epilogue_arguments(like, index, index, pool, pool, epilogue, min_block)
    return {**made, "kv": like, "kv_stride": 2 * heads * dim}


def projection(
    count: int,
    heads: int,
    dim: int,
    rotary_dim: int,
    interleaved: bool,
    rich: bool,
    dtype: torch.dtype,
) -> dict[str, int]:
    arguments = kv_arguments(count, heads, dim, rotary_dim, interleaved, rich, dtype, 16)
    tile = triton_project.default_tile(count, dim)
    matrix = arguments["kv"]
    arguments |= {"hidden": matrix, "hidden_stride": 4096, "weight": matrix, "depth": 4096}
    arguments |= {"weight_stride": 4096, "TOKENS": tile.tokens, "DEPTH": tile.depth, "GROUP": 8}
    kernel = triton_project.project_kv_kernel
    return facts(kernel, arguments, num_warps=tile.warps, num_stages=tile.stages)


def epilogue(
    heads: int, dim: int, rotary_dim: int, interleaved: bool, rich: bool, dtype: torch.dtype
) -> dict[str, int]:
    arguments = kv_arguments(64, heads, dim, rotary_dim, interleaved, rich, dtype, 1)
    return facts(triton_kv.kv_epilogue_kernel, {**arguments, "TOKENS": 16}, num_warps=4)


def rows(word: Any, wide: bool) -> dict[str, int]:
    index = torch.empty(1, dtype=torch.int64)
    sizes = ("source_count", "source_stride", "layer_stride", "row_stride", "row_words")
    arguments: dict[str, Any] = dict.fromkeys(("source_table", "slots"), index)
    arguments["staging"] = torch.empty(1, dtype=torch.uint8)
    arguments |= dict.fromkeys(sizes, 1024 if wide else 1001)
    arguments |= {"WORD": word, "WIDE": wide, "BLOCK": 1024}
    return facts(triton_rows.gather_rows_kernel, arguments, num_warps=8)


def main() -> None:
    bf16, fp16 = torch.bfloat16, torch.float16
    results = {
        "epilogue-mha-neox": epilogue(32, 128, 128, False, False, bf16),
        "epilogue-gqa-interleaved-partial-bias-norm-fp8": epilogue(8, 128, 64, True, True, bf16),
        "project-mha-neox-large": projection(4096, 32, 128, 128, False, False, bf16),
        "project-gqa-partial-bias-norm-fp8-one-token": projection(1, 8, 128, 64, False, True, bf16),
        "project-fp16-interleaved-head-80": projection(1024, 32, 80, 80, True, False, fp16),
        "rows-wide": rows(tl.int64, True),
        "rows-odd-bytes": rows(tl.int8, False),
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
