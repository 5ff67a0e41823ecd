"""Host memory for the GPU: registered in pieces that no copy crosses, all of it or nothing."""

from __future__ import annotations

import errno
import math
import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.device import pinning
from sglang_hc.device.pinning import PinnedMemory, piece_bytes, take_pages
from sglang_hc.errors import ConfigError
from support.cuda import HostRuntime

PAGE = mmap.PAGESIZE


def pages_of(buffer: mmap.mmap) -> tuple[int, int]:
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    return tensor.data_ptr(), tensor.numel()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "PIECE_BYTES", 4 * PAGE)
    monkeypatch.setattr(pinning, "TAKEN_BYTES", 3 * PAGE)


def test_pieces_are_whole_units_and_pages_of_about_two_gibibytes() -> None:
    for unit in (17 << 20, 96 * 1024, 4096 + 64, 3 * PAGE):
        size = piece_bytes(unit)
        assert size % unit == 0 and size % PAGE == 0
        assert size <= pinning.PIECE_BYTES < size + math.lcm(unit, PAGE)
    assert piece_bytes(3 << 30) == 3 << 30  # one unit at least


@pytest.mark.usefixtures("small_pieces")
def test_a_pool_is_taken_by_parts_and_registered_in_pieces() -> None:
    runtime = HostRuntime()
    taken: list[tuple[int, int]] = []
    pinned = PinnedMemory(runtime, lambda address, size: taken.append((address, size)))
    buffer = mmap.mmap(-1, 10 * PAGE)
    pinned.pin(buffer, 2 * PAGE)
    address, _ = pages_of(buffer)
    assert runtime.order == [4 * PAGE, 4 * PAGE, 2 * PAGE]
    assert sorted(runtime.registered) == [address, address + 4 * PAGE, address + 8 * PAGE]
    assert sum(size for _, size in taken) == 10 * PAGE
    assert max(size for _, size in taken) == 3 * PAGE
    pinned.release()
    assert not runtime.registered


@pytest.mark.usefixtures("small_pieces")
def test_without_a_unit_the_buffer_is_one_registration() -> None:
    runtime = HostRuntime()
    pinned = PinnedMemory(runtime, lambda address, size: None)
    pinned.pin(mmap.mmap(-1, 10 * PAGE))
    assert runtime.order == [10 * PAGE]


@pytest.mark.usefixtures("small_pieces")
def test_a_refused_piece_is_one_clear_error_and_gives_the_others_back() -> None:
    runtime = HostRuntime(refuse=frozenset({3}))
    pinned = PinnedMemory(runtime, lambda address, size: None)
    first = mmap.mmap(-1, PAGE)
    pinned.pin(first)
    with pytest.raises(ConfigError, match=r"CUDA error 2\): lower --hc-host-size-gb.*ulimit -l"):
        pinned.pin(mmap.mmap(-1, 12 * PAGE), PAGE)
    assert list(runtime.registered) == [pages_of(first)[0]]


def test_memory_that_the_system_does_not_have_is_the_same_error() -> None:
    def full(address: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    runtime = HostRuntime()
    with pytest.raises(ConfigError, match=r"Cannot allocate memory.*--hc-host-size-gb"):
        PinnedMemory(runtime, full).pin(mmap.mmap(-1, PAGE))
    assert not runtime.registered


@pytest.mark.usefixtures("small_pieces")
@settings(max_examples=100, deadline=None)
@given(
    unit=st.integers(1, 3), first=st.integers(0, 40), count=st.integers(1, 40),
    start=st.integers(0, 100), width=st.integers(1, 100),
)  # fmt: skip
def test_rows_are_cut_where_one_registration_ends(
    unit: int, first: int, count: int, start: int, width: int
) -> None:
    """Rows one unit apart, each within its unit: every slice lies in one piece, all rows once."""
    units = 40
    buffer = mmap.mmap(-1, units * unit * PAGE)
    pinned = PinnedMemory(HostRuntime(), lambda address, size: None)
    pinned.pin(buffer, unit * PAGE)
    step = piece_bytes(unit * PAGE) // (unit * PAGE)
    pool = torch.frombuffer(buffer, dtype=torch.uint8).view(units, unit * PAGE)
    rows = pool[first : first + count, start : start + width]
    if not len(rows):
        return
    slices = list(pinned.whole(rows))
    assert [i for part in slices for i in range(part.start, part.stop)] == list(range(len(rows)))
    for part in slices:
        assert (first + part.start) // step == (first + part.stop - 1) // step
    assert len(slices) == (first + len(rows) - 1) // step - first // step + 1


def test_rows_elsewhere_are_one_slice() -> None:
    pinned = PinnedMemory(HostRuntime(), lambda address, size: None)
    assert list(pinned.whole(torch.zeros(5, 3))) == [slice(0, 5)]


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
