"""The SQLite file of one directory's index: schema, rows as types, versions, transactions, bounded
size.

Thread-safe: one connection behind one lock. SQLite's errors come out as IndexDamaged (the file is
malformed) and IndexFull (the change would not fit the file's share of the budget).
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from sglang_hc.store.disk.format import VERSION

SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE models(model INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL UNIQUE,
    label TEXT NOT NULL, chunks TEXT NOT NULL, slot_bytes INTEGER NOT NULL,
    opened INTEGER NOT NULL);
CREATE TABLE namespaces(namespace INTEGER PRIMARY KEY, label TEXT NOT NULL UNIQUE);
CREATE TABLE slabs(slab INTEGER PRIMARY KEY, slot_bytes INTEGER NOT NULL, slots INTEGER NOT NULL);
CREATE TABLE blocks(model INTEGER NOT NULL, block_id BLOB NOT NULL, namespace INTEGER NOT NULL,
    slab INTEGER NOT NULL, slot INTEGER NOT NULL, created INTEGER NOT NULL,
    accessed INTEGER NOT NULL, hits INTEGER NOT NULL, PRIMARY KEY(model, block_id)) WITHOUT ROWID;
CREATE UNIQUE INDEX blocks_by_slot ON blocks(slab, slot);
CREATE INDEX blocks_by_access ON blocks(accessed);
"""


T = TypeVar("T")


class IndexDamaged(Exception):
    """SQLite says the index file is malformed, or it cannot be read or written."""


class IndexFull(Exception):
    """The index cannot take the change now: its budget or the disk is full, or a reader blocks."""


class UnknownVersion(Exception):
    """The directory was written in a format version this program does not know."""


class Place(NamedTuple):
    """A slot of a directory. Packed into one integer where there may be millions, see `pack`."""

    slab: int
    slot: int

    def pack(self) -> int:
        return self.slab << 32 | self.slot

    @classmethod
    def unpack(cls, packed: int) -> Place:
        return cls(packed >> 32, packed & 0xFFFFFFFF)


class Row(NamedTuple):
    """A block and the slot that it owns. model: the fingerprint's number in this one directory.
    accessed: microseconds since 1970; 0 where nobody asks for it."""

    model: int
    block_id: bytes
    slab: int
    slot: int
    accessed: int = 0

    @property
    def place(self) -> Place:
        return Place(self.slab, self.slot)


class NewRow(NamedTuple):
    """What the index learns of a block that was written. namespace: label for people. Times in
    microseconds since 1970."""

    model: int
    block_id: bytes
    namespace: str
    slab: int
    slot: int
    created: int
    accessed: int


class Model(NamedTuple):
    """One fingerprint that has, or had, blocks in this directory."""

    model: int
    fingerprint: bytes
    slot_bytes: int


WAL_MAX_BYTES = 4 << 20
_WAL_TRUNCATE_AT = WAL_MAX_BYTES // 2
FIXED_FILES_BYTES = 128 << 10
"""Set aside for the lock file and SQLite's shared memory file."""
_PAGE = 4096
_BASE_BYTES = 256 << 10
_BYTES_PER_SLOT = 512
_PIECE_BYTES = 4 << 20
_REFUSALS = ("database or disk is full", "database is locked", "database table is locked")
"""How SQLite's messages begin; Python 3.10 knows no codes."""


def index_bytes(slots: int) -> int:
    """Largest size of the index file of a directory that has room for that many slots."""
    return _BASE_BYTES + _BYTES_PER_SLOT * slots


