"""A directory of version 1 is refused with one sentence and left as it is, whatever is asked of it.

The bytes and the schema are spelled out as version 1 had them; the code that wrote them is gone.
"""

from __future__ import annotations

import sqlite3
import struct
from pathlib import Path

import pytest
import xxhash

from sglang_hc.store.disk.backend import DirectBackend
from sglang_hc.store.disk.directory import DirectoryError
from sglang_hc.store.disk.format import chunk_digest
from sglang_hc.tools.cli.main import main
from support.disk_store import FINGERPRINT, LAYOUT, data_of, make_path, open_store

SCHEMA_1 = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE models(model INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL UNIQUE,
    label TEXT NOT NULL, chunks TEXT NOT NULL, slot_bytes INTEGER NOT NULL,
    opened INTEGER NOT NULL);
CREATE TABLE namespaces(namespace INTEGER PRIMARY KEY, label TEXT NOT NULL UNIQUE);
CREATE TABLE slabs(slab INTEGER PRIMARY KEY, slot_bytes INTEGER NOT NULL, slots INTEGER NOT NULL);
CREATE TABLE blocks(model INTEGER NOT NULL, block_id BLOB NOT NULL, namespace INTEGER NOT NULL,
    slab INTEGER NOT NULL, slot INTEGER NOT NULL, stripes INTEGER NOT NULL,
    residue INTEGER NOT NULL, created INTEGER NOT NULL, accessed INTEGER NOT NULL,
    hits INTEGER NOT NULL, PRIMARY KEY(model, block_id)) WITHOUT ROWID;
CREATE UNIQUE INDEX blocks_by_slot ON blocks(slab, slot);
CREATE INDEX blocks_by_access ON blocks(accessed);
INSERT INTO meta VALUES('format_version', '1');
PRAGMA user_version=1;
"""
BLOCKS = make_path(3)
SLOT_BYTES = 4096 + LAYOUT.slot_bytes
NOW = 1_700_000_000_000_000


def sealed(body: bytes) -> bytes:
    body = body.ljust(4096 - 16, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def make_version_1(folder: Path) -> Path:
    """A directory with three blocks as version 1 left it on a single disk. Returns its store."""
    root = folder / "sglang-hc"
    root.mkdir()
    (root / "lock").write_text("1")
    slab = sealed(struct.pack("<8sHHIQIIQ", b"SGHCSLAB", 1, 0, 1, SLOT_BYTES, 3, 0, NOW))
    for block in BLOCKS:
        data = memoryview(data_of(block).tobytes())
        head = struct.pack(
            "<8sHHBBH16s16s16sQII",
            *(b"SGHCSLOT", 1, 1, 1, 0, len(LAYOUT.chunks())),
            *(block.block_id, block.parent_id, FINGERPRINT, NOW, len(block.tokens), 0),
        )
        table = b"".join(
            struct.pack("<II", layer, length)
            + chunk_digest(block.block_id, FINGERPRINT, layer, data[offset : offset + length])
            for layer, offset, length in LAYOUT.chunks()
        )
        position = struct.pack("<I", block.position)
        slab += sealed((head + block.tokens).ljust(592, b"\0") + position + bytes(44) + table)
        slab += data
    (root / "slab-00000001.dat").write_bytes(slab)
    index = sqlite3.connect(root / "index.sqlite")
    index.execute("PRAGMA journal_mode=WAL")
    index.executescript(SCHEMA_1)
    index.execute("INSERT INTO models VALUES(1, ?, 'tiny', '[]', ?, 0)", (FINGERPRINT, SLOT_BYTES))
    index.execute("INSERT INTO slabs VALUES(1, ?, 3)", (SLOT_BYTES,))
    rows = [(block.block_id, slot) for slot, block in enumerate(BLOCKS)]
    index.executemany("INSERT INTO blocks VALUES(1, ?, 1, 1, ?, 1, 0, 0, 0, 0)", rows)
    index.commit()
    index.close()
    return root


def files_in(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir() if path.name != "lock"}


SENTENCE = (
    r"--hc-disk .*: written in disk format 1, this sglang-hc knows format 2; delete .*sglang-hc, "
    r"which is only a cache, or name another directory \(nothing was changed\)"
)


@pytest.mark.parametrize("state", ["sound", "no index", "marked", "garbage index", "no slabs"])
def test_version_1_is_refused_and_left_as_it_is(scratch: Path, state: str) -> None:
    root = make_version_1(scratch)
    if state == "no index":
        (root / "index.sqlite").unlink()
    elif state == "marked":
        (root / "index.damaged").touch()
    elif state == "garbage index":
        (root / "index.sqlite").write_bytes(b"\xff" * 8192)
    elif state == "no slabs":
        (root / "slab-00000001.dat").unlink()
    before = files_in(root)
    for _ in range(2):
        with pytest.raises(DirectoryError, match=SENTENCE):
            open_store(scratch, backend=DirectBackend(direct=False))
    assert files_in(root) == before


@pytest.mark.parametrize("command", [["inspect"], ["fsck"], ["fsck", "--repair"]])
def test_tools_refuse_version_1_and_leave_it_as_it_is(
    scratch: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    root = make_version_1(scratch)
    before = files_in(root)
    assert main([*command, str(scratch)]) == 2
    assert "written in disk format 1" in capsys.readouterr().err
    assert files_in(root).items() >= before.items()  # SQLite may leave an empty log


def test_what_the_message_says_helps(scratch: Path) -> None:
    root = make_version_1(scratch)
    for path in root.iterdir():
        path.unlink()
    root.rmdir()
    store = open_store(scratch, backend=DirectBackend(direct=False))
    assert store.contains([BLOCKS[0].block_id]) == 0
    store.close()
