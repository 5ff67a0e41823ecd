"""Times the kernels on a CUDA GPU against torch, sgl_kernel's copies and the machine's ceilings.

Each round runs every arm once (A B A B), timed with CUDA events after the L2 cache was flushed.
Writes JSON: per arm the median, least and greatest milliseconds and what part of the ceiling that
is, and whether the arm's result agrees with the reference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import torch
import torch.nn.functional as F

from sglang_hc_kernels import Epilogue, Rotary, ops, reference, triton_kv, triton_project
from sglang_hc_kernels.ops import PointerTable
from sglang_hc_kernels.triton_project import Tile

WARM_UPS = 3
FLUSH_BYTES = 256 << 20
COPY_LAYERS = 8
GROUPS = ("epilogue", "project", "gather")
"""What is compared, in the order of `groups`."""

TILES = (Tile(64, 64, 4, 4), Tile(64, 128, 4, 2), Tile(128, 32, 8, 4), Tile(128, 64, 8, 3))


@dataclass(frozen=True)
class Shape:
    """One layer: K/V heads, head size, width of the hidden state."""

    heads: int
    head_size: int
    hidden: int


SHAPES = {
    "mha-7b": Shape(32, 128, 4096),
    "mha-13b": Shape(40, 128, 5120),
    "gqa-8b": Shape(8, 128, 4096),
}


@dataclass(frozen=True)
class Group:
    """Arms that do the same work.

    outputs: the tensors that every arm writes, compared with the first arm's. bytes, flops: the
    work that no arm can avoid.
    """

    name: str
    arms: dict[str, Callable[[], object]]
    outputs: tuple[torch.Tensor, ...]
    bytes: int
    flops: int = 0


class Layer:
    """Inputs of one layer for `count` tokens in scattered slots."""

    def __init__(self, shape: Shape, count: int, device: str) -> None:
        bf16 = {"dtype": torch.bfloat16, "device": device}
        self.shape, self.count = shape, count
        self.width = 2 * shape.heads * shape.head_size
        self.hidden = torch.randn(count, shape.hidden, **bf16)
        self.weight = torch.randn(self.width, shape.hidden, **bf16) / shape.hidden**0.5
        self.kv = F.linear(self.hidden, self.weight)
        self.positions = torch.arange(count, device=device)
        self.slots = torch.randperm(2 * count, device=device)[:count]
        half = shape.head_size // 2
        inverse = 10000.0 ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
        angles = self.positions.float()[:, None] * inverse
        self.epilogue = Epilogue(rotary=Rotary(torch.cat((angles.cos(), angles.sin()), dim=-1)))
        rows = (2 * count, shape.heads, shape.head_size)
        self.k_pool, self.v_pool = torch.zeros(rows, **bf16), torch.zeros(rows, **bf16)

    @property
    def places(self) -> tuple[torch.Tensor, ...]:
        return self.positions, self.slots, self.k_pool, self.v_pool


def epilogue_group(layer: Layer) -> Group:
    """K-RoPE and scatter."""
    arms: dict[str, Callable[[], object]] = {
        "torch": lambda: reference.kv_epilogue(layer.kv, *layer.places, layer.epilogue),
        "triton": lambda: triton_kv.kv_epilogue(layer.kv, *layer.places, layer.epilogue),
    }
    moved = 2 * layer.kv.numel() * layer.kv.element_size()
    return Group("epilogue", arms, (layer.k_pool, layer.v_pool), moved)


def project_group(layer: Layer, tiles: tuple[Tile, ...]) -> Group:
    """Projection and epilogue: library GEMM plus either epilogue, and the fused kernel."""

    def fused(tile: Tile | None) -> Callable[[], object]:
        return lambda: triton_project.project_kv(
            layer.hidden, layer.weight, *layer.places, layer.epilogue, tile
        )

    def library(epilogue: Callable[..., object]) -> Callable[[], object]:
        return lambda: epilogue(F.linear(layer.hidden, layer.weight), *layer.places, layer.epilogue)

    arms = {
        "gemm+torch": library(reference.kv_epilogue),
        "gemm+triton": library(triton_kv.kv_epilogue),
        "fused": fused(None),
    }
    for tile in tiles:
        name = f"fused-{tile.tokens}x{tile.depth}-w{tile.warps}-s{tile.stages}"
        arms[name] = fused(tile)
    values = layer.hidden.numel() + layer.weight.numel() + layer.kv.numel()
    flops = 2 * layer.count * layer.shape.hidden * layer.width
    return Group("project", arms, (layer.k_pool, layer.v_pool), 2 * values, flops)


def gather_group(layer: Layer) -> Group:
    """K rows of several layers from pool to staging."""
    pools = [torch.randn_like(layer.k_pool) for _ in range(COPY_LAYERS)]
    table = PointerTable(pools)
    staging = torch.zeros(
        (COPY_LAYERS, layer.count, table.row_bytes), dtype=torch.uint8, device=layer.kv.device
    )
    words = [pool.flatten(1).view(torch.int64) for pool in pools]

    def by_torch() -> None:
        for pool, out in zip(words, staging.view(torch.int64), strict=True):
            torch.index_select(pool, 0, layer.slots, out=out)

    arms: dict[str, Callable[[], object]] = {
        "torch": by_torch,
        "triton": lambda: ops.gather_rows(table, layer.slots, staging),
    }
    if layer.kv.is_cuda:
        try:
            from sgl_kernel.kvcacheio import transfer_kv_all_layer_mla
        except ImportError as error:
            print(f"no sgl_kernel transfer arm: {error}", file=sys.stderr)
        else:
            tables = table, PointerTable(list(staging))
            addresses = [side.addresses.view(torch.uint64) for side in tables]
            order = torch.arange(layer.count, device=layer.kv.device)
            arms["sgl_kernel"] = lambda: transfer_kv_all_layer_mla(
                addresses[0], addresses[1], layer.slots, order, table.row_bytes, COPY_LAYERS
            )
    return Group("gather", arms, (staging,), 2 * staging.numel())


def agreement(group: Group) -> dict[str, float]:
    """Greatest difference of each arm's outputs from those of the first arm."""
    wanted: list[torch.Tensor] = []
    worst: dict[str, float] = {}
    for name, arm in group.arms.items():
        for output in group.outputs:
            output.zero_()
        arm()
        if not wanted:
            wanted = [output.clone() for output in group.outputs]
        worst[name] = max(
            (output.float() - want.float()).abs().max().item()
            for output, want in zip(group.outputs, wanted, strict=True)
        )
    return worst


