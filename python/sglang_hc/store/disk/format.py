"""Bytes of a block file: docs/disk-format.md, repeated as constants and checked.

The checks at the end prove that a file holds the block that was asked for; reads and fsck use them.
Where servers share a key the digests of chunks are made with it, and so is a MAC of the header.

Never change the magic, VERSION's place in the header, or the meaning of a version once released.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import starmap
from typing import NamedTuple

import xxhash

from sglang_hc.forms import CHUNK_ALIGN
from sglang_hc.store.block import Block
from sglang_hc.store.disk.backend import aligned_buffer
from sglang_hc.tree.identity import block_id as chain_id

VERSION = 3
MAGIC = b"SGHCSLOT"  # never change
DIGEST_BYTES = 16
ID_BYTES = 16
TOKENS_MAX = 256
LABEL_MAX = 256
WHOLE = bytes(16)
"""`StoredModel.part` where a store has whole blocks."""

NO_MAC = bytes(DIGEST_BYTES)

_HEAD = struct.Struct(f"<8sHHHH16s16s16sQII{TOKENS_MAX}s{LABEL_MAX}sI16s16s12x")
_MAC = slice(612, 612 + DIGEST_BYTES)
_START = struct.Struct("<8sHH")
_ENTRY = struct.Struct("<II16s")
_DIGEST_PREFIX = struct.Struct("<16s16sII")


class Damaged(Exception):
    """The bytes are not the block that was asked for. The message says what is wrong, `reason` how
    it is counted."""

    reason = "damaged"


class FormatError(Damaged):
    """The bytes are no header. `version` is set when only the version is unknown."""

    def __init__(self, message: str, version: int | None = None) -> None:
        super().__init__(message)
        self.version = version
        self.reason = Damaged.reason if version is None else "unknown_version"


class Forged(Damaged):
    """The block is whole, but its writer did not have the key."""

    reason = "forged"


class Foreign(Damaged):
    """The block is whole, but another one, another model's, or of another plan."""

    reason = "foreign"


class Chunk(NamedTuple):
    """One layer's piece of a block: its place in the block and its length, in bytes."""

    layer: int
    offset: int
    length: int


def chunk_digest(
    block_id: bytes, fingerprint: bytes, layer: int, data: memoryview, key: bytes | None = None
) -> bytes:
    """16-byte digest over block identity, fingerprint, layer, length and data of one chunk."""
    prefix = _DIGEST_PREFIX.pack(block_id, fingerprint, layer, len(data))
    if key is None:
        state = xxhash.xxh3_128(prefix)
        state.update(data)
        return state.digest()
    keyed = hashlib.blake2b(prefix, digest_size=DIGEST_BYTES, key=key, person=b"hc chunk")
    keyed.update(data)
    return keyed.digest()


def part_of(fingerprint: bytes, part: str) -> bytes:
    """What names the part of each block that a rank has: neither another rank nor a server with
    other ranks reads it.

    part: which part of how many (`srt.ranks.replicas.Place.part`); empty for whole blocks.
    """
    if not part:
        return WHOLE
    name = fingerprint + part.encode()
    return hashlib.blake2b(name, digest_size=ID_BYTES, person=b"hc part").digest()


def mac_key(secret: bytes) -> bytes:
    """32 bytes of key that follow from a secret of any length."""
    return hashlib.blake2b(secret, digest_size=32, person=b"hc remote key").digest()


def _mac(page: memoryview, key: bytes | None) -> bytes:
    """Of a header up to its digest, without the MAC; NO_MAC without a key."""
    if key is None:
        return NO_MAC
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, person=b"hc header")
    state.update(page[: _MAC.start])
    state.update(page[_MAC.stop : -DIGEST_BYTES])
    return state.digest()


