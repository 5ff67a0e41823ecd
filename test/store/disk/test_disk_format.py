"""The bytes of version 3, as docs/disk-format.md lays them out. These tests may grow but not
change: what they spell out lies on disks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.store.disk import Block, StoredModel
from sglang_hc.store.disk.format import (
    LABEL_MAX,
    TOKENS_MAX,
    VERSION,
    BlockHeader,
    Chunk,
    Damaged,
    FormatError,
    check_file,
    chunk_digest,
    clip_label,
    header_bytes_for,
    read_header,
)
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.identity import block_id
from support.disk_store import (
    FILE,
    FINGERPRINT,
    LAYOUT,
    data_of,
    empty_slot,
    make_path,
    open_store,
    path_of_block,
    put,
    read_block,
)

IDS = st.binary(min_size=16, max_size=16)


def header(**changes: object) -> BlockHeader:
    fields = {
        "block_id": bytes(range(16)),
        "parent_id": bytes(range(16, 32)),
        "fingerprint": bytes(range(32, 48)),
        "created": 1_700_000_000_123_456,
        "position": 41,
        "tokens": b"\x00\x00\x12\x34" * 64,
        "label": "tenant",
        "table": ((5, 4096, b"d" * 16), (8, 8192, b"e" * 16)),
        "part": b"p" * 16,
    }
    return BlockHeader(**{**fields, **changes})  # type: ignore[arg-type]


def packed(one: BlockHeader) -> bytes:
    page = bytearray(one.header_bytes)
    one.pack_into(memoryview(page))
    return bytes(page)


def test_header_bytes_of_version_3() -> None:
    page = packed(header())
    assert len(page) == 4096 and VERSION == 3
    assert page[:8] == b"SGHCSLOT"
    assert struct.unpack_from("<HHHH", page, 8) == (3, 1, 0, 2)
    assert page[16:64] == bytes(range(48))
    assert struct.unpack_from("<QII", page, 64) == (1_700_000_000_123_456, 256, 6)
    assert page[80:336] == b"\x00\x00\x12\x34" * 64
    assert page[336:342] == b"tenant" and page[342:592] == bytes(250)
    assert struct.unpack_from("<I", page, 592) == (41,)
    assert page[596:612] == b"p" * 16 and page[612:640] == bytes(28)
    assert page[640:688] == struct.pack("<II16sII16s", 5, 4096, b"d" * 16, 8, 8192, b"e" * 16)
    assert page[688:4080] == bytes(3392)
    assert page[4080:] == xxhash.xxh3_128_digest(page[:4080])


def test_a_file_lies_where_the_format_says(scratch: Path) -> None:
    """Header, then the block as it is: layer i starts at header_bytes plus its offset."""
    store = open_store(scratch)
    (block,) = make_path(1, namespace="tenant")
    put(store, [block])
    name = block.block_id.hex()
    model = f"{FINGERPRINT.hex()}{bytes(16).hex()}-{FILE}"
    path = scratch / "sglang-hc" / model / name[0] / name[1] / name
    assert path == path_of_block(store, block)
    content = path.read_bytes()
    assert len(content) == FILE == 4096 + LAYOUT.slot_bytes
    assert content[4096:] == data_of(block).tobytes()
    assert (scratch / "sglang-hc" / "format").read_text() == "3\n"
    assert (path.parents[2] / "label").read_text() == "tiny"
    with path.open("rb") as file:

        def read(buffers: list[memoryview], offset: int) -> int:
            file.seek(offset)
            return sum(file.readinto(buffer) for buffer in buffers)

        found = check_file(read, block.block_id, FILE)
        assert found == read_header(read)
    assert (found.label, found.position, found.tokens) == ("tenant", 0, block.tokens)
    store.close()


def test_chunk_digest_of_version_3() -> None:
    name, plan, data = b"a" * 16, b"b" * 16, bytes(range(256)) * 16
    covered = name + plan + struct.pack("<II", 9, 4096) + data
    assert chunk_digest(name, plan, 9, memoryview(data)) == xxhash.xxh3_128_digest(covered)


@pytest.mark.parametrize(("chunks", "pages"), [(1, 1), (143, 1), (144, 2), (314, 2), (315, 3)])
def test_header_grows_by_pages(chunks: int, pages: int) -> None:
    assert header_bytes_for(chunks) == pages * 4096


@given(
    st.tuples(IDS, IDS, IDS),
    st.binary(max_size=256),
    st.text(max_size=80),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), IDS), max_size=200),
)
def test_headers_come_back(
    names: tuple[bytes, bytes, bytes], tokens: bytes, label: str, table: list
) -> None:
    one = header(
        block_id=names[0],
        parent_id=names[1],
        fingerprint=names[2],
        tokens=tokens,
        label=clip_label(label),
        table=tuple(table),
    )
    assert BlockHeader.unpack(memoryview(packed(one))) == one


@given(st.integers(0, 4095), st.integers(1, 255))
def test_any_changed_byte_of_a_header_is_noticed(at: int, mask: int) -> None:
    page = bytearray(packed(header()))
    page[at] ^= mask
    with pytest.raises(FormatError):
        BlockHeader.unpack(memoryview(page))


@pytest.mark.parametrize("version", [1, 2, 4])
def test_an_unknown_version_is_named(version: int) -> None:
    page = bytearray(packed(header()))
    page[8] = version
    with pytest.raises(FormatError) as caught:
        BlockHeader.unpack(memoryview(page))
    assert caught.value.version == version


@given(st.lists(st.integers(1, 9), min_size=1, max_size=200))
def test_chunks_follow_the_header_without_gaps(pages: list[int]) -> None:
    chunks, end = [], 0
    for layer, count in enumerate(pages):
        chunks.append(Chunk(layer, end, 4096 * count))
        end += 4096 * count
    model = StoredModel(tuple(chunks), bytes(16), "tiny")
    assert model.block_bytes == end
    assert model.file_bytes == header_bytes_for(len(chunks)) + end


@pytest.mark.parametrize("second", [4096 - 1, 4096 + 4096])
def test_chunks_with_gaps_or_overlaps_are_a_programming_error(second: int) -> None:
    with pytest.raises(ValueError, match="layer 5 does not follow"):
        StoredModel((Chunk(4, 0, 4096), Chunk(5, second, 4096)), bytes(16), "tiny")


@given(
    st.tuples(IDS, IDS, st.binary(min_size=4, max_size=8)),
    st.tuples(IDS, IDS, st.binary(min_size=4, max_size=8)),
)
def test_blocks_that_differ_in_anything_have_other_names(
    one: tuple[bytes, bytes, bytes], other: tuple[bytes, bytes, bytes]
) -> None:
    """(fingerprint, parent, tokens): the parent carries the namespace and all tokens before."""
    assert (block_id(*one) == block_id(*other)) == (one == other)


@pytest.mark.parametrize("label", ["", "x" * 1000, "\ud800salt", "\0", "\u00e9" * 200, "'; DROP"])
def test_any_text_is_a_namespace_label(scratch: Path, label: str) -> None:
    """A salt is the user's: whatever it is, it may not turn the tier off."""
    store = open_store(scratch)
    block = Block(b"n" * 16, b"p" * 16, label, 0, b"\0" * 8)
    assert put(store, [block]) == [Outcome.OK]
    assert len(store.in_use()) and store.contains([block.block_id]) == 1
    store.close()


