"""Checks that a slot holds, whole, the block that was asked for. Used by reads, scrub and fsck."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sglang_hc.forms import CHUNK_ALIGN
from sglang_hc.store.disk.backend import aligned_buffer
from sglang_hc.store.disk.format import (
    Chunk,
    FormatError,
    SlotHeader,
    chunk_digest,
    header_size,
)

ReadAt = Callable[[Sequence[memoryview], int], int]
"""Reads buffers from an offset within one slot; returns the bytes read."""


class Damaged(Exception):
    """The bytes are not the block that was asked for. The message says what is wrong."""


def check_header(
    page: memoryview, block_id: bytes, fingerprint: bytes, chunks: Sequence[Chunk]
) -> SlotHeader:
    """The header in `page` if it belongs to this block and lists exactly these chunks.

    Raises Damaged.
    """
    try:
        header = SlotHeader.unpack(page)
    except FormatError as error:
        raise Damaged(str(error)) from None
    if header.block_id != block_id or header.fingerprint != fingerprint:
        raise Damaged("the slot holds another block")
    listed = [(layer, length) for layer, length, _ in header.table]
    if listed != [(chunk.layer, chunk.length) for chunk in chunks]:
        raise Damaged("the slot holds other layers")
    return header


def check_chunk(header: SlotHeader, index: int, data: memoryview) -> None:
    """Raises Damaged when `data` is not chunk `index` of the header's table."""
    layer, _, digest = header.table[index]
    if chunk_digest(header.block_id, header.fingerprint, layer, data) != digest:
        raise Damaged(f"layer {layer} does not match its digest")


def read_header(read: ReadAt) -> SlotHeader:
    """Header of a slot of any model. Raises Damaged, or OSError."""
    page = aligned_buffer(CHUNK_ALIGN)
    if read([page], 0) < CHUNK_ALIGN:
        raise Damaged("the file ends before the slot")
    try:
        size = header_size(page)
        if size > CHUNK_ALIGN:
            page = aligned_buffer(size)
            read([page], 0)
        return SlotHeader.unpack(page)
    except FormatError as error:
        raise Damaged(str(error)) from None


def check_slot(read: ReadAt, slot_bytes: int) -> Iterator[tuple[SlotHeader, int]]:
    """Verify everything in a slot of any model, chunk by chunk.

    Yields (header, bytes read) after the header and after each chunk, so that the caller can stop
    or slow down. Raises Damaged, or OSError.
    """
    header = read_header(read)
    if not header.names_its_tokens():
        raise Damaged("the identity is not the hash of the tokens")
    yield header, header.header_bytes
    offset = header.header_bytes
    for index, (layer, length, _) in enumerate(header.table):
        if length % CHUNK_ALIGN or offset + length > slot_bytes:
            raise Damaged(f"layer {layer} does not fit the slot")
        data = aligned_buffer(length)
        if read([data], offset) < length:
            raise Damaged(f"the file ends in layer {layer}")
        check_chunk(header, index, data)
        offset += length
        yield header, length
