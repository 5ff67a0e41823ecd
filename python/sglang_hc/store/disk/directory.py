"""One open `--hc-disk` directory: its index, its slabs and this model's blocks in it."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from sglang_hc.store.circuit_breaker import CircuitBreaker
from sglang_hc.store.disk.backend import FILE_MODE
from sglang_hc.store.disk.format import ID_BYTES, Chunk, SlotFormat
from sglang_hc.store.disk.index import Index
from sglang_hc.store.disk.index_file import IndexDamaged, Place
from sglang_hc.store.disk.slabs import SlabSet

logger = logging.getLogger(__name__)

FOLDER = "sglang-hc"
INDEX_NAME = "index.sqlite"
DAMAGED_NAME = "index.damaged"
LOCK_NAME = "lock"
GIGABYTE = 10**9
_NAMESPACES_KEPT = 4096
_TOUCHES_KEPT = 1 << 16


class DirectoryError(Exception):
    """A directory that cannot be used. The message names it and the remedy, for users."""


class DirectoryLost(DirectoryError):
    """The device of a directory fails. That is not the user's mistake; other directories may
    work."""


class DirectoryFailed(Exception):
    """The directory failed while in use. It is not used again before a restart."""


@dataclass(frozen=True)
class DirectorySpec:
    """One `--hc-disk DIR[:SIZE_GB]`. size_bytes None: a share of what is free at start.

    users: stores that divide this disk among them, each in a directory of its own.
    """

    path: str
    size_bytes: int | None = None
    users: int = 1

    @classmethod
    def parse(cls, text: str) -> DirectorySpec:
        """Raises DirectoryError. Only a last part that is a number is a size: `/a:b` is a path."""
        match = re.fullmatch(r"(?s)(.+):([0-9]+(?:\.[0-9]+)?)", text)
        if match is None:
            if not text or re.search(r":-?[0-9.]*$", text):
                raise DirectoryError(
                    f"--hc-disk {text!r}: give DIR or DIR:SIZE_GB, for example /mnt/ssd:200"
                )
            return cls(text)
        size = int(float(match[2]) * GIGABYTE)
        if size <= 0:
            raise DirectoryError(f"--hc-disk {text!r}: the size must be more than 0 GB")
        return cls(match[1], size)

    def for_user(self, name: str, users: int) -> DirectorySpec:
        """The part of this disk that one of `users` stores has: a folder, and its share of room."""
        size = None if self.size_bytes is None else self.size_bytes // users
        return DirectorySpec(os.path.join(self.path, name), size, users * self.users)


@dataclass(frozen=True)
class StoredModel:
    """Whose blocks a store holds. fingerprint: 16 bytes. label: for people."""

    slot_format: SlotFormat
    fingerprint: bytes
    label: str

    @classmethod
    def of(
        cls, chunks: Sequence[tuple[int, int, int]], fingerprint: bytes, label: str
    ) -> StoredModel:
        """chunks: (layer, offset, length) of `BlockLayout.chunks()`."""
        if len(fingerprint) != ID_BYTES:
            raise ValueError(f"fingerprint of {len(fingerprint)} bytes; {ID_BYTES} are needed")
        return cls(SlotFormat(tuple(Chunk(*chunk) for chunk in chunks)), fingerprint, label)


@dataclass(eq=False)
class Directory:
    """An open directory for one model. Made by `opening.open_directory`.

    lock: descriptor that holds the lock. model: the model's number in this index.
    breaker: gives the directory a pause when its I/O keeps failing. failure: why the directory is
    out of use until a restart. places: block identity -> packed schema.Place of this model's
    blocks. A dictionary that is only changed by the store; looking into it needs no lock.
    undeleted: removed blocks whose rows the index would not delete yet. touches: uses that the
    index was not told of yet: (microseconds since 1970, hits, identities in path order).
    making_room: held by the thread that evicts.
    """

    root: str
    lock: int
    index: Index
    slabs: SlabSet
    model: int
    breaker: CircuitBreaker
    places: dict[bytes, int] = field(default_factory=dict)
    undeleted: deque[tuple[bytes, Place]] = field(default_factory=deque)
    touches: deque[tuple[int, int, Sequence[bytes]]] = field(
        default_factory=lambda: deque(maxlen=_TOUCHES_KEPT)
    )
    making_room: threading.Lock = field(default_factory=threading.Lock)
    failure: str | None = None
    _namespaces: dict[str, int] = field(default_factory=dict)

    def usable(self) -> bool:
        """Whether this directory may be asked now. Cheap; takes no lock."""
        return self.failure is None and self.breaker.allows()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Index work. A damaged index takes the directory out of use and raises DirectoryFailed."""
        if self.failure:
            raise DirectoryFailed(self.failure)
        try:
            yield
        except IndexDamaged as error:
            self.fail(f"the index is damaged: {error}")
            raise DirectoryFailed(str(error)) from error

    def fail(self, reason: str) -> None:
        """Take the directory out of use; the index is rebuilt at the next start."""
        if self.failure is None:
            self.failure = reason
            logger.error(
                "%s: %s. Its blocks are not found until a restart; requests and other directories "
                "go on. The next start rebuilds the index, or run: sglang-hc fsck %s --repair",
                self.root,
                reason,
                os.path.dirname(self.root),
            )
            try:
                os.close(os.open(os.path.join(self.root, DAMAGED_NAME), os.O_CREAT, FILE_MODE))
            except OSError as error:
                logger.error("%s: cannot leave a mark: %s", self.root, error)

    def namespace(self, label: str) -> int:
        """Number of a namespace label in this index."""
        number = self._namespaces.get(label)
        if number is None:
            if len(self._namespaces) >= _NAMESPACES_KEPT:
                self._namespaces.clear()
            number = self._namespaces[label] = self.index.namespace(label)
        return number

    def acquire(self, block_id: bytes) -> Place | None:
        """Where a block of this model lies, with a lease on it; None when it is not here."""
        while True:
            packed = self.places.get(block_id)
            if packed is None:
                return None
            place = Place.unpack(packed)
            if not self.slabs.lease(place):
                return None
            if self.places.get(block_id) == packed:
                return place
            self.slabs.unlease([place])  # it moved meanwhile

    def free_slots(self, slot_bytes: int) -> int:
        """Slots of this size that can be taken without evicting anything."""
        used, there = self.slabs.usage(slot_bytes)
        return there - used + self.slabs.growable_slots(slot_bytes)

    def close(self) -> None:
        """Close everything and give the lock back."""
        self.slabs.close()
        self.index.close()
        os.close(self.lock)


def used_bytes(root: str) -> int:
    """Sizes of all files in a store's folder."""
    total = 0
    for entry in os.scandir(root):
        with suppress(FileNotFoundError):
            total += entry.stat(follow_symlinks=False).st_size
    return total
