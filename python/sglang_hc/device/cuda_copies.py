"""The calls of the CUDA runtime that copies are enqueued with, and the choice between them.

torch can neither copy rows with a pitch from pinned memory nor make many copies with one call, so
both go through ctypes to the runtime library that torch has loaded.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_hc.device.autotune import Seconds, bytes_differ, choose, seconds_on

MEMCPY_DEFAULT = 4
"""cudaMemcpyDefault: the runtime finds the direction from the addresses."""

IN_STREAM_ORDER = 1
"""cudaMemcpySrcAccessOrderStream: a source is read when the stream reaches its copy."""

TIMED_RANGES = 256
TIMED_RANGE_BYTES = 16 << 10
"""The copies that are timed at start: 256 blocks of 64 tokens with 256 bytes each, which is a layer
of 16K tokens of a narrow grouped-query model. Short ranges show the cost of a call."""

BATCHED = "one call for all"
"""The way for which `CopyStream.batches` is true."""

Offsets = npt.NDArray[np.int64]


class Ranges(NamedTuple):
    """Three arrays of n int64 numbers: range i is `sizes[i]` bytes long.

    sources, targets: bytes from the first byte of the source and of the target. The targets do not
    overlap, so the ranges may be copied in any order.
    """

    sources: Offsets
    targets: Offsets
    sizes: Offsets


def each_range(
    target: torch.Tensor, source: torch.Tensor, ranges: Ranges
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The ranges as pairs (target, source) of one-dimensional uint8 views."""
    into, out_of = _flat(target), _flat(source)
    for start, at, size in zip(*(column.tolist() for column in ranges), strict=True):
        yield into.narrow(0, at, size), out_of.narrow(0, start, size)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes from a uint8 tensor's first one to its last one, gaps included."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))


CopyRanges = Callable[[torch.Tensor, torch.Tensor, Ranges, int], None]
"""(target, source, ranges, stream handle)."""


class Location(ctypes.Structure):
    """cudaMemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", Location),
        ("target_hint", Location),
        ("flags", ctypes.c_uint),
    )


def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded. Raises OSError when torch has none."""
    runtime = ctypes.CDLL(f"libcudart.so.{cuda_major()}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    runtime.cudaMemcpy2DAsync.argtypes = [
        pointer, size, pointer, size, size, size, ctypes.c_int, pointer
    ]  # fmt: skip
    runtime.cudaMemcpyAsync.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]
    runtime.cudaHostRegister.argtypes = [pointer, size, ctypes.c_uint]
    runtime.cudaHostUnregister.argtypes = [pointer]
    if hasattr(runtime, "cudaMemcpyBatchAsync"):
        runtime.cudaMemcpyBatchAsync.argtypes = batch_arguments(cuda_major())
    return runtime


def cuda_major() -> int:
    """Major version of the CUDA that torch was built for; 0 for none."""
    return int((torch.version.cuda or "0").partition(".")[0])


