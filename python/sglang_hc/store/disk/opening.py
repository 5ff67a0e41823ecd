"""From a directory on a disk to one that can be served from, or a sentence that says why not.

Lock, version, recovery, budget, and the rows of one model, in that order.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from sglang_hc.store.disk import index_file
from sglang_hc.store.disk.backend import (
    DIRECTORY_MODE,
    FILE_MODE,
    FULL,
    DirectBackend,
    probe_direct,
)
from sglang_hc.store.disk.directory import (
    DAMAGED_NAME,
    FOLDER,
    GIGABYTE,
    INDEX_NAME,
    LOCK_NAME,
    Directory,
    DirectoryError,
    DirectoryLost,
    DirectorySpec,
    steady_time,
    used_bytes,
)
from sglang_hc.store.disk.format import SLAB_HEADER_BYTES, VERSION, StoredModel, clip_label
from sglang_hc.store.disk.index import Index
from sglang_hc.store.disk.index_file import (
    FIXED_FILES_BYTES,
    WAL_MAX_BYTES,
    IndexDamaged,
    IndexFull,
    UnknownVersion,
    index_bytes,
)
from sglang_hc.store.disk.rebuild import rebuild_index
from sglang_hc.store.disk.slabs import SlabSet, slab_numbers
from sglang_hc.store.ownership import distrusted

logger = logging.getLogger(__name__)

_DEFAULT_SHARE = 0.8
_LEAST_SLOTS = 4
_DEVICE_ERRORS = (errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO)
"""What a dying disk says; ext4 turns to read-only when it meets errors."""


@dataclass(frozen=True)
class Opening:
    """What a directory is opened for. backend: None for the real disk."""

    spec: DirectorySpec
    model: StoredModel
    backend: DirectBackend | None = None
    clock: Callable[[], float] = steady_time


def open_directory(opening: Opening) -> Directory:
    """Lock, check, recover and load one directory, made where missing. Raises DirectoryError, and
    DirectoryLost when the device fails."""
    with ExitStack() as held, _errors_for_users(opening.spec.path):
        root = make_root(opening.spec.path)
        lock = take_lock(root)
        held.callback(os.close, lock)
        backend = opening.backend or DirectBackend(probe_direct(root))
        try:
            directory = _load(opening, root, backend, _open_index(root), lock)
        except IndexDamaged as error:
            index = replace_index(root, backend, str(error))
            directory = _load(opening, root, backend, index, lock)
        held.pop_all()
        return directory


@contextmanager
def _errors_for_users(path: str) -> Iterator[None]:
    """What goes wrong with a directory, as DirectoryError."""
    try:
        yield
    except OSError as error:
        raise _unusable(path, error) from error
    except UnknownVersion as error:
        raise DirectoryError(version_message(path, str(error))) from error
    except (IndexFull, IndexDamaged) as error:
        raise DirectoryError(
            f"--hc-disk {path}: the index cannot be read or written ({error}); free some space on "
            "the disk, end the program that holds the index, or run: "
            f"sglang-hc fsck {path} --repair"
        ) from error


def _load(
    opening: Opening, root: str, backend: DirectBackend, index: Index, lock: int
) -> Directory:
    """The directory with everything in memory; the index is closed again on any error."""
    clock, model = opening.clock, opening.model
    with ExitStack() as held:
        held.callback(index.close)
        number = index.register_model(
            model.fingerprint,
            clip_label(model.label),
            model.chunks,
            model.slot_bytes,
            int(clock() * 1e6),
        )
        index.forget_unused(keep=number)
        index.end_future(int(clock() * 1e6))
        data_bytes, most_for_index = _divide_budget(opening, root, index)
        slabs = SlabSet(root, backend, index, data_bytes, clock)
        held.callback(slabs.close)
        slabs.open_all()
        _shrink(root, slabs, index)
        if not index.limit(most_for_index):
            raise DirectoryError(
                f"--hc-disk {opening.spec.path}: the index alone is {index.file_bytes()} bytes, "
                f"more than the size leaves for it ({most_for_index}); give a larger size or empty "
                "the directory"
            )
        directory = Directory(root, lock, index, slabs, model, number, clock)
        directory.load()
        held.pop_all()
        return directory


# -- folder and lock ------------------------------------------------------------------------------


def store_root(path: str) -> str:
    """The folder of the store in a directory that a user names."""
    return os.path.join(path, FOLDER)


def make_root(path: str) -> str:
    """The store's folder, made where missing. Raises OSError, and DirectoryError where others can
    write to it."""
    root = store_root(path)
    for folder in (path, root):
        if not os.path.isdir(folder):
            os.mkdir(folder, DIRECTORY_MODE)
    reason = distrusted(root)
    if reason is not None:
        raise DirectoryError(
            f"--hc-disk {path}: {root} is not safe ({reason}): who can write there decides what "
            "this server answers; delete it, which is only a cache, or name another directory"
        )
    os.chmod(root, DIRECTORY_MODE)
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return root


def _unusable(path: str, error: OSError) -> DirectoryError:
    reason = error.strerror or str(error)
    kind = DirectoryLost if error.errno in _DEVICE_ERRORS else DirectoryError
    remedy = "name a directory on a local disk that this user can write to"
    if error.errno in FULL:
        remedy = "free some space there"
    return kind(
        f"--hc-disk {path}: cannot be used ({reason}); {remedy}, or leave the option out to run "
        "without the disk tier"
    )


def take_lock(root: str) -> int:
    """Descriptor that holds the lock of a store. Raises DirectoryError when somebody has it, and
    OSError."""
    path = os.path.join(root, LOCK_NAME)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BlockingIOError as error:
        owner = os.read(descriptor, 32).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise DirectoryError(
            f"--hc-disk {os.path.dirname(root)}: in use by process {owner or '?'}; stop it, or "
            "give this server a directory of its own"
        ) from error
    except OSError:  # no locks here, or no room for the number
        os.close(descriptor)
        raise
    return descriptor


# -- index ----------------------------------------------------------------------------------------


def _open_index(root: str) -> Index:
    """Raises IndexDamaged where there should be a sound index."""
    path = os.path.join(root, INDEX_NAME)
    if os.path.exists(os.path.join(root, DAMAGED_NAME)):
        raise IndexDamaged("marked as damaged")
    if not os.path.exists(path):
        if slab_numbers(root):
            raise IndexDamaged("missing")
        index_file.create(path)
    return Index(path)


def version_message(path: str, found: str) -> str:
    """What to tell a user whose directory was written by another version."""
    older = found.isdecimal() and int(found) < VERSION
    remedy = f"delete {store_root(path)}, which is only a cache," if older else "upgrade sglang-hc"
    return (
        f"--hc-disk {path}: written in disk format {found}, this sglang-hc knows format {VERSION}; "
        f"{remedy} or name another directory (nothing was changed)"
    )


def replace_index(root: str, backend: DirectBackend, reason: str) -> Index:
    """A new index made from the slots, in place of one that cannot be used. Raises OSError,
    IndexDamaged, UnknownVersion, and IndexFull without a change where the disk is full: there
    SQLite speaks of I/O errors in an index that is sound."""
    disk = os.statvfs(root)
    if disk.f_bavail * disk.f_frsize < FIXED_FILES_BYTES:
        raise IndexFull(f"{reason}, and the disk is full")
    logger.warning("%s: index %s; rebuilding it from the slots", root, reason)
    path = os.path.join(root, INDEX_NAME)
    count = rebuild_index(root, path, backend)
    mark = os.path.join(root, DAMAGED_NAME)
    if os.path.exists(mark):
        os.unlink(mark)
    logger.warning("%s: found %d blocks again", root, count)
    return Index(path)


# -- budget ---------------------------------------------------------------------------------------


def _divide_budget(opening: Opening, root: str, index: Index) -> tuple[int, int]:
    """(bytes for slabs, bytes for the index). Raises DirectoryError when the slabs would hold next
    to nothing."""
    spec, slot_bytes = opening.spec, opening.model.slot_bytes
    budget = spec.size_bytes
    if budget is None:
        disk = os.statvfs(root)
        free = disk.f_bavail * disk.f_frsize / spec.users
        budget = int(_DEFAULT_SHARE * (free + used_bytes(root)))
    smallest = min([slot_bytes, *(m.slot_bytes for m in index.models() if m.slot_bytes > 0)])
    for_index = index_bytes(budget // smallest)
    rest = budget - FIXED_FILES_BYTES - WAL_MAX_BYTES - for_index
    least = _LEAST_SLOTS * (slot_bytes + SLAB_HEADER_BYTES)
    if rest < least:
        needed = (budget - rest + least) / GIGABYTE
        raise DirectoryError(
            f"--hc-disk {spec.path}: {budget / GIGABYTE:.3f} GB is too small for this model; give "
            f"at least {needed + 0.001:.3f} GB"
        )
    return rest, for_index


def _shrink(root: str, slabs: SlabSet, index: Index) -> None:
    """Drop the least recently used slabs until they fit a budget that became smaller."""
    if slabs.file_bytes() <= slabs.data_bytes:
        return
    newest = index.newest_access()
    for number in sorted(slabs.sizes(), key=lambda number: newest.get(number, 0)):
        if slabs.file_bytes() <= slabs.data_bytes:
            break
        logger.warning("%s: dropping slab %d to keep the budget", root, number)
        slabs.drop(number)
