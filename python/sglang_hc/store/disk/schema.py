"""The index's schema, its rows as types, and its errors. Described in docs/disk-format.md."""

from __future__ import annotations

from typing import NamedTuple

from sglang_hc.store.disk.format import Chunk

SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE models(model INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL UNIQUE,
    label TEXT NOT NULL, chunks TEXT NOT NULL, slot_bytes INTEGER NOT NULL,
    opened INTEGER NOT NULL);
CREATE TABLE namespaces(namespace INTEGER PRIMARY KEY, label TEXT NOT NULL UNIQUE);
CREATE TABLE slabs(slab INTEGER PRIMARY KEY, slot_bytes INTEGER NOT NULL, slots INTEGER NOT NULL);
CREATE TABLE blocks(model INTEGER NOT NULL, block_id BLOB NOT NULL, namespace INTEGER NOT NULL,
    slab INTEGER NOT NULL, slot INTEGER NOT NULL, created INTEGER NOT NULL,
    accessed INTEGER NOT NULL, hits INTEGER NOT NULL, PRIMARY KEY(model, block_id)) WITHOUT ROWID;
CREATE UNIQUE INDEX blocks_by_slot ON blocks(slab, slot);
CREATE INDEX blocks_by_access ON blocks(accessed);
"""


class IndexDamaged(Exception):
    """SQLite says the index file is malformed, or it cannot be read or written."""


class IndexFull(Exception):
    """The index cannot take the change now: its budget or the disk is full, or a reader blocks."""


class UnknownVersion(Exception):
    """The directory was written in a format version this program does not know."""


class Place(NamedTuple):
    """A slot of a directory. Packed into one integer where there may be millions, see `pack`."""

    slab: int
    slot: int

    def pack(self) -> int:
        return self.slab << 32 | self.slot

    @classmethod
    def unpack(cls, packed: int) -> Place:
        return cls(packed >> 32, packed & 0xFFFFFFFF)


class Row(NamedTuple):
    """One block's row. Times in microseconds since 1970."""

    model: int
    block_id: bytes
    namespace: int
    slab: int
    slot: int
    created: int
    accessed: int
    hits: int


class Resident(NamedTuple):
    """A block that could be evicted. `accessed` in microseconds since 1970.

    model: the fingerprint's number in this one directory.
    """

    fingerprint: bytes
    block_id: bytes
    accessed: int
    hits: int
    model: int


class Model(NamedTuple):
    """One fingerprint that has, or had, blocks in this directory."""

    model: int
    fingerprint: bytes
    label: str
    chunks: tuple[Chunk, ...]
    slot_bytes: int
    opened: int