def batch_arguments(major: int) -> list[Any]:
    """Argument types of cudaMemcpyBatchAsync. CUDA 12 has one more, for the copy that failed."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    failed = [pointer] if major < 13 else []
    return [pointer, pointer, pointer, size, pointer, pointer, size, *failed, pointer]


def copy_2d(runtime: Any, target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
    """Enqueue a copy of (rows, bytes) uint8 with contiguous rows on a CUDA stream handle.

    Host memory must be pinned, or the call waits for the copy. Raises RuntimeError.
    """
    rows, width = source.shape
    if source.stride(1) != 1 or target.stride(1) != 1 or target.shape != source.shape:
        raise ValueError("a copy of rows needs contiguous rows and one shape on both sides")
    status = runtime.cudaMemcpy2DAsync(
        target.data_ptr(), target.stride(0), source.data_ptr(), source.stride(0),
        width, rows, MEMCPY_DEFAULT, stream,
    )  # fmt: skip
    if status != 0:
        raise RuntimeError(
            f"cudaMemcpy2DAsync of {rows} rows of {width} bytes: CUDA error {status}"
        )


def copy_one_by_one(
    runtime: Any, target: torch.Tensor, source: torch.Tensor, ranges: Ranges, stream: int
) -> None:
    """Enqueue each range with a call of its own. Raises RuntimeError."""
    into, out_of = target.data_ptr(), source.data_ptr()
    for start, at, size in zip(*(column.tolist() for column in ranges), strict=True):
        status = runtime.cudaMemcpyAsync(into + at, out_of + start, size, MEMCPY_DEFAULT, stream)
        if status != 0:
            raise RuntimeError(f"cudaMemcpyAsync of {size} bytes: CUDA error {status}")


class BatchedCopy:
    """Enqueues any number of ranges with one cudaMemcpyBatchAsync (CUDA 12.8 and later).

    major: version of the runtime. The stream must not be the legacy default stream; torch's own
    streams are not.
    """

    def __init__(self, runtime: Any, major: int) -> None:
        self._copy = runtime.cudaMemcpyBatchAsync
        self._attributes = CopyAttributes(source_access_order=IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)  # the attributes hold from the first copy on
        self._failed = ctypes.c_size_t(0)
        # Addresses, because the argument types are plain pointers in both versions.
        tail = [ctypes.addressof(self._failed)] if major < 13 else []
        self._rest = (ctypes.addressof(self._attributes), ctypes.addressof(self._first), 1, *tail)

    def __call__(
        self, target: torch.Tensor, source: torch.Tensor, ranges: Ranges, stream: int
    ) -> None:
        """Raises RuntimeError. The arrays of addresses are read before the call returns."""
        count = len(ranges.sizes)
        targets = ranges.targets + target.data_ptr()
        sources = ranges.sources + source.data_ptr()
        sizes = np.ascontiguousarray(ranges.sizes)
        status = self._copy(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, count, *self._rest, stream
        )
        if status != 0:
            raise RuntimeError(f"cudaMemcpyBatchAsync of {count} ranges: CUDA error {status}")


def range_copies(runtime: Any, major: int) -> dict[str, CopyRanges]:
    """The ways to copy ranges that a runtime has, by name; the first works everywhere."""
    ways: dict[str, CopyRanges] = {"one call a range": partial(copy_one_by_one, runtime)}
    if hasattr(runtime, "cudaMemcpyBatchAsync"):
        ways[BATCHED] = BatchedCopy(runtime, major)
    return ways


def choose_copies(
    ways: dict[str, CopyRanges], target: torch.Tensor, source: torch.Tensor, stream: int,
    idle: Callable[[], None], seconds: Seconds,
) -> str:  # fmt: skip
    """Name of the fastest way that copies what the first way copies.

    target: (n,) uint8 on the device, source: (2 n,) uint8 in pinned memory; n is a whole number of
    `TIMED_RANGES`. idle: wait for the stream.
    """
    count = TIMED_RANGES
    size = target.numel() // count
    order = np.random.default_rng(0).permutation(count)
    sizes = np.full(count, size, dtype=np.int64)
    ranges = Ranges(2 * size * order, np.arange(count) * size, sizes)

    def copied(way: CopyRanges) -> torch.Tensor:
        target.zero_()
        idle()
        way(target, source, ranges, stream)
        idle()
        return target.cpu().clone()

    def copy(way: CopyRanges) -> None:
        way(target, source, ranges, stream)

    return choose("copies of scattered blocks", ways, copy, seconds, copied, bytes_differ)


@functools.lru_cache
def chosen_copies(device: torch.device) -> tuple[str, CopyRanges]:
    """The way for this device. It is timed once per process, before any request."""
    ways = range_copies(cuda_runtime(), cuda_major())
    size = TIMED_RANGES * TIMED_RANGE_BYTES
    source = torch.randint(0, 256, (2 * size,), dtype=torch.uint8).pin_memory()
    target = torch.empty(size, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
    idle = partial(torch.cuda.synchronize, device)
    name = choose_copies(ways, target, source, stream.cuda_stream, idle, seconds_on(device))
    return name, ways[name]
