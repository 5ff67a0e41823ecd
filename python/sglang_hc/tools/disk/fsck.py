"""fsck: is every slot, row and file of the given directories in order, and put what is not right.

Reads everything. Repair never touches a byte of a block: it removes rows, removes or extends slab
files, rewrites slab headers and rebuilds the index.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain, groupby

from sglang_hc.store.disk.backend import DirectBackend, File, aligned_buffer
from sglang_hc.store.disk.directory import DAMAGED_NAME, INDEX_NAME, DirectoryError
from sglang_hc.store.disk.format import (
    SLAB_HEADER_BYTES,
    Damaged,
    FormatError,
    SlabHeader,
    check_slot,
)
from sglang_hc.store.disk.index import Index
from sglang_hc.store.disk.index_file import IndexDamaged, IndexFull, Row, UnknownVersion
from sglang_hc.store.disk.opening import replace_index, take_lock, version_message
from sglang_hc.store.disk.slabs import read_slab_header, slab_numbers, slab_path
from sglang_hc.tools.disk.summary import (
    ReportedIndex,
    find_root,
    open_for_reading,
    stores_in,
    user_of,
)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, in words, and whether repair put it right.

    kind: index, slab, or block (damaged or not where its row says).
    """

    kind: str
    detail: str
    repaired: bool


@dataclass
class DirectoryReport:
    """Result for one directory. blocks: that verify. free_slots: slots nobody owns."""

    path: str
    blocks: int = 0
    bytes_verified: int = 0
    slots: int = 0
    free_slots: int = 0
    findings: list[Finding] = field(default_factory=list)


def check(paths: Sequence[str], repair: bool) -> list[DirectoryReport]:
    """Check directories, one after the other, and the folders of replicas and ranks in them.

    Raises DirectoryError when one is in use, of another version, or no store.
    """
    reports = []
    for path in chain.from_iterable(map(stores_in, paths)):
        with ExitStack() as held:
            reports.append(_Checker(path, repair, held).run())
    return reports


