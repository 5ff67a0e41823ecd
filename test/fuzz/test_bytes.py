"""Bytes from disks and stores: a value that packs to the same bytes, or the one documented error.

Most examples carry the right digest, so that what lies behind it is read too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_hc.forms import CHUNK_ALIGN
from sglang_hc.store.disk import format as disk

IDS = st.binary(min_size=16, max_size=16)
STARTS = st.sampled_from([b"", disk.MAGIC, b"SGHCREMO"])
VERSIONS = st.sampled_from([0, 2, disk.VERSION, disk.VERSION, 4, 0xFFFF])


@st.composite
def pages(draw: st.DrawFn) -> bytes:
    """One page: random, or with a known start, a version, and its digest."""
    body = (
        draw(STARTS)
        + struct.pack("<H", draw(VERSIONS))
        + struct.pack("<H", draw(st.integers(0, 2)))
    )
    body += struct.pack("<HH", draw(st.integers(0, 9)), draw(st.sampled_from([0, 1, 4, 0xFFFF])))
    body = (body + draw(st.binary(max_size=900))).ljust(CHUNK_ALIGN - 16, b"\0")
    return body + (xxhash.xxh3_128_digest(body) if draw(st.booleans()) else draw(IDS))


@settings(max_examples=400)
@given(pages(), st.integers(0, CHUNK_ALIGN))
def test_a_blocks_header_is_one_or_is_refused(page: bytes, cut: int) -> None:
    read = memoryview(page)[: cut or CHUNK_ALIGN]
    try:
        header = disk.BlockHeader.unpack(read)
    except disk.Damaged:
        return
    written = memoryview(bytearray(header.header_bytes))
    header.pack_into(written)
    assert disk.BlockHeader.unpack(written) == replace(header, mac=disk.NO_MAC), "by no key"


@settings(max_examples=400)
@given(pages(), st.binary(max_size=2 * CHUNK_ALIGN), IDS)
def test_a_file_of_any_bytes_is_damaged_or_is_what_it_says(
    page: bytes, rest: bytes, name: bytes
) -> None:
    content = page + rest

    def read(buffers: Sequence[memoryview], offset: int) -> int:
        done = 0
        for buffer in buffers:
            piece = content[offset + done : offset + done + len(buffer)]
            buffer[: len(piece)] = piece
            done += len(piece)
        return done

    with pytest.raises(disk.Damaged):  # no identity is guessed
        disk.check_file(read, name, len(content))
    model = disk.StoredModel.of([(0, 0, CHUNK_ALIGN)], name, "x")
    with pytest.raises(disk.Damaged):
        disk.check_header(memoryview(page), name, model)


@given(
    st.tuples(IDS, IDS, IDS, IDS),
    st.text(max_size=400),
    st.binary(max_size=disk.TOKENS_MAX),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
)
@example((bytes(16),) * 4, "\ud800" * 300, b"", 0, 0)
def test_what_a_header_says_comes_back(
    names: tuple[bytes, ...], label: str, tokens: bytes, position: int, created: int
) -> None:
    one, other, model, part = names
    table = ((0, 64, other),)
    header = disk.BlockHeader(one, other, model, created, position, tokens, label, table, part)
    page = memoryview(bytearray(header.header_bytes))
    header.pack_into(page)
    read = disk.BlockHeader.unpack(page)
    assert read == replace(header, label=disk.clip_label(label))
    assert len(read.label.encode()) <= disk.LABEL_MAX
    again = memoryview(bytearray(header.header_bytes))
    read.pack_into(again)
    assert again == page


@settings(max_examples=400)
@given(pages(), st.binary(max_size=64), IDS, IDS, st.booleans())
def test_a_block_of_any_bytes_is_refused_unless_it_was_sealed(
    page: bytes, data: bytes, model: bytes, identity: bytes, has_key: bool
) -> None:
    key = disk.mac_key(b"x") if has_key else None
    stored, body = (
        disk.StoredModel.of([(0, 0, CHUNK_ALIGN)], model, "x", key=key),
        memoryview(data.ljust(CHUNK_ALIGN, b"\0")),
    )
    with pytest.raises(disk.Damaged):
        disk.check_block(memoryview(page), body, identity, stored)
    block, header = disk.Block(identity, bytes(16), "", 0, b""), memoryview(bytearray(CHUNK_ALIGN))
    disk.seal_block(header, body, block, stored, 5)
    disk.check_block(header, body, identity, stored)