def pages(size: int) -> int:
    """`size` rounded up to whole pages."""
    return -(-size // CHUNK_ALIGN) * CHUNK_ALIGN


def header_bytes_for(chunks: int) -> int:
    """Size of the header of a block with that many chunks."""
    return pages(_HEAD.size + _ENTRY.size * chunks + DIGEST_BYTES)


@dataclass(frozen=True)
class StoredModel:
    """Whose blocks a store holds, and where their chunks lie in a file: behind the header, as in
    the block. label: for people. part: 16 bytes that name which part of each block a rank has
    (`part_of`), and among whom, where they share a key; WHOLE for all of it and no key. key: of
    digests and MACs (`mac_key`); None for none; not shown.

    Raises ValueError for a fingerprint of another length than ID_BYTES, and for chunks that leave
    gaps or overlap: a file takes a block's bytes as they are.
    """

    chunks: tuple[Chunk, ...]
    fingerprint: bytes
    label: str
    part: bytes = WHOLE
    key: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        chunks: Sequence[tuple[int, int, int]],
        fingerprint: bytes,
        label: str,
        part: bytes = WHOLE,
        key: bytes | None = None,
    ) -> StoredModel:
        """chunks: (layer, offset, length) of `BlockLayout.chunks()`. part: as `part_of` says it.
        Who has no key, or another one, looks for blocks elsewhere and finds none."""
        if key is not None:
            names = hashlib.blake2b(part, digest_size=ID_BYTES, key=key, person=b"hc names")
            part = names.digest()
        return cls(tuple(starmap(Chunk, chunks)), fingerprint, label, part, key)

    def __post_init__(self) -> None:
        for name in (self.fingerprint, self.part):
            if len(name) != ID_BYTES:
                raise ValueError(f"fingerprint of {len(name)} bytes; {ID_BYTES} are needed")
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
        """Size of a file's header; the chunk of a layer starts so much behind its offset."""
        return header_bytes_for(len(self.chunks))

    @cached_property
    def file_bytes(self) -> int:
        """Size of a block's file."""
        return self.header_bytes + self.block_bytes


