"""Lanes: what is enqueued, in which order, and when it is over."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from sglang_hc.transfer import lanes
from support.streams import COMPUTE, StreamDevice, StreamLane

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Lane2d = Callable[[torch.Tensor, torch.Tensor], None]


class HostRuntime:
    """Stands in for the CUDA runtime: does in host memory what cudaMemcpy2DAsync is told."""

    def __init__(self, status: int = 0) -> None:
        self.status = status

    def cudaMemcpy2DAsync(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int,
        height: int, kind: int, stream: int,
    ) -> int:  # fmt: skip
        assert kind == lanes.MEMCPY_DEFAULT and stream == 77
        assert target_pitch >= width and source_pitch >= width, "CUDA refuses such pitches"
        for row in range(height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
        return self.status


def strided(rows: int, width: int, stride: int) -> torch.Tensor:
    whole = torch.arange(rows * stride, dtype=torch.int64).to(torch.uint8)
    return whole.view(rows, stride)[:, 3 : 3 + width]


@pytest.mark.parametrize("rows", [1, 4])
def test_strided_rows_are_copied_with_the_pitch_of_each_side(rows: int) -> None:
    source = strided(rows, 24, 40)
    target = torch.zeros(rows, 32, dtype=torch.uint8)[:, :24]
    lanes.copy_2d(HostRuntime(), target, source, 77)
    assert torch.equal(target, source)


def test_a_failed_copy_raises() -> None:
    target, source = torch.zeros(2, 4, dtype=torch.uint8), strided(2, 4, 9)
    with pytest.raises(RuntimeError, match="2 rows of 4 bytes: CUDA error 1"):
        lanes.copy_2d(HostRuntime(status=1), target, source, 77)


@pytest.mark.parametrize(
    ("target", "source"),
    [(strided(2, 4, 9), strided(3, 4, 9)), (strided(4, 4, 9).T, strided(4, 4, 9))],
)
def test_what_is_not_rows_of_one_shape_is_refused(
    target: torch.Tensor, source: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match="contiguous rows and one shape"):
        lanes.copy_2d(HostRuntime(), target, source, 77)


def test_the_runtime_of_this_torch_has_the_call() -> None:
    if torch.version.cuda is None:
        pytest.skip("torch without CUDA")
    assert lanes.cuda_runtime().cudaMemcpy2DAsync.argtypes is not None


def test_a_host_lane_is_never_late() -> None:
    lane = lanes.lane_for(torch.device("cpu"))
    target = torch.zeros(2, 3, dtype=torch.uint8)
    lane.after(lane.computed())
    lane.copy(target, torch.ones(2, 3, dtype=torch.uint8))
    mark = lane.mark()
    assert mark.done() and bool(target.all())
    mark.wait()
    lane.before_compute(mark)
    lane.pin(bytearray(1))
    assert not lane.own_memory


def test_the_late_device_keeps_the_order_that_fences_ask_for() -> None:
    """The tests of this folder rest on it."""
    for seed in range(20):
        device = StreamDevice(seed)
        lane = StreamLane(device)
        first, second, third = (torch.full((1, 1), n, dtype=torch.uint8) for n in (1, 2, 3))
        device.submit(COMPUTE, lambda t=first: t.fill_(9))
        lane.after(lane.computed())
        lane.copy(second, first)
        mark = lane.mark()
        assert not mark.done()
        lane.before_compute(mark)
        device.submit(COMPUTE, lambda t=third, s=second: t.copy_(s))
        mark.wait()
        assert mark.done() and second.item() == 9
        device.run()
        assert third.item() == 9


def test_the_late_device_finds_fences_that_wait_for_each_other() -> None:
    device = StreamDevice(0)
    device.submit(COMPUTE, None, (1, 1))
    with pytest.raises(AssertionError, match="nothing can move"):
        device.run()


@needs_cuda
def test_cuda_copies_of_strided_rows_between_pinned_host_and_device() -> None:
    device = torch.device("cuda")
    lane = lanes.lane_for(device)
    buffer = bytearray(64 * 4096)
    lane.pin(buffer)
    host = torch.frombuffer(buffer, dtype=torch.uint8).view(64, 4096)
    host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8))
    target = torch.zeros(32, 1000, dtype=torch.uint8, device=device)
    lane.copy(target, host[::2, 8:1008])
    mark = lane.mark()
    lane.before_compute(mark)
    doubled = target.clone()  # compute work behind the fence
    mark.wait()
    assert mark.done()
    assert torch.equal(doubled.cpu(), host[::2, 8:1008])
    target += 1
    lane.after(lane.computed())
    lane.copy(host[::2, 8:1008], target)
    mark = lane.mark()
    mark.wait()
    assert torch.equal(target.cpu(), host[::2, 8:1008])
