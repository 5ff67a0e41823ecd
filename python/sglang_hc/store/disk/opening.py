"""From a directory on a disk to one that can be served from, or a sentence that says why not."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress

from sglang_hc.store.disk.backend import DIRECTORY_MODE, FULL, DirectBackend, probe_direct
from sglang_hc.store.disk.directory import (
    GIGABYTE,
    Directory,
    DirectoryError,
    DirectoryLost,
    DirectorySpec,
    write_small,
)
from sglang_hc.store.disk.eviction import Evictor
from sglang_hc.store.disk.folders import FORMAT_NAME, model_folders, store_root
from sglang_hc.store.disk.format import VERSION, StoredModel
from sglang_hc.store.disk.sharing import Ledger, Membership
from sglang_hc.store.ownership import distrusted

_DEFAULT_SHARE = 0.8
_LEAST_BLOCKS = 4
_DEVICE_ERRORS = (errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO)
"""What a dying disk says; ext4 turns to read-only when it meets errors."""


def open_directory(
    spec: DirectorySpec,
    model: StoredModel,
    uses: dict[bytes, float],
    backend: DirectBackend | None,
    clock: Callable[[], float],
) -> Evictor:
    """Check one directory, made where missing, find this model's blocks in it, and count what all
    take. uses: see `Victims`. backend: None for the real disk. Raises DirectoryError, and
    DirectoryLost when the device fails."""
    try:
        with ExitStack() as held:
            root = make_root(spec.path)
            check_version(spec.path)
            write_small(os.path.join(root, FORMAT_NAME), f"{VERSION}\n")
            ledger = Ledger(root)
            held.callback(ledger.close)
            membership = Membership(root, ledger)
            held.callback(membership.close)
            membership.look()
            if backend is None:
                backend = DirectBackend(probe_direct(membership.path_of(0, 0)))
            budget = _budget(spec, model, root, backend)
            sharing = ledger, membership
            directory = Directory(root, model, spec, budget, backend, sharing, clock)
            directory.write_label()
            evictor = Evictor(directory, uses)
            evictor.open()
            held.pop_all()
            return evictor
    except OSError as error:
        raise _unusable(spec.path, error) from error


def make_root(path: str) -> str:
    """The store's folder, made where missing. Raises OSError, and DirectoryError where others can
    write to it."""
    root = store_root(path)
    for folder in (path, root):
        with suppress(FileExistsError):
            os.mkdir(folder, DIRECTORY_MODE)
    reason = distrusted(root)
    if reason is not None:
        raise DirectoryError(
            f"--hc-disk {path}: {root} is not safe ({reason}): who can write there decides what "
            "this server answers; delete it, which is only a cache, or name another directory"
        )
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return root


def _unusable(path: str, error: OSError) -> DirectoryError:
    reason = error.strerror or str(error)
    kind = DirectoryLost if error.errno in _DEVICE_ERRORS else DirectoryError
    remedy = "name a directory that this user can write to"
    if error.errno in FULL:
        remedy = "free some space there"
    elif error.errno == errno.ETIMEDOUT:
        remedy = "end the server that holds it, or let it go on"
    return kind(
        f"--hc-disk {path}: cannot be used ({reason}); {remedy}, or leave the option out to run "
        "without the disk tier"
    )


def check_version(path: str) -> None:
    """Raises DirectoryError for a directory of another version, and OSError."""
    root = store_root(path)
    file = os.path.join(root, FORMAT_NAME)
    found = ""
    if os.path.exists(file):
        with open(file, encoding="utf-8", errors="replace") as text:
            found = text.read(20).strip("\0 \n")  # zeros: a power cut left no more of it
    elif os.path.exists(os.path.join(root, "index.sqlite")):
        found = "2"
    if found not in ("", str(VERSION)):
        older = found.isdecimal() and int(found) < VERSION
        remedy = f"delete {root}, which is only a cache," if older else "upgrade sglang-hc"
        raise DirectoryError(
            f"--hc-disk {path}: written in disk format {found}, this sglang-hc knows format "
            f"{VERSION}; {remedy} or name another directory (nothing was changed)"
        )


def _budget(spec: DirectorySpec, model: StoredModel, root: str, backend: DirectBackend) -> int:
    """Raises DirectoryError when it would hold next to nothing."""
    budget = spec.size_bytes
    if budget is None:
        used = sum(one.bytes_used() for one in model_folders(root))
        budget = int(_DEFAULT_SHARE * (backend.free_bytes(root) + used))
    least = _LEAST_BLOCKS * model.file_bytes * spec.users
    if budget < least:
        raise DirectoryError(
            f"--hc-disk {spec.path}: {budget / GIGABYTE:.3f} GB is too small for this model; give "
            f"at least {least / GIGABYTE + 0.001:.3f} GB"
        )
    return budget
