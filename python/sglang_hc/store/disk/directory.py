"""One open `--hc-disk` directory: its index, its slabs and this model's blocks in it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from sglang_hc.store.disk.backend import FILE_MODE
from sglang_hc.store.disk.index import Index
from sglang_hc.store.disk.schema import IndexDamaged, Place
from sglang_hc.store.disk.slabs import SlabSet

logger = logging.getLogger(__name__)

FOLDER = "sglang-hc"
INDEX_NAME = "index.sqlite"
DAMAGED_NAME = "index.damaged"
LOCK_NAME = "lock"
GIGABYTE = 10**9
_NAMESPACES_KEPT = 4096


class DirectoryError(Exception):
    """A directory that cannot be used. The message names it and the remedy, for users."""


class DirectoryFailed(Exception):
    """The directory stopped working while in use; nothing more comes from it until a restart."""


@dataclass(frozen=True)
class DirectorySpec:
    """One `--hc-disk DIR[:SIZE_GB]`. size_bytes None: a share of what is free at start."""

    path: str
    size_bytes: int | None = None

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


@dataclass
class Directory:
    """An open directory for one model. Made by `opening.open_directory`.

    lock: descriptor that holds the lock. model: the model's number in this index.
    catalog: block identity -> packed records.Place of this model's shares in use. A dictionary that
    is only changed by the store; looking into it needs no lock.
    others: (identity, packed place, stripes) of this model's blocks that were dealt over another
    number of directories. failure: why the directory is out of use.
    """

    root: str
    budget: int
    lock: int
    index: Index
    slabs: SlabSet
    model: int
    catalog: dict[bytes, int] = field(default_factory=dict)
    others: list[tuple[bytes, int, int]] = field(default_factory=list)
    direct: bool = False
    failure: str | None = None
    _namespaces: dict[str, int] = field(default_factory=dict)

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
            self.catalog = {}
            logger.error(
                "%s: %s. The disk tier is off; requests go on without it. The next start rebuilds "
                "the index, or run: sglang-hc fsck %s --repair",
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
        """Where this model's share lies, with a lease on it; None when it is not here."""
        while True:
            packed = self.catalog.get(block_id)
            if packed is None:
                return None
            place = Place.unpack(packed)
            if not self.slabs.lease(place[:2]):
                return None
            if self.catalog.get(block_id) == packed:
                return place
            self.slabs.unlease([place[:2]])  # it moved meanwhile

    def file_bytes(self) -> int:
        """Sizes of all files of this directory."""
        return used_bytes(self.root)

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
