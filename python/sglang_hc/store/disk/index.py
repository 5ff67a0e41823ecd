"""The index of one directory: which share lies in which slot. SQLite in WAL mode.

Schema and order of writes are in docs/disk-format.md. Thread-safe: one connection behind one lock.
Every method but `close` raises IndexDamaged when SQLite finds the file malformed and IndexFull when
the change would not fit the file's share of the budget.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from sglang_hc.store.disk.format import VERSION, Chunk
from sglang_hc.store.disk.records import (
    SCHEMA,
    IndexDamaged,
    IndexFull,
    Model,
    Place,
    Resident,
    Row,
    SlabRow,
    UnknownVersion,
)

ROWS_PER_COMMIT = 32
"""Most block rows one transaction changes, so that what it adds to the WAL is bounded."""
WAL_MAX_BYTES = 4 << 20
_WAL_TRUNCATE_AT = WAL_MAX_BYTES // 2
FIXED_FILES_BYTES = 128 << 10
"""Set aside for the lock file and SQLite's shared memory file."""
_PAGE = 4096
_FOREVER = (1 << 63) - 1
_PACKED = "(slab<<32)|(slot<<8)|residue"
_BASE_BYTES = 256 << 10
_BYTES_PER_SLOT = 512
_MANY_NAMESPACES = 5000
_PIECE_BYTES = 4 << 20


def index_bytes(slots: int) -> int:
    """Largest size of the index file of a directory that has room for that many slots."""
    return _BASE_BYTES + _BYTES_PER_SLOT * slots


