"""The calls into the CUDA runtime, against one that checks its arguments and copies in memory."""

from __future__ import annotations

import ctypes
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.device import cuda_copies
from sglang_hc.device.cuda_copies import (
    BATCHED,
    TIMED_RANGES,
    BatchedCopy,
    Ranges,
    choose_copies,
    each_range,
)
from support.cuda import STREAM, HostRuntime


def ranges_of(places: list[tuple[int, int]]) -> Ranges:
    """(source, size) of ranges that lie one behind the other in the target."""
    sources, sizes = np.array(places, dtype=np.int64).T
    return Ranges(sources, np.cumsum(sizes) - sizes, sizes)


PLACES = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 50)), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(places=PLACES, major=st.sampled_from([12, 13]))
def test_every_way_copies_the_ranges(places: list[tuple[int, int]], major: int) -> None:
    """From a source with gaps, as one layer of the host pool is."""
    source = torch.randint(0, 256, (20, 2, 10), dtype=torch.uint8)[:, 1]
    ranges = ranges_of([(start, min(size, 190 - start)) for start, size in places])
    total = int(ranges.sizes.sum())
    wanted = torch.zeros(total + 1, dtype=torch.uint8)
    for into, out_of in each_range(wanted, source, ranges):
        into.copy_(out_of)
    runtime = HostRuntime(major)
    for way in cuda_copies.range_copies(runtime, major).values():
        target = torch.zeros(total + 1, dtype=torch.uint8)
        way(target, source, ranges, STREAM)
        assert torch.equal(target, wanted)
    assert runtime.calls == ["1d"] * len(places) + ["batch"]


def test_a_runtime_without_batches_has_one_way() -> None:
    class Old:
        pass

    assert list(cuda_copies.range_copies(Old(), 12)) == ["one call a range"]


@pytest.mark.parametrize("major", [12, 13])
def test_a_failed_batch_raises(major: int) -> None:
    one = torch.zeros(4, dtype=torch.uint8)
    copy = BatchedCopy(HostRuntime(major, status=801), major)
    with pytest.raises(RuntimeError, match="of 1 ranges: CUDA error 801"):
        copy(one, torch.ones(4, dtype=torch.uint8), ranges_of([(0, 4)]), STREAM)


def test_a_failed_copy_of_a_range_raises() -> None:
    one = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="of 4 bytes: CUDA error 1"):
        cuda_copies.copy_one_by_one(
            HostRuntime(status=1), one, torch.ones_like(one), ranges_of([(0, 4)]), STREAM
        )


def test_the_structure_is_laid_out_as_in_the_headers_of_cuda() -> None:
    """An enum, two locations of an enum and an int, and flags: 24 bytes without padding."""
    kind = cuda_copies.CopyAttributes
    fields = [kind.source_access_order, kind.source_hint, kind.target_hint, kind.flags]
    assert [field.offset for field in fields] == [0, 4, 12, 20]
    assert ctypes.sizeof(kind) == 24


def test_the_call_of_cuda_12_has_one_argument_more() -> None:
    assert len(cuda_copies.batch_arguments(12)) == len(cuda_copies.batch_arguments(13)) + 1 == 9


@pytest.mark.parametrize("status", [0, 36])
def test_the_batch_is_used_where_it_works_and_is_faster(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver that is too old for the call is one way less, not a failed start."""
    runtime = HostRuntime()
    ways = cuda_copies.range_copies(runtime, 13)
    batch = HostRuntime(status=status)
    ways[BATCHED] = BatchedCopy(batch, 13)
    target = torch.zeros(TIMED_RANGES * 4, dtype=torch.uint8)
    source = torch.randint(0, 256, (TIMED_RANGES * 8,), dtype=torch.uint8)

    def seconds(work) -> float:  # type: ignore[no-untyped-def]
        before = len(runtime.calls) + len(batch.calls)
        work()
        return float(len(runtime.calls) + len(batch.calls) - before)

    with caplog.at_level(logging.WARNING):
        name = choose_copies(ways, target, source, STREAM, lambda: None, seconds)
    assert (name == BATCHED) == (status == 0)
    assert ("CUDA error 36" in caplog.text) == (status != 0)


def test_a_way_that_copies_something_else_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(target: torch.Tensor, source: torch.Tensor, ranges: Ranges, stream: int) -> None:
        target.copy_(source[: target.numel()])

    ways = {**cuda_copies.range_copies(HostRuntime(), 13), BATCHED: wrong}
    target = torch.zeros(TIMED_RANGES * 4, dtype=torch.uint8)
    source = torch.randint(0, 256, (TIMED_RANGES * 8,), dtype=torch.uint8)
    with caplog.at_level(logging.WARNING):
        name = choose_copies(ways, target, source, STREAM, lambda: None, lambda work: 0.0)
    assert name == "one call a range" and "bytes differ" in caplog.text


def test_the_runtime_of_this_torch_has_the_calls() -> None:
    if torch.version.cuda is None:
        pytest.skip("torch without CUDA")
    runtime = cuda_copies.cuda_runtime()
    assert runtime.cudaMemcpy2DAsync.argtypes is not None
    assert runtime.cudaHostRegister.argtypes is not None
    if cuda_copies.cuda_major() >= 13:
        assert len(runtime.cudaMemcpyBatchAsync.argtypes) == 8
