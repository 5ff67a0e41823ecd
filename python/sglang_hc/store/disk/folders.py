"""Where the files of blocks lie in a directory, and what a look at their names tells.

    FOLDER/format                         version of all that lies here
    FOLDER/PART-SIZE/label                of the model, for people
    FOLDER/PART-SIZE/a/b/IDENTITY         one block; a and b: the first digits of its identity

PART names model, weights, plan and part of a block; SIZE is that of each of its files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from sglang_hc.store.disk.format import ID_BYTES, StoredModel

FOLDER = "sglang-hc"
FORMAT_NAME = "format"
LABEL_NAME = "label"
_DIGITS = "0123456789abcdef"
_BLOCK = re.compile(rf"[{_DIGITS}]{{{2 * ID_BYTES}}}")
_MODEL = re.compile(rf"[{_DIGITS}]{{{4 * ID_BYTES}}}-([0-9]{{1,18}})")


class ModelFolder(NamedTuple):
    """Where the blocks of one model, or of one part of them, lie. file_bytes: of each."""

    path: str
    file_bytes: int

    def block_path(self, block_id: bytes) -> str:
        """Of a block's file, whether it is there or not."""
        name = block_id.hex()
        return f"{self.path}/{name[0]}/{name[1]}/{name}"

    def leaves(self) -> Iterator[tuple[str, str]]:
        """The folders with files in them, and how the names of their blocks begin."""
        for first in _DIGITS:
            for second in _DIGITS:
                yield f"{self.path}/{first}/{second}", first + second

    def block_ids(self) -> Iterator[bytes]:
        """All that are here by their names. Reads no file."""
        for leaf, start in self.leaves():
            with suppress(FileNotFoundError, NotADirectoryError):
                yield from _identities(os.listdir(leaf), start)

    def bytes_used(self) -> int:
        """By the files of all that are here."""
        return self.file_bytes * sum(1 for _ in self.block_ids())

    def uses(self) -> Iterator[tuple[bytes, int]]:
        """All that are here, and when each was used last, in ns since 1970."""
        for leaf, start in self.leaves():
            with suppress(FileNotFoundError, NotADirectoryError), _opened(leaf) as place:
                for block_id in _identities(os.listdir(place), start):
                    with suppress(FileNotFoundError):
                        found = os.stat(block_id.hex(), dir_fd=place)
                        yield block_id, found.st_mtime_ns


def _identities(names: list[str], start: str) -> list[bytes]:
    """Those of the names that are a block's and begin so. All at once where all are, as a rule:
    there may be a million."""
    digits = "".join(names)
    if {(len(name), name[: len(start)]) for name in names} <= {(2 * ID_BYTES, start)}:
        with suppress(ValueError):
            raw = bytes.fromhex(digits)
            if raw.hex() == digits:
                return [raw[at : at + ID_BYTES] for at in range(0, len(raw), ID_BYTES)]
    blocks = (name for name in names if name.startswith(start) and _BLOCK.fullmatch(name))
    return [*map(bytes.fromhex, blocks)]


@contextmanager
def _opened(folder: str) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def store_root(path: str) -> str:
    """The folder of the store in a directory that a user names."""
    return os.path.join(path, FOLDER)


def folder_of(root: str, model: StoredModel) -> ModelFolder:
    """Where a model's blocks lie, whether any are there or not."""
    part = (model.fingerprint + model.part).hex()
    return ModelFolder(os.path.join(root, f"{part}-{model.file_bytes}"), model.file_bytes)


def model_folders(root: str) -> list[ModelFolder]:
    """Those of all models in a directory. Raises OSError."""
    found = ((name, _MODEL.fullmatch(name)) for name in sorted(os.listdir(root)))
    return [ModelFolder(os.path.join(root, name), int(match[1])) for name, match in found if match]


def fingerprint_of(folder: ModelFolder) -> tuple[bytes, bytes]:
    """(fingerprint, part) that the name of a folder says."""
    raw = bytes.fromhex(os.path.basename(folder.path).partition("-")[0])
    return raw[:ID_BYTES], raw[ID_BYTES:]
