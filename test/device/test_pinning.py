"""Host memory for the GPU: its pages are taken in parts, and it is registered at once or not."""

from __future__ import annotations

import errno
import mmap

import pytest
import torch

from sglang_hc.device import pinning
from sglang_hc.device.pinning import PinnedMemory, take_pages
from sglang_hc.errors import ConfigError
from support.cuda import HostRuntime

PAGE = mmap.PAGESIZE


def pages_of(buffer: mmap.mmap) -> tuple[int, int]:
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    return tensor.data_ptr(), tensor.numel()


def test_pages_are_taken_by_parts_and_registered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "TAKEN_BYTES", 3 * PAGE)
    runtime = HostRuntime()
    taken: list[tuple[int, int]] = []
    pinned = PinnedMemory(runtime, lambda address, size: taken.append((address, size)))
    buffer = mmap.mmap(-1, 10 * PAGE)
    pinned.pin(buffer)
    address, size = pages_of(buffer)
    assert runtime.registered == {address: size}
    parts = [(address + at * PAGE, 3 * PAGE) for at in (0, 3, 6)]
    assert sorted(taken) == [*parts, (address + 9 * PAGE, PAGE)]
    pinned.release()
    assert not runtime.registered


def test_a_refused_registration_is_one_clear_error_and_leaves_the_others() -> None:
    runtime = HostRuntime(refuse=frozenset({1}))
    pinned = PinnedMemory(runtime, lambda address, size: None)
    first = mmap.mmap(-1, PAGE)
    pinned.pin(first)
    with pytest.raises(ConfigError, match=r"CUDA error 2\): lower --hc-host-size-gb.*ulimit -l"):
        pinned.pin(mmap.mmap(-1, 12 * PAGE))
    assert list(runtime.registered) == [pages_of(first)[0]]


def test_memory_that_the_system_does_not_have_is_the_same_error() -> None:
    def full(address: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    runtime = HostRuntime()
    with pytest.raises(ConfigError, match=r"Cannot allocate memory.*--hc-host-size-gb"):
        PinnedMemory(runtime, full).pin(mmap.mmap(-1, PAGE))
    assert not runtime.registered


def test_what_is_dropped_is_no_longer_registered() -> None:
    """Two GiB and then 16 were pinned and dropped; the system mapped the next 48 over both, and
    CUDA refused them as registered already."""
    runtime = HostRuntime()
    memory = mmap.mmap(-1, 8 * PAGE)
    pinned = PinnedMemory(runtime, lambda address, size: None)
    pinned.pin(memoryview(memory)[2 * PAGE : 4 * PAGE])
    again = PinnedMemory(runtime, lambda address, size: None)
    with pytest.raises(ConfigError, match="CUDA error 712"):
        again.pin(memory)
    del pinned
    again.pin(memory)
    assert runtime.registered == {pages_of(memory)[0]: 8 * PAGE}


def test_what_is_locked_is_said_before(caplog: pytest.LogCaptureFixture) -> None:
    def take(address: int, size: int) -> None:
        assert "locking 3.05e-05 GiB of host memory" in caplog.text

    with caplog.at_level("INFO"):
        PinnedMemory(HostRuntime(), take).pin(mmap.mmap(-1, 32768))


def test_taking_pages_keeps_what_they_hold() -> None:
    buffer = mmap.mmap(-1, 4 * PAGE)
    buffer[5] = 7
    take_pages(*pages_of(buffer))
    assert buffer[5] == 7 and buffer[PAGE] == 0


def test_a_system_that_cannot_take_pages_leaves_it_to_the_registration() -> None:
    address, size = pages_of(mmap.mmap(-1, 2 * PAGE))
    take_pages(address + 1, size - PAGE)  # not on a page: EINVAL, as from an old kernel


def test_pages_that_cannot_be_had_are_an_error() -> None:
    """Nothing is mapped so low in memory."""
    with pytest.raises(OSError, match=f"taking {PAGE} bytes of memory"):
        take_pages(PAGE, PAGE)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_torch_gives_its_locked_memory_back_where_it_may_have_some(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append(True), raising=False)
    pinning.give_back_pinned()
    assert calls == [True] * has_gpu
