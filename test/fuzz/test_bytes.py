"""Bytes from disks and stores: a value that packs to the same bytes, or the one documented error.

Most examples carry the right digest, so that what lies behind it is read too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given, settings
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
@given(pages(), st.binary(max_size=2 * CHUNK_ALIGN), IDS, st.sampled_from([None, b"key of a test"]))
def test_any_bytes_are_damaged_unless_they_were_sealed(
    page: bytes, rest: bytes, name: bytes, key: bytes | None
) -> None:
    """No identity is guessed: neither that of a file, nor that of a block."""
    content = page + rest

    def read(buffers: Sequence[memoryview], offset: int) -> int:
        done = 0
        for buffer in buffers:
            piece = content[offset + done : offset + done + len(buffer)]
            buffer[: len(piece)] = piece
            done += len(piece)
        return done

    model = disk.StoredModel.of([(0, 0, CHUNK_ALIGN)], name, "x", key=key)
    header, data = memoryview(bytearray(page)), memoryview(rest.ljust(CHUNK_ALIGN, b"\0"))
    data = data[:CHUNK_ALIGN]
    with pytest.raises(disk.Damaged):
        disk.check_file(read, name, len(content))
    with pytest.raises(disk.Damaged):
        disk.check_block(header, data, name, model)
    disk.seal_block(header, data, disk.Block(name, bytes(16), "", 0, b""), model, 5)
    disk.check_block(header, data, name, model)