def create(path: str) -> None:
    """Make an empty index file. Raises OSError, or IndexDamaged when SQLite cannot write there."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    with translated(), closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(
            f"PRAGMA page_size={_PAGE}; PRAGMA auto_vacuum=INCREMENTAL; PRAGMA journal_mode=WAL;"
            f"PRAGMA synchronous=FULL; BEGIN; {SCHEMA} INSERT INTO meta"
            f" VALUES('format_version', '{VERSION}'); PRAGMA user_version={VERSION}; COMMIT;"
        )


class IndexFile:
    """An open index file: its version, transactions and size. What is in it: `index.Index`.

    read_only: no statement may change it, and no lock is needed beside a running server.
    """

    def __init__(self, path: str, read_only: bool = False) -> None:
        self.path = path
        self._lock = threading.RLock()
        _read_ahead(path)
        with translated():
            self._connection = sqlite3.connect(
                f"file:{quote(os.fsencode(path))}?mode={'ro' if read_only else 'rw'}",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=64,
            )
            try:
                self._prepare(read_only)
            except BaseException:
                self._connection.close()
                raise

    def _prepare(self, read_only: bool) -> None:
        execute = self._connection.execute
        execute("PRAGMA temp_store=MEMORY")
        execute("PRAGMA busy_timeout=200")
        execute("PRAGMA secure_delete=ON")  # labels are names of people's conversations
        (pragma,) = execute("PRAGMA user_version").fetchone()
        stored = execute("SELECT value FROM meta WHERE key='format_version'").fetchone()
        if stored is None or str(pragma) != str(stored[0]):
            raise IndexDamaged(f"{self.path}: the two places of the format version disagree")
        if pragma != VERSION:
            raise UnknownVersion(str(pragma))
        if not read_only:
            (mode,) = execute("PRAGMA journal_mode=WAL").fetchone()
            if mode != "wal":
                raise IndexDamaged(f"{self.path}: SQLite cannot use WAL here (mode {mode})")
            # The log is truncated by hand before it could pass its share of the budget.
            execute("PRAGMA wal_autocheckpoint=0")
            execute("PRAGMA synchronous=FULL")

    def close(self) -> None:
        """Truncate the log and close."""
        with self._lock:
            with suppress(sqlite3.Error):  # the log is replayed at the next start
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.close()

    # -- transactions -------------------------------------------------------------------------

    @contextmanager
    def _transaction(self, durable: bool) -> Iterator[sqlite3.Connection]:
        """One write transaction; `durable`: synced when this returns."""
        with self._lock, translated():
            self._make_log_room()
            self._connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _make_log_room(self) -> None:
        """Raises IndexFull while somebody reads an old state, so that the log cannot grow on."""
        try:
            size = os.stat(self.path + "-wal").st_size
        except FileNotFoundError:
            if os.path.exists(self.path):
                return
            raise IndexDamaged("its file was removed") from None  # an unseen log has no bound
        if size > _WAL_TRUNCATE_AT:
            self._truncate_log()

    def _truncate_log(self) -> None:
        busy = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise IndexFull("a reader holds the index log; it cannot be truncated now")

    def _write_out(self) -> None:
        """Move everything from the log to the file, and empty the log; durable, so that no power
        cut brings back what the log had. Raises IndexFull while somebody reads an old state."""
        with self._lock, translated():
            self._truncate_log()
            for path in (self.path, self.path + "-wal"):
                with suppress(FileNotFoundError), open(path, "rb+") as file:
                    os.fsync(file)

    def _query(self, sql: str, *values: object) -> list[tuple[object, ...]]:
        with self._lock, translated():
            return self._connection.execute(sql, values).fetchall()

    def _read(self, kind: type[T], sql: str, *values: object) -> list[T]:
        """The rows of a query as tuples of this kind. Raises IndexDamaged for other types."""
        rows = self._query(sql, *values)
        with translated():
            return msgspec.convert(rows, list[kind], builtin_types=(bytes,))  # type: ignore[valid-type]

    def _number(self, sql: str, *values: object) -> int:
        """The one integer that a query gives."""
        return self._read(tuple[int], sql, *values)[0][0]

    def limit(self, max_bytes: int) -> bool:
        """Bound the index file. Returns False when it is larger already, even after shrinking."""
        with self._lock, translated():
            while self.file_bytes() > max_bytes:
                before = self.file_bytes()
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._connection.execute("PRAGMA incremental_vacuum(256)").fetchall()
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                if self.file_bytes() >= before:
                    break
            self._connection.execute(f"PRAGMA max_page_count={max_bytes // _PAGE}")
            return self.file_bytes() <= max_bytes

    def file_bytes(self) -> int:
        """Size of the index file without its log, pages still in the log included."""
        with self._lock, translated():
            count = self._connection.execute("PRAGMA page_count").fetchone()[0]
            return max(int(count) * _PAGE, os.stat(self.path).st_size)


def _read_ahead(path: str) -> None:
    """Bring the whole file into the page cache in large pieces: SQLite would fetch it page by page
    in the order of the tree, and Linux cuts large POSIX_FADV_WILLNEED requests short."""
    with suppress(OSError), open(path, "rb", buffering=0) as file:  # SQLite says what is wrong
        scratch = bytearray(_PIECE_BYTES)
        while file.readinto(scratch):
            pass


@contextmanager
def translated() -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if str(error).startswith(_REFUSALS):
            raise IndexFull(str(error)) from error
        raise IndexDamaged(str(error)) from error
    except (ValueError, TypeError, OverflowError, msgspec.DecodeError) as error:
        # A row with values of other types.
        raise IndexDamaged(str(error)) from error