def create(path: str) -> None:
    """Make an empty index file. Raises OSError, or IndexDamaged when SQLite cannot write there."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    with _translated():
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            connection.execute(f"PRAGMA page_size={_PAGE}")
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(
                f"BEGIN; {SCHEMA} INSERT INTO meta VALUES('format_version', '{VERSION}');"
                f"PRAGMA user_version={VERSION}; COMMIT;"
            )
        finally:
            connection.close()


class Index:
    """An open index file.

    read_only: no statement may change it, and no lock is needed beside a running server.
    """

    def __init__(self, path: str, read_only: bool = False) -> None:
        self.path = path
        self._lock = threading.RLock()
        _read_ahead(path)
        with _translated():
            self._connection = sqlite3.connect(
                f"file:{_quoted(path)}?mode={'ro' if read_only else 'rw'}",
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
        self._connection.execute("PRAGMA temp_store=MEMORY")
        self._connection.execute("PRAGMA busy_timeout=200")
        self._check_version()
        if read_only:
            return
        mode = self._connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise IndexDamaged(f"{self.path}: SQLite cannot use WAL here (mode {mode})")
        # The log is truncated by hand before it could pass its share of the budget.
        self._connection.execute("PRAGMA wal_autocheckpoint=0")
        self._connection.execute("PRAGMA synchronous=FULL")

    def _check_version(self) -> None:
        pragma = self._connection.execute("PRAGMA user_version").fetchone()[0]
        stored = self._connection.execute(
            "SELECT value FROM meta WHERE key='format_version'"
        ).fetchone()
        if stored is None or str(pragma) != str(stored[0]):
            raise IndexDamaged(f"{self.path}: the two places of the format version disagree")
        if pragma != VERSION:
            raise UnknownVersion(str(pragma))

    def close(self) -> None:
        """Truncate the log and close."""
        with self._lock:
            try:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.Error:
                pass  # the log is replayed at the next start
            self._connection.close()

    # -- transactions -------------------------------------------------------------------------

    @contextmanager
    def _transaction(self, durable: bool) -> Iterator[sqlite3.Connection]:
        """One write transaction; `durable`: synced when this returns."""
        with self._lock, _translated():
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
            return
        if size > _WAL_TRUNCATE_AT:
            busy = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            if busy:
                raise IndexFull("a reader holds the index log; it cannot be truncated now")

    def _query(self, sql: str, *values: object) -> list[tuple[object, ...]]:
        with self._lock, _translated():
            return self._connection.execute(sql, values).fetchall()

    def _number(self, sql: str, *values: object) -> int:
        """The one integer that a query gives."""
        with _translated():
            return int(self._query(sql, *values)[0][0])  # type: ignore[call-overload, no-any-return]

    def limit(self, max_bytes: int) -> bool:
        """Bound the index file. Returns False when it is larger already, even after shrinking."""
        with self._lock, _translated():
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
        with self._lock, _translated():
            count = self._connection.execute("PRAGMA page_count").fetchone()[0]
            return max(int(count) * _PAGE, os.stat(self.path).st_size)

    # -- models, namespaces, slabs ------------------------------------------------------------

    def register_model(
        self, fingerprint: bytes, label: str, chunks: Sequence[Chunk], slot_bytes: int, now: int
    ) -> int:
        """Number of this fingerprint here, made if new; its description is brought up to date."""
        with self._transaction(durable=True) as connection:
            connection.execute(
                "INSERT INTO models(fingerprint, label, chunks, slot_bytes, opened)"
                " VALUES(?,?,?,?,?) ON CONFLICT(fingerprint) DO UPDATE SET label=excluded.label,"
                " chunks=excluded.chunks, slot_bytes=excluded.slot_bytes, opened=excluded.opened",
                (fingerprint, label, json.dumps([*map(list, chunks)]), slot_bytes, now),
            )
        return self._number("SELECT model FROM models WHERE fingerprint=?", fingerprint)

    def models(self) -> list[Model]:
        """Every fingerprint known here."""
        rows = self._query(
            "SELECT model, fingerprint, label, chunks, slot_bytes, opened FROM models"
        )
        return [
            Model(m, f, label, tuple(Chunk(*c) for c in json.loads(text)), size, opened)  # type: ignore
            for m, f, label, text, size, opened in rows
        ]

    def forget_unused(self, keep: int) -> None:
        """Remove models without a block, but not `keep`, and, once there are many of them,
        namespaces without one: salts may be as many as users."""
        with self._transaction(durable=False) as connection:
            connection.execute(
                "DELETE FROM models WHERE model<>?"
                " AND NOT EXISTS (SELECT 1 FROM blocks WHERE blocks.model=models.model)",
                (keep,),
            )
        if self._number("SELECT count(*) FROM namespaces") > _MANY_NAMESPACES:
            with self._transaction(durable=False) as connection:
                connection.execute(
                    "DELETE FROM namespaces WHERE namespace IN (SELECT namespace FROM namespaces"
                    " EXCEPT SELECT namespace FROM blocks LIMIT ?)",
                    (_MANY_NAMESPACES,),
                )

    def namespace(self, label: str) -> int:
        """Number of a namespace label, made if new."""
        with self._transaction(durable=False) as connection:
            connection.execute("INSERT OR IGNORE INTO namespaces(label) VALUES(?)", (label,))
        return self._number("SELECT namespace FROM namespaces WHERE label=?", label)

    def slabs(self) -> list[SlabRow]:
        """Slab files, by number."""
        rows = self._query("SELECT slab, slot_bytes, slots FROM slabs ORDER BY slab")
        with _translated():
            return [SlabRow(*map(int, row)) for row in rows]  # type: ignore[arg-type]

    def add_slab(self, slab: SlabRow) -> None:
        """Durable when this returns."""
        with self._transaction(durable=True) as connection:
            connection.execute("INSERT INTO slabs VALUES(?,?,?)", slab)

    def drop_slab(self, slab: int) -> None:
        """Forget a slab and every row in it; durable, because its file is removed next."""
        while True:
            with self._transaction(durable=False) as connection:
                connection.execute(
                    "DELETE FROM blocks WHERE (model, block_id) IN"
                    " (SELECT model, block_id FROM blocks WHERE slab=? LIMIT ?)",
                    (slab, ROWS_PER_COMMIT),
                )
                if not connection.execute("SELECT changes()").fetchone()[0]:
                    break
        with self._transaction(durable=True) as connection:
            connection.execute("DELETE FROM slabs WHERE slab=?", (slab,))

    # -- blocks -------------------------------------------------------------------------------

    def insert(self, rows: Sequence[Row]) -> list[Place]:
        """Publish at most ROWS_PER_COMMIT shares; durable when this returns.

        Returns the places of older shares of the same blocks, which the new ones replace.
        """
        replaced: list[Place] = []
        with self._transaction(durable=True) as connection:
            for row in rows:
                replaced += connection.execute(
                    "DELETE FROM blocks WHERE model=? AND block_id=? RETURNING slab, slot, residue",
                    (row.model, row.block_id),
                ).fetchall()
            connection.executemany("INSERT INTO blocks VALUES(?,?,?,?,?,?,?,?,?,?)", rows)
        return [Place(*row) for row in replaced]

    def delete(self, fingerprint: bytes, block_ids: Sequence[bytes]) -> list[Place]:
        """Remove at most ROWS_PER_COMMIT rows; the places they held are free when this returns."""
        marks = ",".join("?" * len(block_ids))
        with self._transaction(durable=False) as connection:
            found = connection.execute(
                "DELETE FROM blocks WHERE model=(SELECT model FROM models WHERE fingerprint=?)"
                f" AND block_id IN ({marks}) RETURNING slab, slot, residue",
                (fingerprint, *block_ids),
            ).fetchall()
        return [Place(*row) for row in found]

    def delete_at(self, model: int, shares: Sequence[tuple[bytes, Place]]) -> list[Place]:
        """Remove at most ROWS_PER_COMMIT rows, but only those that still name these places."""
        places: list[Place] = []
        with self._transaction(durable=False) as connection:
            for block_id, place in shares:
                done = connection.execute(
                    "DELETE FROM blocks WHERE model=? AND block_id=? AND slab=? AND slot=?",
                    (model, block_id, place.slab, place.slot),
                )
                if done.rowcount:
                    places.append(place)
        return places

    def touch(self, model: int, uses: Mapping[bytes, tuple[int, int]]) -> None:
        """Set access times and add hits: block identity -> (accessed, hits). Not synced."""
        items = [(accessed, hits, model, block_id) for block_id, (accessed, hits) in uses.items()]
        for start in range(0, len(items), ROWS_PER_COMMIT):
            with self._transaction(durable=False) as connection:
                connection.executemany(
                    "UPDATE blocks SET accessed=max(accessed, ?), hits=hits+?"
                    " WHERE model=? AND block_id=?",
                    items[start : start + ROWS_PER_COMMIT],
                )

    def places(self, model: int, stripes: int) -> dict[bytes, int]:
        """Packed places of a model's shares that were dealt over `stripes` directories."""
        with self._lock, _translated():
            return dict(
                self._connection.execute(
                    f"SELECT block_id, {_PACKED} FROM blocks WHERE model=? AND stripes=?",
                    (model, stripes),
                )
            )

    def count(self) -> int:
        """Number of rows of all models."""
        return self._number("SELECT count(*) FROM blocks")

    def other_places(self, model: int, stripes: int) -> list[tuple[int, bytes, int, int]]:
        """(model, identity, packed place, stripes) of every share `places` leaves out."""
        return self._query(  # type: ignore[return-value]
            f"SELECT model, block_id, {_PACKED}, stripes FROM blocks"
            " WHERE NOT (model=? AND stripes=?)",
            model,
            stripes,
        )

    def place(self, model: int, block_id: bytes) -> Place | None:
        """Where one share lies."""
        found = self._query(
            "SELECT slab, slot, residue FROM blocks WHERE model=? AND block_id=?", model, block_id
        )
        return Place(*found[0]) if found else None  # type: ignore[arg-type]

    def oldest(
        self,
        limit: int,
        behind: Resident | None = None,
        before: int | None = None,
        slot_bytes: int | None = None,
    ) -> list[Resident]:
        """The least recently used blocks of all models, oldest first.

        behind: go on after this one. before: only what was last used before that time.
        slot_bytes: only blocks in slots of that size.
        """
        cursor = (behind.accessed, behind.model, behind.block_id) if behind else (-1, 0, b"")
        found = self._query(
            "SELECT fingerprint, block_id, accessed, hits, model FROM blocks"
            " CROSS JOIN models USING(model) CROSS JOIN slabs USING(slab)"
            " WHERE (accessed, model, block_id) > (?, ?, ?) AND accessed < ?"
            " AND (? IS NULL OR slabs.slot_bytes = ?)"
            " ORDER BY accessed, model, block_id LIMIT ?",
            *cursor,
            _FOREVER if before is None else before,
            slot_bytes,
            slot_bytes,
            limit,
        )
        return [Resident(*_typed(row, 2)) for row in found]  # type: ignore[arg-type]

    def newest_access(self) -> dict[int, int]:
        """Latest access time in each slab that has rows. Reads the whole index."""
        found = self._query("SELECT slab, max(accessed) FROM blocks GROUP BY slab")
        with _translated():
            return {int(slab): int(accessed) for slab, accessed in found}  # type: ignore[call-overload]

    def rows(self, after: tuple[int, int] = (-1, -1), limit: int = 1000) -> list[Row]:
        """Rows in order of slab and slot, behind `after`."""
        found = self._query(
            "SELECT model, block_id, namespace, slab, slot, stripes, residue, created, accessed,"
            " hits FROM blocks WHERE (slab, slot) > (?, ?) ORDER BY slab, slot LIMIT ?",
            *after,
            limit,
        )
        return [Row(row[0], row[1], *_typed(row[2:], 0)) for row in found]  # type: ignore[arg-type]

    def summary(self) -> list[tuple[str, str, int, int, int, int, int, int, int]]:
        """Per model and namespace: fingerprint (hex), namespace, shares, bytes in slots, oldest and
        newest write, oldest and newest access (microseconds since 1970), hits."""
        return self._query(  # type: ignore[return-value]
            "SELECT lower(hex(fingerprint)), coalesce(namespaces.label, '?'), count(*),"
            " sum(slabs.slot_bytes), min(created), max(created), min(accessed), max(accessed),"
            " sum(hits) FROM blocks JOIN models USING(model) JOIN slabs USING(slab)"
            " LEFT JOIN namespaces USING(namespace) GROUP BY model, namespace ORDER BY 3 DESC"
        )

    def problems(self) -> list[str]:
        """What SQLite's own full check finds; empty when the file is sound."""
        found = self._query("PRAGMA integrity_check(20)")
        wrong = self._number(
            "SELECT count(*) FROM blocks WHERE typeof(block_id) <> 'blob' OR"
            " typeof(model + namespace + slab + slot + stripes + residue + created + accessed"
            " + hits) <> 'integer' OR 'text' IN (typeof(slab), typeof(slot), typeof(stripes),"
            " typeof(residue), typeof(created), typeof(accessed), typeof(hits), typeof(model))"
        )
        types = [f"{wrong} rows hold values of a wrong type"] if wrong else []
        return [str(row[0]) for row in found if row[0] != "ok"] + types


def _typed(row: tuple[object, ...], start: int) -> tuple[object, ...]:
    """The row, if every value from `start` on is an integer as it was written."""
    if not all(isinstance(value, int) for value in row[start:]):
        raise IndexDamaged("a row holds values of a wrong type")
    return row


def _read_ahead(path: str) -> None:
    """Bring the whole file into the page cache in large pieces: SQLite would fetch it page by page
    in the order of the tree, and Linux cuts large POSIX_FADV_WILLNEED requests short."""
    try:
        with open(path, "rb", buffering=0) as file:
            scratch = bytearray(_PIECE_BYTES)
            while file.readinto(scratch):
                pass
    except OSError:
        return  # whoever opens it next says why


@contextmanager
def _translated() -> Iterator[None]:
    """SQLite's errors as this module's."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise IndexFull(str(error)) from error
        raise IndexDamaged(str(error)) from error
    except (ValueError, TypeError, OverflowError) as error:  # a row with values of other types
        raise IndexDamaged(str(error)) from error


def _quoted(path: str) -> str:
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
