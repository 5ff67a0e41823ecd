"""Copy streams: what is enqueued, in which order, and when it is over."""

from __future__ import annotations

import itertools
import mmap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_hc.device import copy_stream, cuda_copies
from support.cuda import STREAM, HostRuntime, fake_cuda
from support.streams import COMPUTE, StreamDevice

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def strided(rows: int, width: int, stride: int) -> torch.Tensor:
    whole = torch.arange(rows * stride, dtype=torch.int64).to(torch.uint8)
    return whole.view(rows, stride)[:, 3 : 3 + width]


@pytest.mark.parametrize("rows", [1, 4])
def test_strided_rows_are_copied_with_the_pitch_of_each_side(rows: int) -> None:
    source = strided(rows, 24, 40)
    target = torch.zeros(rows, 32, dtype=torch.uint8)[:, :24]
    cuda_copies.copy_2d(HostRuntime(), target, source, STREAM)
    assert torch.equal(target, source)


def test_a_failed_copy_raises() -> None:
    target, source = torch.zeros(2, 4, dtype=torch.uint8), strided(2, 4, 9)
    with pytest.raises(RuntimeError, match="2 rows of 4 bytes: CUDA error 1"):
        cuda_copies.copy_2d(HostRuntime(status=1), target, source, STREAM)


@pytest.mark.parametrize(
    ("target", "source"),
    [(strided(2, 4, 9), strided(3, 4, 9)), (strided(4, 4, 9).T, strided(4, 4, 9))],
)
def test_what_is_not_rows_of_one_shape_is_refused(
    target: torch.Tensor, source: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match="contiguous rows and one shape"):
        cuda_copies.copy_2d(HostRuntime(), target, source, STREAM)


def test_copies_of_a_host_are_never_late() -> None:
    copies = copy_stream.copy_stream_for(torch.device("cpu"))
    target = torch.zeros(2, 3, dtype=torch.uint8)
    copies.after(copies.computed())
    copies.copy(target, torch.ones(2, 3, dtype=torch.uint8))
    event = copies.record()
    assert event.done() and bool(target.all())
    event.wait()
    copies.before_compute(event)
    copies.pin(bytearray(1))
    assert copies.opposite() is copies
    copies.close()


def test_the_late_device_finds_fences_that_wait_for_each_other() -> None:
    device = StreamDevice(0)
    device.submit(COMPUTE, None, (1, 1))
    with pytest.raises(AssertionError, match="nothing can move"):
        device.run()


def test_drawing_ends_when_every_stream_is_taken() -> None:
    draws = []

    def draw() -> SimpleNamespace:
        draws.append(1)
        return SimpleNamespace(cuda_stream=len(draws) % 32)

    everything = [SimpleNamespace(cuda_stream=handle) for handle in range(32)]
    with pytest.raises(RuntimeError, match="no CUDA stream left beside 32 others"):
        copy_stream.distinct_stream(draw, everything)
    assert len(draws) == copy_stream.DRAWS


