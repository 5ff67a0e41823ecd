"""Bytes from disks and stores: a value that packs to the same bytes, or the one documented error.

Most examples carry the right digest, so that what lies behind it is read too.
"""

from __future__ import annotations

import struct

import numpy as np
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_hc.forms import CHUNK_ALIGN
from sglang_hc.store.disk import format as disk
from sglang_hc.store.remote import envelope

IDS = st.binary(min_size=16, max_size=16)
STARTS = st.sampled_from([b"", disk.SLAB_MAGIC, disk.SLOT_MAGIC, envelope.MAGIC])
VERSIONS = st.sampled_from([0, 1, disk.VERSION, 3, 0xFFFF])


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
@given(pages())
def test_a_slab_header_is_one_or_is_refused(page: bytes) -> None:
    try:
        header = disk.SlabHeader.unpack(page)
    except disk.FormatError:
        return
    assert disk.SlabHeader.unpack(header.pack()) == header


@settings(max_examples=400)
@given(pages(), st.integers(0, CHUNK_ALIGN))
def test_a_slot_header_is_one_or_is_refused(page: bytes, cut: int) -> None:
    read = memoryview(page)[: cut or CHUNK_ALIGN]
    try:
        header = disk.SlotHeader.unpack(read)
    except disk.FormatError:
        return
    written = memoryview(bytearray(header.header_bytes))
    header.pack_into(written)
    assert disk.SlotHeader.unpack(written) == header


@given(IDS, IDS, st.text(max_size=400), st.binary(max_size=256), st.integers(0, 2**31 - 1))
@example(bytes(16), bytes(16), "\ud800" * 300, b"", 0)
def test_what_a_slot_says_comes_back(
    one: bytes, other: bytes, label: str, tokens: bytes, position: int
) -> None:
    table = ((0, 64, other),)
    header = disk.SlotHeader(one, other, one, 5, position, tokens, label, table)
    page = memoryview(bytearray(header.header_bytes))
    header.pack_into(page)
    read = disk.SlotHeader.unpack(page)
    assert read.label == disk.clip_label(label) and len(read.label.encode()) <= disk.LABEL_MAX
    assert (read.tokens, read.position, read.table) == (tokens, position, table)


@settings(max_examples=400)
@given(pages(), st.binary(max_size=64), IDS, IDS)
def test_an_envelope_is_intact_or_has_another_verdict(
    page: bytes, payload: bytes, model: bytes, identity: bytes
) -> None:
    header = np.frombuffer(page, np.uint8)
    body = np.frombuffer(payload, np.uint8)
    assert envelope.inspect(header, body, model, identity) is not envelope.Verdict.INTACT
    frame = np.zeros(envelope.HEADER_BYTES + len(payload), np.uint8)
    frame[envelope.HEADER_BYTES :] = body
    envelope.seal(frame, model, identity, 5)
    first = frame[: envelope.HEADER_BYTES]
    assert envelope.inspect(first, body, model, identity) is envelope.Verdict.INTACT
