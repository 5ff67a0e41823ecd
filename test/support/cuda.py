"""Stands in for the CUDA runtime in host memory: calls have their arguments checked as CUDA would,
copies happen at once, and registered memory is kept track of."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hc.device import copy_stream, cuda_copies

STREAM = 77

ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered"""


class HostRuntime:
    """status: what every copy answers. refuse: registrations that fail, by number from 0."""

    def __init__(self, major: int = 13, status: int = 0, refuse: frozenset[int] = frozenset()):
        self.major, self.status, self.refuse = major, status, refuse
        self.calls: list[str] = []
        self.registered: dict[int, int] = {}
        self._register_calls = 0

    def cudaMemcpy2DAsync(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int,
        height: int, kind: int, stream: int,
    ) -> int:  # fmt: skip
        assert kind == cuda_copies.MEMCPY_DEFAULT and stream == STREAM
        assert target_pitch >= width and source_pitch >= width, "CUDA refuses such pitches"
        self.calls.append("2d")
        for row in range(height):
            self._move(target + row * target_pitch, source + row * source_pitch, width)
        last = (height - 1) * source_pitch + width
        self._within_one_registration(source, last)
        return self.status

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> int:
        assert kind == cuda_copies.MEMCPY_DEFAULT and stream == STREAM
        self.calls.append("1d")
        self._move(target, source, size)
        return self.status

    def cudaMemcpyBatchAsync(
        self, targets: int, sources: int, sizes: int, count: int, attributes: int, first: int,
        attribute_count: int, *rest: int,
    ) -> int:  # fmt: skip
        assert len(rest) == (2 if self.major < 13 else 1), "CUDA 12 has one argument more"
        assert rest[-1] == STREAM and attribute_count == 1
        given = cuda_copies.CopyAttributes.from_address(attributes)
        assert given.source_access_order == cuda_copies.IN_STREAM_ORDER and given.flags == 0
        assert ctypes.c_size_t.from_address(first).value == 0
        self.calls.append("batch")
        columns = [(ctypes.c_size_t * count).from_address(at) for at in (targets, sources, sizes)]
        for target, source, size in reversed(list(zip(*columns, strict=True))):
            self._move(target, source, size)
        return self.status

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        number, self._register_calls = self._register_calls, self._register_calls + 1
        if number in self.refuse:
            return 2
        for start, count in self.registered.items():
            if address < start + count and start < address + size:
                return ALREADY_REGISTERED
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def _move(self, target: int, source: int, size: int) -> None:
        self._within_one_registration(source, size)
        ctypes.memmove(target, source, size)

    def _within_one_registration(self, address: int, size: int) -> None:
        for start, count in self.registered.items():
            if start <= address < start + count:
                assert address + size <= start + count, "a copy crosses two registrations"


def fake_cuda(
    monkeypatch: pytest.MonkeyPatch, runtime: HostRuntime, handles: Callable[[], int] | None = None
) -> None:
    """`CudaCopyStream` without CUDA. handles: the streams that torch hands out in turn."""

    def stream(**_: Any) -> Any:
        return SimpleNamespace(cuda_stream=STREAM if handles is None else handles())

    monkeypatch.setattr(copy_stream, "cuda_runtime", lambda: runtime)
    ways = cuda_copies.range_copies(runtime, runtime.major)
    chosen = cuda_copies.BATCHED if cuda_copies.BATCHED in ways else next(iter(ways))
    monkeypatch.setattr(copy_stream, "chosen_copies", lambda device: (chosen, ways[chosen]))
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=1)
    )
