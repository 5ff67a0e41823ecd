"""What is in a directory, read beside a running server or from a read-only copy."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from sglang_hc.store.disk.directory import INDEX_NAME, LOCK_NAME, DirectoryError, used_bytes
from sglang_hc.store.disk.format import VERSION, Chunk
from sglang_hc.store.disk.index import Index
from sglang_hc.store.disk.index_file import IndexDamaged, IndexFull, UnknownVersion, translated
from sglang_hc.store.disk.opening import store_root, version_message

_chunks = msgspec.json.Decoder(list[Chunk]).decode
_PART = re.compile(r"dp\d+|[pt]p\d+-\d+")
"""Folders of the parts of one server."""


@dataclass(frozen=True)
class NamespaceSummary:
    """Blocks of one namespace of one model in one directory. Times in seconds since 1970."""

    namespace: str
    blocks: int
    slot_bytes: int
    oldest_write: float
    newest_write: float
    oldest_access: float
    newest_access: float
    hits: int


@dataclass(frozen=True)
class ModelSummary:
    """One fingerprint. layers: stored layers. slot_bytes: size of one block's slot."""

    label: str
    fingerprint: str
    layers: int
    slot_bytes: int
    opened: float
    namespaces: tuple[NamespaceSummary, ...]

    @property
    def blocks(self) -> int:
        return sum(namespace.blocks for namespace in self.namespaces)


@dataclass(frozen=True)
class DirectorySummary:
    """One directory. used_by: process that has it open now. Bytes are sizes of files."""

    path: str
    format_version: int
    used_by: str | None
    file_bytes: int
    slots: int
    slots_used: int
    models: tuple[ModelSummary, ...]


def stores_in(path: str) -> list[str]:
    """The directories with a store of their own in what was given to `--hc-disk`: it, and the
    folders of replicas and ranks in it (`srt/replicas.py`). The path itself where there is none."""
    return _stores_in(path) or [path]


def _stores_in(path: str) -> list[str]:
    found = [path] if os.path.isdir(store_root(path)) else []
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    for name in filter(_PART.fullmatch, names):
        found += _stores_in(os.path.join(path, name))
    return found


def find_root(path: str) -> str:
    """The store's folder in a directory a user names. Raises DirectoryError when there is none."""
    root = store_root(path)
    if not os.path.isdir(root):
        raise DirectoryError(
            f"{path}: no disk tier here (there is no folder {os.path.basename(root)} in it); give "
            "the directory that was given to --hc-disk"
        )
    return root


def user_of(root: str) -> str | None:
    """Process id of whoever has the directory open; None when nobody has."""
    try:
        descriptor = os.open(os.path.join(root, LOCK_NAME), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError:
        return os.read(descriptor, 32).decode("ascii", "replace").strip() or "?"
    finally:
        os.close(descriptor)


class ReportedIndex(Index):
    """An index with the questions that only people ask."""

    def descriptions(self) -> list[tuple[bytes, str, list[Chunk], int, int]]:
        """Per model: fingerprint, label, chunks, bytes of a slot, when it was opened last
        (microseconds since 1970)."""
        sql = "SELECT fingerprint, label, chunks, slot_bytes, opened FROM models"
        rows = self._read(tuple[bytes, str, str, int, int], sql)
        with translated():
            return [(*row[:2], _chunks(row[2]), *row[3:]) for row in rows]

    def summary(self) -> list[tuple[str, str, int, int, int, int, int, int, int]]:
        """Per model and namespace: fingerprint (hex), namespace, blocks, bytes in slots, oldest and
        newest write, oldest and newest access (microseconds since 1970), hits."""
        return self._read(
            tuple[str, str, int, int, int, int, int, int, int],
            "SELECT lower(hex(fingerprint)), coalesce(namespaces.label, '?'), count(*),"
            " sum(slabs.slot_bytes), min(created), max(created), min(accessed), max(accessed),"
            " sum(hits) FROM blocks JOIN models USING(model) JOIN slabs USING(slab)"
            " LEFT JOIN namespaces USING(namespace) GROUP BY model, namespace ORDER BY 3 DESC",
        )

    def problems(self) -> list[str]:
        """What SQLite's own full check finds; empty when the file is sound."""
        found = self._query("PRAGMA integrity_check(20)")
        wrong = self._number(
            "SELECT count(*) FROM blocks WHERE typeof(block_id) <> 'blob' OR"
            " typeof(model + namespace + slab + slot + created + accessed + hits) <> 'integer'"
            " OR 'text' IN (typeof(slab), typeof(slot), typeof(created), typeof(accessed),"
            " typeof(hits), typeof(model))"
        )
        types = [f"{wrong} rows hold values of a wrong type"] if wrong else []
        return [str(row[0]) for row in found if row[0] != "ok"] + types


@contextmanager
def open_for_reading(path: str, root: str) -> Iterator[ReportedIndex]:
    """The index, without changing it or waiting for a server. Raises DirectoryError when it is
    missing or of another version, and IndexDamaged."""
    source = os.path.join(root, INDEX_NAME)
    if not os.path.exists(source):
        raise IndexDamaged("there is no index")
    with tempfile.TemporaryDirectory() as folder:
        try:
            try:
                index = ReportedIndex(source, read_only=True)
            except (IndexDamaged, IndexFull):  # in a read-only place SQLite cannot share memory
                index = ReportedIndex(_copy(source, folder), read_only=True)
        except UnknownVersion as error:
            raise DirectoryError(version_message(path, str(error))) from error
        except IndexFull as error:
            raise IndexDamaged(str(error)) from error
        try:
            yield index
        finally:
            index.close()


def _copy(source: str, folder: str) -> str:
    target = os.path.join(folder, INDEX_NAME)
    shutil.copyfile(source, target)
    if os.path.exists(source + "-wal"):
        shutil.copyfile(source + "-wal", target + "-wal")
    return target


def summarize(path: str) -> DirectorySummary:
    """Raises DirectoryError when there is nothing to summarize."""
    root = find_root(path)
    try:
        with open_for_reading(path, root) as index:
            return _summarize(path, root, index)
    except (IndexDamaged, IndexFull) as error:
        raise DirectoryError(
            f"{path}: the index is damaged ({error}); run: sglang-hc fsck {path} --repair"
        ) from error


def _summarize(path: str, root: str, index: ReportedIndex) -> DirectorySummary:
    by_model: dict[str, list[NamespaceSummary]] = {}
    for fingerprint, label, blocks, size, first, last, old, new, hits in index.summary():
        times = (first / 1e6, last / 1e6, old / 1e6, new / 1e6)
        one = NamespaceSummary(label, blocks, size, *times, hits)
        by_model.setdefault(fingerprint, []).append(one)
    models = tuple(
        ModelSummary(
            label,
            fingerprint.hex(),
            len(chunks),
            slot_bytes,
            opened / 1e6,
            tuple(by_model.get(fingerprint.hex(), ())),
        )
        for fingerprint, label, chunks, slot_bytes, opened in index.descriptions()
    )
    slots = sum(slab.slots for slab in index.slabs())
    used = sum(model.blocks for model in models)
    return DirectorySummary(path, VERSION, user_of(root), used_bytes(root), slots, used, models)
