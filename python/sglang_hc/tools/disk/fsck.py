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
from sglang_hc.store.disk.format import NO_MAC, Damaged, check_file
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
    """Result for one directory. blocks: that verify; keyed: those of them whose chunks only servers
    with their key can prove."""

    path: str
    blocks: int = 0
    keyed: int = 0
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
            problem = _check_block(folder, block_id, report)
            if problem is not None:
                done = repair and _remove(root, folder, block_id)
                report.findings.append(Finding(folder.block_path(block_id), str(problem), done))
    return report


def _check_block(
    folder: ModelFolder, block_id: bytes, report: DirectoryReport
) -> Damaged | OSError | None:
    """Why a block is not in order; None for one that is, and for one that was evicted meanwhile:
    the file that was read is written over then."""
    before = _inode(folder, block_id)
    try:
        is_keyed = _verify(folder, block_id)
    except FileNotFoundError:
        return None
    except (Damaged, OSError) as problem:
        return problem if _inode(folder, block_id) == before else None
    report.blocks += 1
    report.keyed += is_keyed
    report.bytes_verified += folder.file_bytes
    return None


def _inode(folder: ModelFolder, block_id: bytes) -> int | None:
    """Which file has the name of a block; None for none that can be asked."""
    try:
        return os.lstat(folder.block_path(block_id)).st_ino
    except OSError:
        return None


def _verify(folder: ModelFolder, block_id: bytes) -> bool:
    """Whether a block was written with a key. Raises Damaged, OSError."""
    path = folder.block_path(block_id)
    size = os.stat(path).st_size
    if size != folder.file_bytes:
        raise Damaged(f"{size} bytes where {folder.file_bytes} are a block")
    with closing(DirectBackend(direct=False).open(path)) as file:
        header = check_file(file.read, block_id, size)
    if (header.fingerprint, header.part) != fingerprint_of(folder):
        raise Damaged("the block is of another model than its folder")
    return header.mac != NO_MAC


def _remove(root: str, folder: ModelFolder, block_id: bytes) -> bool:
    with closing(Ledger(root)) as ledger, ledger.held(), suppress(FileNotFoundError):
        DirectBackend().unlink(folder.block_path(block_id))
        ledger.freed(folder.file_bytes)
    return True
