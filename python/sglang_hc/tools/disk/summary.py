"""What is in a directory, read beside running servers or from a read-only copy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

from sglang_hc.store.disk.backend import DirectBackend
from sglang_hc.store.disk.directory import DirectoryError
from sglang_hc.store.disk.folders import (
    LABEL_NAME,
    ModelFolder,
    fingerprint_of,
    model_folders,
    store_root,
)
from sglang_hc.store.disk.format import WHOLE, BlockHeader, Damaged, read_header
from sglang_hc.store.disk.opening import check_version
from sglang_hc.store.disk.sharing import living_servers


@dataclass(frozen=True)
class NamespaceSummary:
    """Blocks of one namespace of one model in one directory. Times in seconds since 1970."""

    namespace: str
    blocks: int
    oldest_write: float
    newest_write: float
    newest_use: float


@dataclass(frozen=True)
class ModelSummary:
    """One model, or one part of it. label: of whoever opened it last. part: empty for whole blocks.
    unreadable: files that say nothing of themselves."""

    label: str
    fingerprint: str
    part: str
    file_bytes: int
    blocks: int
    unreadable: int
    namespaces: tuple[NamespaceSummary, ...]


@dataclass(frozen=True)
class DirectorySummary:
    """One directory. used_by: process ids of servers that have it open now, as their hosts know
    them."""

    path: str
    used_by: tuple[str, ...]
    models: tuple[ModelSummary, ...]

    @property
    def file_bytes(self) -> int:
        """Of all blocks."""
        return sum(model.blocks * model.file_bytes for model in self.models)


def find_root(path: str) -> str:
    """The store's folder in a directory. Raises DirectoryError where there is none, or one of
    another version."""
    root = store_root(path)
    if not os.path.isdir(root):
        raise DirectoryError(f"{path}: no disk tier here; give a directory that --hc-disk names")
    check_version(path)
    return root


def summarize(path: str) -> DirectorySummary:
    """Reads the first page of every block. Raises DirectoryError, OSError."""
    root = find_root(path)
    models = tuple(_summary(folder) for folder in model_folders(root))
    return DirectorySummary(path, tuple(living_servers(root)), models)


def _summary(folder: ModelFolder) -> ModelSummary:
    label = ""
    with suppress(OSError), open(os.path.join(folder.path, LABEL_NAME), encoding="utf-8") as file:
        label = file.read().strip()
    fingerprint, part = fingerprint_of(folder)
    named: dict[str, list[tuple[float, float]]] = {}
    unreadable = 0
    for header, used in _headers(folder):
        if header is None:
            unreadable += 1
        else:
            named.setdefault(header.label, []).append((header.created / 1e6, used))
    namespaces = tuple(_namespace(name, times) for name, times in sorted(named.items()))
    return ModelSummary(
        label,
        fingerprint.hex(),
        "" if part == WHOLE else part.hex(),
        folder.file_bytes,
        unreadable + sum(one.blocks for one in namespaces),
        unreadable,
        namespaces,
    )


def _headers(folder: ModelFolder) -> Iterator[tuple[BlockHeader | None, float]]:
    """What each block says of itself, if it can be read, and its last use."""
    backend = DirectBackend(direct=False)
    for block_id, used in folder.uses():
        yield _header(backend, folder.block_path(block_id)), used / 1e9


def _header(backend: DirectBackend, path: str) -> BlockHeader | None:
    try:
        with closing(backend.open(path)) as file:
            return read_header(file.read)
    except (Damaged, OSError):
        return None


def _namespace(name: str, times: list[tuple[float, float]]) -> NamespaceSummary:
    written = [when for when, _ in times]
    return NamespaceSummary(
        name, len(times), min(written), max(written), max(used for _, used in times)
    )
