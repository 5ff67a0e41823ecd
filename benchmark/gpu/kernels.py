"""sgl-kernel-ext's benchmark, one cell per shape, size and group of arms.

python -m benchmark.gpu.kernels --cells FILE [--shapes mha-7b gqa-8b] [--tokens 1024 4096] [--tiles]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

from benchmark import ROOT
from benchmark.harness.cells import CellFile

REPEATS = 20


def load() -> ModuleType:
    """The benchmark of the kernels, which is no part of a package."""
    path = ROOT / "sgl-kernel-ext" / "benchmark" / "bench_kernels.py"
    spec = importlib.util.spec_from_file_location("bench_kernels", path)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules["bench_kernels"] = bench
    spec.loader.exec_module(bench)
    return bench


def measure(bench: ModuleType, file: CellFile, shape: str, tokens: int, tiles: bool) -> bool:
    """The groups of one shape and size; False when one of them failed."""
    kind = "tiles" if tiles else "default"
    names = [f"kernels/{shape}/{tokens}/{name}/{kind}" for name in bench.GROUPS]
    if all(map(file.has, names)):
        return True
    good = True
    ceiling = bench.ceilings(REPEATS)
    layer = bench.Layer(bench.SHAPES[shape], tokens, "cuda")
    for key, group in zip(names, bench.groups(layer, bench.TILES if tiles else ()), strict=True):
        if file.has(key):
            continue
        began = time.monotonic()
        where = {"shape": shape, "tokens": tokens, "group": group.name}
        try:
            found = bench.report(group, REPEATS, ceiling)
        except Exception as error:
            # One kernel that does not compile or launch here must not cost the other groups.
            file.failed(key, f"{type(error).__name__}: {error}", "", time.monotonic() - began)
            good = False
        else:
            file.add(key, {**where, **found, "ceilings": ceiling}, time.monotonic() - began)
    return good


def main() -> int:
    bench = load()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=bench.SHAPES, default=list(bench.SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 1024, 4096, 16384])
    parser.add_argument("--tiles", action="store_true", help="also time other projection tiles")
    parser.add_argument("--cells", type=Path, required=True)
    args = parser.parse_args()
    file = CellFile(args.cells, "kernels")
    good = [
        measure(bench, file, shape, tokens, args.tiles)
        for shape in args.shapes
        for tokens in args.tokens
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