def interleaved(arms: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each run of each arm, arms taking turns."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(WARM_UPS + repeats):
        for name, arm in arms.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            arm()
            end.record()
            end.synchronize()
            if turn >= WARM_UPS:
                times[name].append(start.elapsed_time(end))
    return times


def ceilings(repeats: int) -> dict[str, float]:
    """Pinned host-to-device and device bandwidth in GB/s, bf16 GEMM rate in TFLOP/s; medians."""
    size, side = 256 << 20, 8192
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device, other = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    left, right = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    times = interleaved(
        {
            "h2d": lambda: device.copy_(host, non_blocking=True),
            "d2d": lambda: other.copy_(device),
            "gemm": lambda: torch.mm(left, right, out=out),
        },
        repeats,
    )
    ms = {name: statistics.median(values) for name, values in times.items()}
    return {
        "h2d_gbps": size / ms["h2d"] / 1e6,
        "device_gbps": 2 * size / ms["d2d"] / 1e6,
        "gemm_tflops": 2 * side**3 / ms["gemm"] / 1e9,
    }


def report(group: Group, repeats: int, ceiling: dict[str, float]) -> dict[str, Any]:
    """Times of the group's arms beside the least time that the ceilings allow."""
    differences = agreement(group)
    times = interleaved(group.arms, repeats)
    bound = max(
        group.bytes / ceiling["device_gbps"] / 1e6, group.flops / ceiling["gemm_tflops"] / 1e9
    )
    arms = {}
    for name, values in times.items():
        median = statistics.median(values)
        arms[name] = {
            "median_ms": median,
            "min_ms": min(values),
            "max_ms": max(values),
            "of_bound": bound / median,
            "max_difference_from_first_arm": differences[name],
        }
    return {"bound_ms": bound, "bytes": group.bytes, "flops": group.flops, "arms": arms}


def groups(layer: Layer, tiles: tuple[Tile, ...]) -> list[Group]:
    return [epilogue_group(layer), project_group(layer, tiles), gather_group(layer)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 1024, 4096, 16384])
    parser.add_argument("--repeats", type=int, default=20, help="timed runs of each arm, >= 20")
    parser.add_argument("--tiles", action="store_true", help="also time other projection tiles")
    arguments = parser.parse_args()
    if arguments.repeats < 20:
        parser.error("--repeats: medians need at least 20")
    if min(arguments.tokens) < 1:
        parser.error("--tokens: must be positive")
    if not torch.cuda.is_available():
        parser.error("no CUDA device; sgl-kernel-ext/test checks the kernels without one")
    torch.manual_seed(0)
    ceiling = ceilings(arguments.repeats)
    results: dict[str, Any] = {}
    for name in arguments.shapes:
        for count in arguments.tokens:
            layer = Layer(SHAPES[name], count, "cuda")
            for group in groups(layer, TILES if arguments.tiles else ()):
                key = f"{name}/{count}/{group.name}"
                results[key] = report(group, arguments.repeats, ceiling)
                medians = {arm: v["median_ms"] for arm, v in results[key]["arms"].items()}
                print(key, json.dumps(medians))
    document = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
        "ceilings": ceiling,
        "results": results,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
