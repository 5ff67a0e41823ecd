"""Bytes of slab files and slots: docs/disk-format.md, repeated as constants and checked.

The checks at the end prove that a slot holds the block that was asked for; reads, the scrubber and
fsck use them.

Never change the magics, VERSION's place in the headers, or the meaning of a version once released.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import starmap
from typing import NamedTuple

import xxhash

from sglang_hc.forms import CHUNK_ALIGN
from sglang_hc.store.disk.backend import aligned_buffer
from sglang_hc.tree.identity import block_id as chain_id

VERSION = 2
SLAB_MAGIC = b"SGHCSLAB"  # never change
SLOT_MAGIC = b"SGHCSLOT"  # never change
DIGEST_BYTES = 16
ID_BYTES = 16
TOKENS_MAX = 256
LABEL_MAX = 256
SLAB_HEADER_BYTES = CHUNK_ALIGN

_SLAB = struct.Struct("<8sHHIQIIQ")
_SLOT = struct.Struct(f"<8sHHHH16s16s16sQII{TOKENS_MAX}s{LABEL_MAX}sI44x")
_START = struct.Struct("<8sHH")
_ENTRY = struct.Struct("<II16s")
_DIGEST_PREFIX = struct.Struct("<16s16sII")


class Damaged(Exception):
    """The bytes are not the block that was asked for. The message says what is wrong."""


class FormatError(Damaged):
    """The bytes are no header. `version` is set when only the version is unknown."""

    def __init__(self, message: str, version: int | None = None) -> None:
        super().__init__(message)
        self.version = version


class Chunk(NamedTuple):
    """One layer's piece of a block: its place in the block and its length, in bytes."""

    layer: int
    offset: int
    length: int


def chunk_digest(block_id: bytes, fingerprint: bytes, layer: int, data: memoryview) -> bytes:
    """16-byte digest over block identity, fingerprint, layer, length and data of one chunk."""
    state = xxhash.xxh3_128(_DIGEST_PREFIX.pack(block_id, fingerprint, layer, len(data)))
    state.update(data)
    return state.digest()


