"""The index of one directory: which block lies in which slot.

Schema and order of writes are in docs/disk-format.md; the file itself is `index_file.IndexFile`.
Thread-safe. Every method but `close` raises IndexDamaged when SQLite finds the file malformed and
IndexFull when the change would not fit the file's share of the budget.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from sglang_hc.store.disk.format import Chunk, SlabHeader, clip_label
from sglang_hc.store.disk.index_file import IndexFile, Model, NewRow, Place, Row, translated

ROWS_PER_COMMIT = 32
"""Most block rows one transaction changes, so that what it adds to the WAL is bounded."""
_FOREVER = (1 << 63) - 1
_PACKED = "(slab<<32)|slot"
_ROW = "model, block_id, slab, slot, accessed"
_NEW_ROW = "(?,?,(SELECT namespace FROM namespaces WHERE label=?),?,?,?,?,0)"
NAMESPACE_BYTES = 64
"""How much of a namespace's label is kept, in bytes of UTF-8: what an index may hold of a slot has
room for it."""
NAMESPACES_UNUSED = 1024
"""Most namespaces without a block that an index may hold: salts may be as many as users. They fit
what is set aside for an index without slots."""


class _LabelledRow(NamedTuple):
    namespace: int
    model: int
    block_id: bytes
    slab: int
    slot: int
    accessed: int


class Index(IndexFile):
    """An open index."""

    def __init__(self, path: str, read_only: bool = False) -> None:
        super().__init__(path, read_only)
        self._namespaces: set[str] = set()
        """Those that surely are in the file: used since the last ones without a block left it."""

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
                (fingerprint, label, msgspec.json.encode(chunks).decode(), slot_bytes, now),
            )
        return self._number("SELECT model FROM models WHERE fingerprint=?", fingerprint)

    def models(self) -> list[Model]:
        """Every fingerprint known here."""
        return self._read(Model, "SELECT model, fingerprint, slot_bytes FROM models")

    def forget_unused(self, keep: int) -> None:
        """Remove models, but not `keep`, and namespaces without a block."""
        with self._transaction(durable=False) as connection:
            connection.execute(
                "DELETE FROM models WHERE model<>?"
                " AND NOT EXISTS (SELECT 1 FROM blocks WHERE blocks.model=models.model)",
                (keep,),
            )
        self._forget_namespaces()

    def _forget_namespaces(self) -> None:
        self._namespaces.clear()
        sql = "SELECT namespace FROM namespaces EXCEPT SELECT namespace FROM blocks"
        unused = self._read(tuple[int], sql)
        for start in range(0, len(unused), ROWS_PER_COMMIT):
            with self._transaction(durable=False) as connection:
                connection.executemany(
                    "DELETE FROM namespaces WHERE namespace=?",
                    unused[start : start + ROWS_PER_COMMIT],
                )

    def _make_namespaces(self, labels: Collection[str]) -> None:
        if len(self._namespaces) + len(labels) > NAMESPACES_UNUSED:
            self._forget_namespaces()
        new = [label for label in labels if label not in self._namespaces]
        if not new:
            return
        with self._transaction(durable=False) as connection:
            values = ",".join(["(?)"] * len(new))
            connection.execute(f"INSERT OR IGNORE INTO namespaces(label) VALUES {values}", new)
        self._namespaces.update(new)

    def namespaces(self) -> dict[int, str]:
        """Label of each namespace, cut off at NAMESPACE_BYTES."""
        return dict(self._read(tuple[int, str], "SELECT namespace, label FROM namespaces"))

    def rows_of(self, namespaces: Collection[int]) -> Iterator[Row]:
        """Rows of blocks of these namespaces, of all models, in order of slab and slot."""
        after = (-1, -1)
        while rows := self._read(
            _LabelledRow,
            f"SELECT namespace, {_ROW} FROM blocks WHERE (slab, slot) > (?, ?)"
            " ORDER BY slab, slot LIMIT 1000",
            *after,
        ):
            yield from (Row(*row[1:]) for row in rows if row.namespace in namespaces)
            after = (rows[-1].slab, rows[-1].slot)

    def settle(self) -> None:
        """Forget namespaces without a block, and write out the log: what was deleted before is in
        no file any more when this returns. Raises IndexFull while a reader holds the log."""
        self._forget_namespaces()
        with self._lock:
            self._write_out()

    def slabs(self) -> list[SlabHeader]:
        """Slab files, by number."""
        sql = "SELECT slab, slot_bytes, slots FROM slabs ORDER BY slab"
        return [SlabHeader(*row) for row in self._read(tuple[int, int, int], sql)]

    def add_slab(self, slab: SlabHeader) -> None:
        """Durable when this returns."""
        with self._transaction(durable=True) as connection:
            row = (slab.slab, slab.slot_bytes, slab.slots)
            connection.execute("INSERT INTO slabs VALUES(?,?,?)", row)

    def drop_slab(self, slab: int) -> None:
        """Forget a slab and every row in it; durable, because its file is removed next."""
        while True:
            with self._transaction(durable=False) as connection:
                done = connection.execute(
                    "DELETE FROM blocks WHERE (model, block_id) IN"
                    " (SELECT model, block_id FROM blocks WHERE slab=? LIMIT ?)",
                    (slab, ROWS_PER_COMMIT),
                )
                if not done.rowcount:
                    break
        with self._transaction(durable=True) as connection:
            connection.execute("DELETE FROM slabs WHERE slab=?", (slab,))

    # -- blocks -------------------------------------------------------------------------------

    def insert(self, rows: Sequence[NewRow]) -> list[Place]:
        """Publish at most ROWS_PER_COMMIT blocks; durable when this returns.

        Returns the places of older rows of the same blocks, which the new ones replace.
        """
        replaced: list[Place] = []
        rows = [row._replace(namespace=clip_label(row.namespace, NAMESPACE_BYTES)) for row in rows]
        # Few statements for many rows: at each the interpreter's lock changes hands.
        with self._lock:  # so that no namespace is forgotten before it has a block
            self._make_namespaces({row.namespace for row in rows})
            with self._transaction(durable=True) as connection:
                for model in {row.model for row in rows}:
                    names = [row.block_id for row in rows if row.model == model]
                    replaced += connection.execute(
                        "DELETE FROM blocks WHERE model=? AND block_id IN"
                        f" ({','.join('?' * len(names))}) RETURNING slab, slot",
                        (model, *names),
                    ).fetchall()
                values = ",".join([_NEW_ROW] * len(rows))
                connection.execute(
                    f"INSERT INTO blocks VALUES {values}", [*chain.from_iterable(rows)]
                )
        return [Place(*row) for row in replaced]

    def delete(self, owners: Sequence[Row]) -> list[Place]:
        """Remove at most ROWS_PER_COMMIT rows, but only those that still name these slots, which
        are free when this returns."""
        places: list[Place] = []
        with self._transaction(durable=False) as connection:
            for one in owners:
                done = connection.execute(
                    "DELETE FROM blocks WHERE model=? AND block_id=? AND slab=? AND slot=?",
                    (one.model, one.block_id, one.slab, one.slot),
                )
                if done.rowcount:
                    places.append(one.place)
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

    def end_future(self, now: int) -> None:
        """Blocks that were used after `now`, by a clock that was ahead, count as used now: they
        would be evicted after all others until that time has come."""
        changed = ROWS_PER_COMMIT
        while changed == ROWS_PER_COMMIT:
            with self._transaction(durable=False) as connection:
                changed = connection.execute(
                    "UPDATE blocks SET accessed=? WHERE (model, block_id) IN"
                    " (SELECT model, block_id FROM blocks WHERE accessed>? LIMIT ?)",
                    (now, now, ROWS_PER_COMMIT),
                ).rowcount

    def places(self, model: int) -> dict[bytes, int]:
        """Packed place of each of a model's blocks."""
        with self._lock, translated():
            return dict(
                self._connection.execute(
                    f"SELECT block_id, {_PACKED} FROM blocks WHERE model=?", (model,)
                )
            )

    def other_places(self, model: int) -> list[int]:
        """Packed places of the blocks of all other models, found by the primary key."""
        sql = f"SELECT {_PACKED} FROM blocks WHERE model<? UNION ALL"
        sql += f" SELECT {_PACKED} FROM blocks WHERE model>?"
        return [place for (place,) in self._read(tuple[int], sql, model, model)]

    def place(self, model: int, block_id: bytes) -> Place | None:
        """Where one block lies."""
        sql = "SELECT slab, slot FROM blocks WHERE model=? AND block_id=?"
        found = self._read(Place, sql, model, block_id)
        return found[0] if found else None

    def oldest(
        self,
        limit: int,
        behind: Row | None = None,
        before: int | None = None,
        slot_bytes: int | None = None,
    ) -> list[Row]:
        """The least recently used blocks of all models, oldest first.

        behind: go on after this one. before: only what was last used before that time.
        slot_bytes: only blocks in slots of that size.
        """
        cursor = (behind.accessed, behind.model, behind.block_id) if behind else (-1, 0, b"")
        return self._read(
            Row,
            f"SELECT {_ROW} FROM blocks CROSS JOIN slabs USING(slab)"
            " WHERE (accessed, model, block_id) > (?, ?, ?) AND accessed < ?"
            " AND (? IS NULL OR slabs.slot_bytes = ?)"
            " ORDER BY accessed, model, block_id LIMIT ?",
            *cursor,
            _FOREVER if before is None else before,
            slot_bytes,
            slot_bytes,
            limit,
        )

    def newest_access(self) -> dict[int, int]:
        """Latest access time in each slab that has rows. Reads the whole index."""
        sql = "SELECT slab, max(accessed) FROM blocks GROUP BY slab"
        return dict(self._read(tuple[int, int], sql))

    def rows(self, after: tuple[int, int] = (-1, -1), limit: int = 1000) -> list[Row]:
        """Rows in order of slab and slot, behind `after`."""
        return self._read(
            Row,
            f"SELECT {_ROW} FROM blocks WHERE (slab, slot) > (?, ?) ORDER BY slab, slot LIMIT ?",
            *after,
            limit,
        )

    def all_rows(self) -> Iterator[Row]:
        """All rows, in order of slab and slot; a row that goes meanwhile may be missing."""
        after = (-1, -1)
        while rows := self.rows(after):
            yield from rows
            after = (rows[-1].slab, rows[-1].slot)
