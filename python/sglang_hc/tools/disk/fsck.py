"""fsck: is every block of the given directories in order, and remove what is not.

Reads everything, beside running servers or not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

from sglang_hc.store.disk.backend import DirectBackend
from sglang_hc.store.disk.folders import ModelFolder, fingerprint_of, model_folders
from sglang_hc.store.disk.format import Damaged, check_file
from sglang_hc.store.disk.sharing import Ledger
from sglang_hc.tools.disk.summary import find_root


@dataclass(frozen=True)
class Finding:
    """One block that is not in order, why, and whether it was removed."""

    path: str
    detail: str
    repaired: bool


@dataclass
class DirectoryReport:
    """Result for one directory. blocks: that verify."""

    path: str
    blocks: int = 0
    bytes_verified: int = 0
    findings: list[Finding] = field(default_factory=list)


def check(paths: Sequence[str], repair: bool) -> list[DirectoryReport]:
    """Check directories, one after the other. Raises DirectoryError for what is no store, or of
    another version, and OSError."""
    return [_check(path, repair) for path in paths]


def _check(path: str, repair: bool) -> DirectoryReport:
    root, report = find_root(path), DirectoryReport(path)
    for folder in model_folders(root):
        for block_id in folder.block_ids():
            problem = _problem(folder, block_id)
            found = folder.block_path(block_id)
            if problem is None:
                report.blocks += 1
                report.bytes_verified += folder.file_bytes
            elif os.path.lexists(found):  # else it was evicted meanwhile
                done = repair and _remove(root, folder, found)
                report.findings.append(Finding(found, str(problem), done))
    return report


def _problem(folder: ModelFolder, block_id: bytes) -> Exception | None:
    try:
        _verify(folder, block_id)
    except (Damaged, OSError) as problem:
        return problem
    return None


def _verify(folder: ModelFolder, block_id: bytes) -> None:
    """Raises Damaged, OSError."""
    path = folder.block_path(block_id)
    size = os.stat(path).st_size
    if size != folder.file_bytes:
        raise Damaged(f"{size} bytes where {folder.file_bytes} are a block")
    with closing(DirectBackend(direct=False).open(path)) as file:
        header = check_file(file.read, block_id, size)
    if (header.fingerprint, header.part) != fingerprint_of(folder):
        raise Damaged("the block is of another model than its folder")


def _remove(root: str, folder: ModelFolder, path: str) -> bool:
    ledger = Ledger(root)
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
            ledger.give_back(folder.file_bytes)
    finally:
        ledger.close()
    return True