def pages(size: int) -> int:
    """`size` rounded up to whole pages."""
    return -(-size // CHUNK_ALIGN) * CHUNK_ALIGN


def slot_header_bytes(chunks: int) -> int:
    """Size of the header of a slot with that many chunks."""
    return pages(_SLOT.size + _ENTRY.size * chunks + DIGEST_BYTES)


@dataclass(frozen=True)
class StoredModel:
    """Whose blocks a store holds, and where their chunks lie in a slot: behind the header, as in
    the block. label: for people.

    Raises ValueError for a fingerprint of another length than ID_BYTES, and for chunks that leave
    gaps or overlap: a slot takes a block's bytes as they are.
    """

    chunks: tuple[Chunk, ...]
    fingerprint: bytes
    label: str

    @classmethod
    def of(
        cls, chunks: Sequence[tuple[int, int, int]], fingerprint: bytes, label: str
    ) -> StoredModel:
        """chunks: (layer, offset, length) of `BlockLayout.chunks()`."""
        return cls(tuple(starmap(Chunk, chunks)), fingerprint, label)

    def __post_init__(self) -> None:
        if len(self.fingerprint) != ID_BYTES:
            raise ValueError(f"fingerprint of {len(self.fingerprint)} bytes; {ID_BYTES} are needed")
        end = 0
        for chunk in self.chunks:
            if chunk.offset != end:
                raise ValueError(f"the chunk of layer {chunk.layer} does not follow the one before")
            end += chunk.length

    @cached_property
    def block_bytes(self) -> int:
        """Size of a block without its header."""
        return sum(chunk.length for chunk in self.chunks)

    @cached_property
    def header_bytes(self) -> int:
        """Size of a slot's header; the chunk of a layer starts so much behind its offset."""
        return slot_header_bytes(len(self.chunks))

    @cached_property
    def slot_bytes(self) -> int:
        """Size of a slot, header included."""
        return self.header_bytes + self.block_bytes


@dataclass(frozen=True)
class SlabHeader:
    """First page of a slab file. created: microseconds since 1970, for people; the index does not
    keep it, and it does not count when two headers are compared."""

    slab: int
    slot_bytes: int
    slots: int
    created: int = field(default=0, compare=False)

    def pack(self) -> bytes:
        """The page as it lies on disk."""
        fields = (SLAB_MAGIC, VERSION, 0, self.slab, self.slot_bytes, self.slots, 0, self.created)
        body = _SLAB.pack(*fields).ljust(SLAB_HEADER_BYTES - DIGEST_BYTES, b"\0")
        return body + xxhash.xxh3_128_digest(body)

    @classmethod
    def unpack(cls, page: bytes | memoryview) -> SlabHeader:
        """Raises FormatError for anything but an intact header of this version."""
        magic, version, _, slab, slot_bytes, slots, _, created = _SLAB.unpack_from(page)
        _check_head(magic, SLAB_MAGIC, version, "slab")
        _check_digest(page, "slab")
        return cls(slab, slot_bytes, slots, created)

    @property
    def file_bytes(self) -> int:
        return SLAB_HEADER_BYTES + self.slots * self.slot_bytes

    def offset(self, slot: int) -> int:
        """Where a slot starts in the file."""
        return SLAB_HEADER_BYTES + slot * self.slot_bytes


@dataclass(frozen=True)
class SlotHeader:
    """What a slot says about itself.

    table: (layer, length in bytes, digest) of each chunk, in the order they follow the header.
    created: microseconds since 1970. position: blocks before this one in its prefix.
    label: namespace for people, at most LABEL_MAX bytes of UTF-8.
    """

    block_id: bytes
    parent_id: bytes
    fingerprint: bytes
    created: int
    position: int
    tokens: bytes
    label: str
    table: tuple[tuple[int, int, bytes], ...]

    @property
    def header_bytes(self) -> int:
        return slot_header_bytes(len(self.table))

    def pack_into(self, page: memoryview) -> None:
        """Write the header into `page`, which is exactly `header_bytes` long."""
        label = clip_label(self.label).encode()
        if len(self.tokens) > TOKENS_MAX:
            raise ValueError(f"{len(self.tokens)} bytes of tokens; a block has {TOKENS_MAX}")
        page[:] = bytes(len(page))
        table = b"".join(_ENTRY.pack(*entry) for entry in self.table)
        page[_SLOT.size : _SLOT.size + len(table)] = table
        _SLOT.pack_into(
            page,
            0,
            *(SLOT_MAGIC, VERSION, len(page) // CHUNK_ALIGN, 0, len(self.table)),
            *(self.block_id, self.parent_id, self.fingerprint, self.created),
            *(len(self.tokens), len(label), self.tokens, label, self.position),
        )
        page[-DIGEST_BYTES:] = xxhash.xxh3_128_digest(page[:-DIGEST_BYTES])

    @classmethod
    def unpack(cls, page: memoryview) -> SlotHeader:
        """Header from at least `header_size(page)` bytes. Raises FormatError when not intact."""
        size = header_size(page)
        if len(page) < size:
            raise FormatError("slot header is cut off")
        page = page[:size]
        _check_digest(page, "slot")
        fields = _SLOT.unpack_from(page)
        count, block_id, parent_id, fingerprint, created = fields[4:9]
        token_bytes, label_bytes, tokens, label, position = fields[9:]
        if slot_header_bytes(count) != size or token_bytes > TOKENS_MAX or label_bytes > LABEL_MAX:
            raise FormatError("slot header contradicts itself")
        return cls(
            block_id,
            parent_id,
            fingerprint,
            created,
            position,
            tokens[:token_bytes],
            label[:label_bytes].decode("utf-8", "replace"),
            tuple(_ENTRY.iter_unpack(page[_SLOT.size : _SLOT.size + _ENTRY.size * count])),
        )

    def names_its_tokens(self) -> bool:
        """Whether the block identity is the chain hash of the parent and the tokens."""
        return chain_id(self.fingerprint, self.parent_id, self.tokens) == self.block_id


def header_size(page: memoryview) -> int:
    """Length of the slot header that starts with `page`. Raises FormatError when it is none."""
    if len(page) < _START.size:
        raise FormatError("slot header is cut off")
    magic, version, count = _START.unpack_from(page)
    _check_head(magic, SLOT_MAGIC, version, "slot")
    if not count:
        raise FormatError("slot header has no length")
    return int(count) * CHUNK_ALIGN


def clip_label(label: str, most: int = LABEL_MAX) -> str:
    """The longest start of `label` that fits `most` bytes of UTF-8; lone surrogates become ?."""
    raw = label.encode("utf-8", "replace")
    return raw[:most].decode("utf-8", "ignore")


def make_table(
    block_id: bytes, fingerprint: bytes, chunks: Sequence[Chunk], data: memoryview
) -> tuple[tuple[int, int, bytes], ...]:
    """Chunk table of a block whose bytes are `data`."""
    return tuple(
        (
            layer,
            length,
            chunk_digest(block_id, fingerprint, layer, data[offset : offset + length]),
        )
        for layer, offset, length in chunks
    )


def _check_digest(page: bytes | memoryview, what: str) -> None:
    if xxhash.xxh3_128_digest(page[:-DIGEST_BYTES]) != bytes(page[-DIGEST_BYTES:]):
        raise FormatError(f"{what} header does not match its digest")


def _check_head(magic: bytes, expected: bytes, version: int, what: str) -> None:
    if magic != expected:
        raise FormatError(f"not a {what} header")
    if version != VERSION:
        raise FormatError(f"{what} header of format version {version}", version)


# -- checks ---------------------------------------------------------------------------------------

ReadAt = Callable[[Sequence[memoryview], int], int]
"""Reads buffers from an offset within one slot; returns the bytes read."""


def check_header(
    page: memoryview, block_id: bytes, fingerprint: bytes, chunks: Sequence[Chunk]
) -> SlotHeader:
    """The header in `page` if it belongs to this block and lists exactly these chunks.

    Raises Damaged.
    """
    header = SlotHeader.unpack(page)
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
    size = header_size(page)
    if size > CHUNK_ALIGN:
        page = aligned_buffer(size)
        read([page], 0)
    return SlotHeader.unpack(page)


def check_slot(read: ReadAt, slot_bytes: int, owner: tuple[bytes, bytes | None]) -> None:
    """Raises Damaged unless everything in a slot of any model is in order and it holds the block
    that its row says, and OSError. owner: the block's identity and fingerprint."""
    header = read_header(read)
    if not header.names_its_tokens():
        raise Damaged("the identity is not the hash of the tokens")
    offset = header.header_bytes
    for index, (layer, length, _) in enumerate(header.table):
        if length % CHUNK_ALIGN or offset + length > slot_bytes:
            raise Damaged(f"layer {layer} does not fit the slot")
        data = aligned_buffer(length)
        if read([data], offset) < length:
            raise Damaged(f"the file ends in layer {layer}")
        check_chunk(header, index, data)
        offset += length
    if (header.block_id, header.fingerprint) != owner:
        raise Damaged("the slot holds another block than its row says")