@dataclass(frozen=True)
class BlockHeader:
    """What a file says about the block in it.

    table: (layer, length in bytes, digest) of each chunk, in the order they follow the header.
    created: microseconds since 1970. position: blocks before this one in its prefix.
    label: namespace for people, at most LABEL_MAX bytes of UTF-8. part: see `StoredModel`. mac:
    NO_MAC where the writer had no key; `pack_into` makes it.
    """

    block_id: bytes
    parent_id: bytes
    fingerprint: bytes
    created: int
    position: int
    tokens: bytes
    label: str
    table: tuple[tuple[int, int, bytes], ...]
    part: bytes = WHOLE
    mac: bytes = NO_MAC

    @classmethod
    def of(cls, block: Block, model: StoredModel, created: int, data: memoryview) -> BlockHeader:
        """The header of a block whose bytes are `data`."""
        return cls(
            block.block_id,
            block.parent_id,
            model.fingerprint,
            created,
            block.position,
            block.tokens,
            block.namespace,
            make_table(block.block_id, model, data),
            model.part,
        )

    @property
    def header_bytes(self) -> int:
        return header_bytes_for(len(self.table))

    def pack_into(self, page: memoryview, key: bytes | None = None) -> None:
        """Write the header into `page`, which is exactly `header_bytes` long."""
        label = clip_label(self.label).encode()
        if len(self.tokens) > TOKENS_MAX:
            raise ValueError(f"{len(self.tokens)} bytes of tokens; a block has {TOKENS_MAX}")
        page[:] = bytes(len(page))
        table = b"".join(_ENTRY.pack(*entry) for entry in self.table)
        page[_HEAD.size : _HEAD.size + len(table)] = table
        _HEAD.pack_into(
            page,
            0,
            *(MAGIC, VERSION, len(page) // CHUNK_ALIGN, 0, len(self.table)),
            *(self.block_id, self.parent_id, self.fingerprint, self.created),
            *(len(self.tokens), len(label), self.tokens, label, self.position, self.part),
            NO_MAC,
        )
        page[_MAC] = _mac(page, key)
        page[-DIGEST_BYTES:] = xxhash.xxh3_128_digest(page[:-DIGEST_BYTES])

    @classmethod
    def unpack(cls, page: memoryview) -> BlockHeader:
        """Header from at least `header_size(page)` bytes. Raises FormatError when not intact."""
        size = header_size(page)
        if len(page) < size:
            raise FormatError("the header is cut off")
        page = page[:size]
        if xxhash.xxh3_128_digest(page[:-DIGEST_BYTES]) != bytes(page[-DIGEST_BYTES:]):
            raise FormatError("the header does not match its digest")
        fields = _HEAD.unpack_from(page)
        count, block_id, parent_id, fingerprint, created = fields[4:9]
        token_bytes, label_bytes, tokens, label, position, part, mac = fields[9:]
        if header_bytes_for(count) != size or token_bytes > TOKENS_MAX or label_bytes > LABEL_MAX:
            raise FormatError("the header contradicts itself")
        return cls(
            block_id,
            parent_id,
            fingerprint,
            created,
            position,
            tokens[:token_bytes],
            label[:label_bytes].decode("utf-8", "replace"),
            tuple(_ENTRY.iter_unpack(page[_HEAD.size : _HEAD.size + _ENTRY.size * count])),
            part,
            mac,
        )

    def names_its_tokens(self) -> bool:
        """Whether the block identity is the chain hash of the parent and the tokens."""
        return chain_id(self.fingerprint, self.parent_id, self.tokens) == self.block_id


def header_size(page: memoryview) -> int:
    """Length of the header that starts with `page`. Raises FormatError when it is none."""
    if len(page) < _START.size:
        raise FormatError("the header is cut off")
    magic, version, count = _START.unpack_from(page)
    if magic != MAGIC:
        raise FormatError("not a block's header")
    if version != VERSION:
        raise FormatError(f"header of format version {version}", version)
    if not count:
        raise FormatError("the header has no length")
    return int(count) * CHUNK_ALIGN


def clip_label(label: str) -> str:
    """The longest start of `label` that fits LABEL_MAX bytes of UTF-8; lone surrogates become ?."""
    raw = label.encode("utf-8", "replace")
    return raw[:LABEL_MAX].decode("utf-8", "ignore")


def make_table(
    block_id: bytes, model: StoredModel, data: memoryview
) -> tuple[tuple[int, int, bytes], ...]:
    """Chunk table of a block whose bytes are `data`."""
    name, key = model.fingerprint, model.key
    return tuple(
        (layer, length, chunk_digest(block_id, name, layer, data[start : start + length], key))
        for layer, start, length in model.chunks
    )


# -- checks ---------------------------------------------------------------------------------------

ReadAt = Callable[[Sequence[memoryview], int], int]
"""Reads buffers from an offset of a file; returns the bytes read."""


def check_header(page: memoryview, block_id: bytes, model: StoredModel) -> BlockHeader:
    """The header in `page` if it belongs to this block of this model, and lists exactly its chunks.

    Raises Damaged.
    """
    header = BlockHeader.unpack(page)
    found = header.block_id, header.fingerprint, header.part
    if found != (block_id, model.fingerprint, model.part):
        raise Foreign("the file holds another block")
    listed = [(layer, length) for layer, length, _ in header.table]
    if listed != [(chunk.layer, chunk.length) for chunk in model.chunks]:
        raise Foreign("the file holds other layers")
    if not hmac.compare_digest(header.mac, _mac(page[: model.header_bytes], model.key)):
        raise Forged("the block was written without the key")
    return header


def check_chunk(
    header: BlockHeader, index: int, data: memoryview, key: bytes | None = None
) -> None:
    """Raises Damaged when `data` is not chunk `index` of the header's table."""
    layer, _, digest = header.table[index]
    found = chunk_digest(header.block_id, header.fingerprint, layer, data, key)
    if not hmac.compare_digest(found, digest):
        raise Damaged(f"layer {layer} does not match its digest")


def seal_block(
    page: memoryview, data: memoryview, block: Block, model: StoredModel, created: int
) -> None:
    """Write the header of a block whose bytes are `data` into `page`, of `model.header_bytes`."""
    BlockHeader.of(block, model, created, data).pack_into(page, model.key)


def check_block(page: memoryview, data: memoryview, block_id: bytes, model: StoredModel) -> None:
    """Raises Damaged unless `page` and `data` are the header and the bytes of this block."""
    header = check_header(page, block_id, model)
    for index, (_, start, length) in enumerate(model.chunks):
        check_chunk(header, index, data[start : start + length], model.key)


def read_header(read: ReadAt) -> BlockHeader:
    """Header of a block of any model. Raises Damaged, or OSError."""
    page = aligned_buffer(CHUNK_ALIGN)
    if read([page], 0) < CHUNK_ALIGN:
        raise Damaged("the file ends in the header")
    size = header_size(page)
    if size > CHUNK_ALIGN:
        page = aligned_buffer(size)
        read([page], 0)
    return BlockHeader.unpack(page)


def check_file(read: ReadAt, block_id: bytes, file_bytes: int) -> BlockHeader:
    """The header, if everything in the file of a block of any model is in order and it is the block
    that its name says. Whoever has no key can prove the header alone of a block that was written
    with one. file_bytes: that it has. Raises Damaged, and OSError."""
    header = read_header(read)
    if header.block_id != block_id:
        raise Damaged("the file holds another block than its name says")
    if not header.names_its_tokens():
        raise Damaged("the identity is not the hash of the tokens")
    offset = header.header_bytes
    for index, (layer, length, _) in enumerate(header.table):
        if length % CHUNK_ALIGN or offset + length > file_bytes:
            raise Damaged(f"the file ends in layer {layer}")
        data = aligned_buffer(length)
        if read([data], offset) < length:
            raise Damaged(f"the file ends in layer {layer}")
        if header.mac == NO_MAC:
            check_chunk(header, index, data)
        offset += length
    if offset != file_bytes:
        raise Damaged("the file is longer than its block")
    return header
