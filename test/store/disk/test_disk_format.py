"""The bytes of version 3, as docs/disk-format.md lays them out. These tests may grow but not
change: what they spell out lies on disks."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_hc.store.disk.format import (
    LABEL_MAX,
    TOKENS_MAX,
    BlockHeader,
    Chunk,
    FormatError,
    StoredModel,
    chunk_digest,
    clip_label,
    header_bytes_for,
)

IDS = st.binary(min_size=16, max_size=16)
WORDS = st.integers(0, 2**32 - 1)


HEADER = BlockHeader(
    block_id=bytes(range(16)),
    parent_id=bytes(range(16, 32)),
    fingerprint=bytes(range(32, 48)),
    created=1_700_000_000_123_456,
    position=41,
    tokens=b"\x00\x00\x12\x34" * 64,
    label="tenant",
    table=((5, 4096, b"d" * 16), (8, 8192, b"e" * 16)),
    part=b"part of a block!",
)


def packed(one: BlockHeader) -> bytes:
    page = bytearray(one.header_bytes)
    one.pack_into(memoryview(page))
    return bytes(page)


def test_header_bytes_of_version_3() -> None:
    page = packed(HEADER)
    assert len(page) == 4096
    assert page[:8] == b"SGHCSLOT"
    assert struct.unpack_from("<HHHH", page, 8) == (3, 1, 0, 2)
    assert page[16:64] == bytes(range(48))
    assert struct.unpack_from("<QII", page, 64) == (1_700_000_000_123_456, 256, 6)
    assert page[80:336] == b"\x00\x00\x12\x34" * 64
    assert page[336:342] == b"tenant" and page[342:592] == bytes(250)
    assert struct.unpack_from("<I", page, 592) == (41,)
    assert page[596:612] == b"part of a block!" and page[612:640] == bytes(28)
    assert page[640:688] == struct.pack("<II16sII16s", 5, 4096, b"d" * 16, 8, 8192, b"e" * 16)
    assert page[688:4080] == bytes(3392)
    assert page[4080:] == xxhash.xxh3_128_digest(page[:4080])


def test_chunk_digest_of_version_3() -> None:
    name, plan, data = b"a" * 16, b"b" * 16, bytes(range(256)) * 16
    covered = name + plan + struct.pack("<II", 9, 4096) + data
    assert chunk_digest(name, plan, 9, memoryview(data)) == xxhash.xxh3_128_digest(covered)


@pytest.mark.parametrize(("chunks", "pages"), [(1, 1), (143, 1), (144, 2), (314, 2), (315, 3)])
def test_header_grows_by_pages(chunks: int, pages: int) -> None:
    assert header_bytes_for(chunks) == pages * 4096


@given(
    st.tuples(IDS, IDS, IDS, IDS),
    st.binary(max_size=TOKENS_MAX),
    st.text(max_size=400),
    st.lists(st.tuples(WORDS, WORDS, IDS), max_size=200).map(tuple),
    WORDS,
    st.integers(0, 2**64 - 1),
)
@example((bytes(16),) * 4, b"", "\ud800" * 300, (), 0, 0)
def test_headers_come_back(
    names: tuple[bytes, ...], tokens: bytes, label: str, table: tuple, position: int, created: int
) -> None:
    """With as much of a label as has room, whatever its text is."""
    one = BlockHeader(*names[:3], created, position, tokens, label, table, names[3])
    read = BlockHeader.unpack(memoryview(packed(one)))
    assert read == replace(one, label=clip_label(label))
    assert len(read.label.encode()) <= LABEL_MAX
    assert packed(read) == packed(one)


@pytest.mark.parametrize("version", [1, 2, 4])
def test_an_unknown_version_is_named(version: int) -> None:
    page = bytearray(packed(HEADER))
    page[8] = version
    with pytest.raises(FormatError) as caught:
        BlockHeader.unpack(memoryview(page))
    assert caught.value.version == version


@given(st.lists(st.integers(1, 9), min_size=1, max_size=200))
def test_chunks_follow_the_header_without_gaps(pages: list[int]) -> None:
    chunks, end = [], 0
    for layer, count in enumerate(pages):
        chunks.append(Chunk(layer, end, 4096 * count))
        end += 4096 * count
    model = StoredModel(tuple(chunks), bytes(16), "tiny")
    assert model.block_bytes == end
    assert model.file_bytes == header_bytes_for(len(chunks)) + end


@pytest.mark.parametrize("second", [4096 - 1, 4096 + 4096])
def test_chunks_with_gaps_or_overlaps_are_a_programming_error(second: int) -> None:
    with pytest.raises(ValueError, match="layer 5 does not follow"):
        StoredModel((Chunk(4, 0, 4096), Chunk(5, second, 4096)), bytes(16), "tiny")