class _Checker:
    """Checks one directory. held: gets its index and its lock."""

    def __init__(self, path: str, repair: bool, held: ExitStack) -> None:
        self._path = path
        self._repair = repair
        self._root = find_root(path)
        self._backend: DirectBackend = DirectBackend(direct=False)
        self._held = held
        self._report = DirectoryReport(path)

    def run(self) -> DirectoryReport:
        """Check everything. Raises DirectoryError."""
        try:
            index = self._open_repairing() if self._repair else self._open_reading()
            self._check_files(index)
            self._check_rows(index)
        except UnknownVersion as error:
            raise DirectoryError(version_message(self._path, str(error))) from error
        except (IndexDamaged, IndexFull) as error:
            self._say("index", f"cannot be read: {error}", False)
        return self._report

    def _say(self, kind: str, detail: str, repaired: bool) -> None:
        self._report.findings.append(Finding(kind, detail, repaired))

    # -- index --------------------------------------------------------------------------------

    def _open_reading(self) -> Index:
        user = user_of(self._root)
        if user is not None:
            raise DirectoryError(
                f"{self._path}: in use by process {user}; stop it first, a check needs the "
                "directory at rest (sglang-hc inspect does not)"
            )
        if os.path.exists(os.path.join(self._root, DAMAGED_NAME)):
            self._say("index", "marked as damaged by a server", False)
        index = self._held.enter_context(open_for_reading(self._path, self._root))
        for problem in index.problems():
            self._say("index", problem, False)
        return index

    def _open_repairing(self) -> Index:
        self._held.callback(os.close, take_lock(self._root))
        index = self._sound_index()
        self._held.callback(index.close)
        return index

    def _sound_index(self) -> Index:
        """The index as it is, or a new one from the slots."""
        path = os.path.join(self._root, INDEX_NAME)
        problems = ["marked as damaged by a server"]
        if not os.path.exists(os.path.join(self._root, DAMAGED_NAME)):
            try:
                if not os.path.exists(path):
                    raise IndexDamaged("there is no index")
                there = ReportedIndex(path)
            except IndexDamaged as error:
                problems = [str(error)]
            else:
                problems = _problems(there)
                if not problems:
                    return there
                there.close()
        index = replace_index(self._root, self._backend, problems[0])
        for problem in problems:
            self._say("index", problem, True)
        return index

    # -- files --------------------------------------------------------------------------------

    def _check_files(self, index: Index) -> None:
        there = set(slab_numbers(self._root))
        known = {row.slab: row for row in index.slabs()}
        for number in sorted(there - known.keys()):
            if self._repair:
                self._backend.unlink(slab_path(self._root, number))
            self._say("slab", f"slab {number} is not in the index", self._repair)
        for number in sorted(known.keys() - there):
            if self._repair:
                index.drop_slab(number)
            self._say("slab", f"slab {number} has no file", self._repair)
        for number in sorted(there & known.keys()):
            self._check_slab(known[number])
            self._report.slots += known[number].slots
        self._report.free_slots = self._report.slots

    def _check_slab(self, slab: SlabHeader) -> None:
        path = slab_path(self._root, slab.slab)
        with closing(self._backend.open(path)) as file:
            if file.size() != slab.file_bytes:
                if self._repair and file.size() < slab.file_bytes:
                    file.allocate(slab.file_bytes)
                elif self._repair:
                    os.truncate(path, slab.file_bytes)
                self._say("slab", f"slab {slab.slab} has a wrong length", self._repair)
            problem = _header_problem(file, slab)
            if problem is not None:
                if self._repair:
                    page = aligned_buffer(SLAB_HEADER_BYTES)
                    page[:] = slab.pack()
                    file.write([page], 0)
                    file.sync()
                self._say("slab", f"slab {slab.slab}: {problem}", self._repair)

    # -- rows ---------------------------------------------------------------------------------

    def _check_rows(self, index: Index) -> None:
        fingerprints = {model.model: model.fingerprint for model in index.models()}
        there = set(slab_numbers(self._root))
        slabs = {slab.slab: slab for slab in index.slabs() if slab.slab in there}
        for number, rows in groupby(index.all_rows(), key=lambda row: row.slab):
            slab, file = slabs.get(number), None
            with ExitStack() as held:
                if slab is not None:
                    path = slab_path(self._root, number)
                    file = held.enter_context(closing(self._backend.open(path)))
                for row in rows:
                    self._check_row(index, row, fingerprints.get(row.model, b""), slab, file)

    def _check_row(
        self, index: Index, row: Row, fingerprint: bytes, slab: SlabHeader | None, file: File | None
    ) -> None:
        try:
            self._verify(row, fingerprint, slab, file)
        except (Damaged, OSError) as problem:
            done = self._repair and bool(index.delete([row]))
            self._say("block", f"slab {row.slab} slot {row.slot}: {problem}", done)
            self._report.free_slots -= not done

    def _verify(
        self, row: Row, fingerprint: bytes, slab: SlabHeader | None, file: File | None
    ) -> None:
        """Count a block that is in order. Raises Damaged, OSError."""
        if slab is None or file is None or not 0 <= row.slot < slab.slots:
            raise Damaged("there is no such slot")
        offset = slab.offset(row.slot)
        owner = row.block_id, fingerprint
        check_slot(lambda buffers, at: file.read(buffers, offset + at), slab.slot_bytes, owner)
        self._report.bytes_verified += slab.slot_bytes
        self._report.blocks += 1
        self._report.free_slots -= 1


def _problems(index: ReportedIndex) -> list[str]:
    try:
        return index.problems()
    except IndexDamaged as error:
        return [str(error)]


def _header_problem(file: File, expected: SlabHeader) -> str | None:
    """Raises UnknownVersion."""
    try:
        found = read_slab_header(file)
    except (FormatError, OSError) as error:
        return str(error)
    return None if found == expected else "its header and the index disagree"