def test_both_directions_the_side_and_the_model_have_a_stream_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often torch comes round to streams that it handed out before."""
    handles = itertools.chain([9, 1, 9, 10, 10, 9, 11, 1, 11], itertools.count(12))
    fake_cuda(monkeypatch, HostRuntime(), lambda: next(handles))
    forward = SimpleNamespace(cuda_stream=10)
    copies = copy_stream.copy_stream_for(torch.device("cuda"), [forward])
    back = copies.opposite()
    assert isinstance(copies, copy_stream.CudaCopyStream) and isinstance(
        back, copy_stream.CudaCopyStream
    )
    assert back.opposite() is copies and copies.opposite() is back
    side = copies.side_stream()
    assert side is not None
    streams = [copies.stream, back.stream, side.args[0], back.side_stream().args[0]]  # type: ignore[attr-defined, union-attr]
    assert [stream.cuda_stream for stream in streams] == [9, 11, 12, 13]


def test_both_directions_share_what_is_registered_and_give_it_back_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both copy streams of a device know what is registered, whichever was asked to."""
    runtime = HostRuntime()
    fake_cuda(monkeypatch, runtime)
    shared = copy_stream.CudaDevice(torch.device("cuda"), [])
    copies = copy_stream.CudaCopyStream(shared)
    monkeypatch.setattr(copy_stream, "distinct_stream", lambda draw, taken: draw())
    back = copies.opposite()
    page = mmap.PAGESIZE
    buffer = mmap.mmap(-1, 6 * page)
    back.pin(buffer)
    assert len(runtime.registered) == 1
    pool = torch.frombuffer(buffer, dtype=torch.uint8).view(6, page)
    pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8))
    target = torch.zeros(4, 100, dtype=torch.uint8)
    copies.copy(target, pool[1:5, 8:108])
    assert runtime.calls == ["2d"]
    assert torch.equal(target, pool[1:5, 8:108])
    assert copies.batches
    ranges = cuda_copies.Ranges(*(np.array(n) for n in ([5 * page, 0], [0, 200], [200, 200])))
    copies.copy_ranges(target, pool, ranges)
    assert runtime.calls[1:] == ["batch"]
    assert torch.equal(target.view(2, 200), pool[[5, 0], :200])
    copies.close()
    assert not runtime.registered
    copies.close()


@needs_cuda
def test_cuda_copies_of_strided_rows_between_pinned_host_and_device() -> None:
    device = torch.device("cuda")
    copies = copy_stream.copy_stream_for(device)
    buffer = bytearray(64 * 4096)
    copies.pin(buffer)
    host = torch.frombuffer(buffer, dtype=torch.uint8).view(64, 4096)
    host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8))
    target = torch.zeros(32, 1000, dtype=torch.uint8, device=device)
    copies.copy(target, host[::2, 8:1008])
    event = copies.record()
    copies.before_compute(event)
    doubled = target.clone()  # compute work behind the fence
    event.wait()
    assert event.done()
    assert torch.equal(doubled.cpu(), host[::2, 8:1008])
    target += 1
    copies.after(copies.computed())
    copies.copy(host[::2, 8:1008], target)
    event = copies.record()
    event.wait()
    assert torch.equal(target.cpu(), host[::2, 8:1008])
    copies.close()


@needs_cuda
def test_cuda_copies_of_scattered_ranges_by_every_way() -> None:
    device = torch.device("cuda")
    page = mmap.PAGESIZE
    copies = copy_stream.copy_stream_for(device)
    assert isinstance(copies, copy_stream.CudaCopyStream)
    buffer = mmap.mmap(-1, 64 * page)
    copies.pin(buffer)
    host = torch.frombuffer(buffer, dtype=torch.uint8).view(64, page)
    host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8))
    order = np.random.default_rng(0).permutation(64)[:40]
    sizes = np.full(40, 1000, dtype=np.int64)
    ranges = cuda_copies.Ranges(order * page + 24, np.arange(40) * 1000, sizes)
    wanted = host[torch.from_numpy(order), 24:1024]
    runtime, major = cuda_copies.cuda_runtime(), cuda_copies.cuda_major()
    stream = copies.stream.cuda_stream
    for name, way in cuda_copies.range_copies(runtime, major).items():
        target = torch.zeros(40, 1000, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        way(target, host, ranges, stream)
        copies.record().wait()
        assert torch.equal(target.cpu(), wanted), name
    target = torch.zeros(64, 1000, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    copies.copy(target, host[:, 24:1024])
    copies.record().wait()
    assert torch.equal(target.cpu(), host[:, 24:1024])
    back = copies.opposite()
    back.copy(host[:, 2024:3024], target)
    back.record().wait()
    assert torch.equal(host[:, 2024:3024], host[:, 24:1024])
    copies.close()