@pytest.mark.parametrize("length", [LABEL_MAX, LABEL_MAX + 1])
def test_a_label_is_cut_off_at_its_limit(length: int) -> None:
    one = BlockHeader.unpack(memoryview(packed(header(label="x" * length))))
    assert one.label == "x" * LABEL_MAX
    assert clip_label("x" * 255 + "\u00e9") == "x" * 255, "no half of a letter"


def test_tokens_have_a_limit_and_cost_no_room_beyond_it(scratch: Path) -> None:
    store = open_store(scratch)
    (block,) = make_path(1)
    assert put(store, [replace(block, tokens=bytes(TOKENS_MAX))]) == [Outcome.OK]
    other = replace(block, block_id=bytes(16), tokens=bytes(TOKENS_MAX + 1))
    with pytest.raises(ValueError, match="257 bytes of tokens"):
        put(store, [other])
    with store.directories[0].ledger.held():
        assert store.directories[0].ledger.used == FILE
    store.close()


@pytest.mark.parametrize("layers", [143, 144])
def test_a_header_of_more_than_a_page_is_read_and_proven(scratch: Path, layers: int) -> None:
    """One page holds the table of 143 chunks."""
    chunks = [(layer, 4096 * layer, 4096) for layer in range(layers)]
    model = StoredModel.of(chunks, FINGERPRINT, "deep")
    assert model.header_bytes == (1 if layers == 143 else 2) * 4096

    class Layout:
        slot_bytes = model.block_bytes

        def chunks(self) -> list[tuple[int, int, int]]:
            return chunks

    store = open_store(scratch, layout=Layout())  # type: ignore[arg-type]
    (block,) = make_path(1)
    assert put(store, [block]) == [Outcome.OK]
    wanted = data_of(block, model.block_bytes)
    into = empty_slot(model.block_bytes)
    assert read_block(store, block.block_id, into) is Outcome.OK
    assert np.array_equal(into, wanted)
    store.close()


def a_file(**changes: object) -> tuple[bytes, bytes]:
    """A block's file, and its identity."""
    model = StoredModel.of([(0, 0, 4096), (1, 4096, 4096)], FINGERPRINT, "x")
    (block,) = make_path(1)
    data = data_of(block, model.block_bytes)
    one = BlockHeader.of(replace(block, **changes), model, 5, memoryview(data))
    return packed(one) + data.tobytes(), block.block_id


WHOLE_FILE = a_file()[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (WHOLE_FILE[:4095], "ends in the header"),
        (WHOLE_FILE[:4096], "ends in layer 0"),
        (WHOLE_FILE[:-1], "ends in layer 1"),
        (WHOLE_FILE + bytes(4096), "longer than its block"),
        (WHOLE_FILE[:-1] + bytes([WHOLE_FILE[-1] ^ 1]), "layer 1 does not match"),
        (bytes(len(WHOLE_FILE)), "not a block's header"),
        (b"", "ends in the header"),
        (a_file(block_id=b"n" * 16)[0], "another block than its name"),
        (a_file(parent_id=b"n" * 16)[0], "not the hash of the tokens"),
    ],
)
def test_a_whole_file_is_checked(content: bytes, message: str) -> None:
    def read(buffers: Sequence[memoryview], offset: int) -> int:
        done = 0
        for buffer in buffers:
            piece = content[offset + done : offset + done + len(buffer)]
            buffer[: len(piece)] = piece
            done += len(piece)
        return done

    with pytest.raises(Damaged, match=message):
        check_file(read, a_file()[1], len(content))
