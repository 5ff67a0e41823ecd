"""What is stored of a block, with a key and without: that no altered block is ever taken for the
one that was asked for, and what it says of why."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_hc.store.disk.format import (
    WHOLE,
    Block,
    Damaged,
    Foreign,
    Forged,
    StoredModel,
    check_block,
    mac_key,
    part_of,
    seal_block,
)
from sglang_hc.store.remote.backend import FRAME_BYTES, MOST_FRAMES, Frames
from sglang_hc.store.remote.store import storage_key

FINGERPRINT, IDENTITY = bytes(range(16)), bytes(range(100, 116))
KEY, OTHER_KEY = mac_key(b"sixteen bytes or"), mac_key(b"sixteen bytes of")
CHUNKS = ((3, 0, 4096), (5, 4096, 8192))
MODEL = StoredModel.of(CHUNKS, FINGERPRINT, "tiny")
KEYED = StoredModel.of(CHUNKS, FINGERPRINT, "tiny", key=KEY)
MODELS = pytest.mark.parametrize("model", [MODEL, KEYED], ids=["no key", "key"])
BLOCK = Block(IDENTITY, bytes(16), "tenant", 4, b"\1" * 256)
DATA = np.random.default_rng(1).integers(0, 256, MODEL.block_bytes, dtype=np.uint8)
SIZE, HEADER = MODEL.file_bytes, MODEL.header_bytes


def sealed(model: StoredModel, block: Block = BLOCK, data: np.ndarray = DATA) -> np.ndarray:
    frame = np.zeros(SIZE, dtype=np.uint8)
    frame[HEADER:] = data
    seal_block(frame[:HEADER].data, frame[HEADER:].data, block, model, 1_700_000_000_000_000)
    return frame


def check(frame: np.ndarray, model: StoredModel) -> None:
    """Whether it is served; raises Damaged."""
    check_block(frame[:HEADER].data, frame[HEADER:].data, IDENTITY, model)


def test_a_key_is_never_shown() -> None:
    """A log or a traceback may show what a directory was opened for."""
    for shown in (repr(KEYED), str(KEYED), repr(replace(KEYED, label="other"))):
        assert repr(KEY) not in shown and "key=" not in shown


@MODELS
@given(start=st.integers(0, SIZE - 1), patch=st.binary(min_size=1, max_size=300))
@example(start=0, patch=bytes(SIZE))
def test_an_overwritten_block_is_never_served(model: StoredModel, start: int, patch: bytes) -> None:
    frame = sealed(model)
    before = frame.copy()
    patch = patch[: SIZE - start]
    frame[start : start + len(patch)] = np.frombuffer(patch, dtype=np.uint8)
    if np.array_equal(frame, before):
        check(frame, model)
    else:
        with pytest.raises(Damaged):
            check(frame, model)


@MODELS
@given(
    identity=st.binary(min_size=16, max_size=16), fingerprint=st.binary(min_size=16, max_size=16)
)
def test_another_blocks_or_models_block_is_foreign(
    model: StoredModel, identity: bytes, fingerprint: bytes
) -> None:
    theirs = sealed(replace(model, fingerprint=fingerprint), replace(BLOCK, block_id=identity))
    if (identity, fingerprint) == (IDENTITY, FINGERPRINT):
        check(theirs, model)
    else:
        with pytest.raises(Foreign):
            check(theirs, model)


def test_a_block_of_other_layers_is_foreign() -> None:
    other = StoredModel.of(((3, 0, 8192), (5, 8192, 4096)), FINGERPRINT, "tiny")
    with pytest.raises(Foreign):
        check(sealed(other), MODEL)


def test_parts_of_a_block_are_told_from_each_other_and_from_the_whole() -> None:
    parts = [part_of(FINGERPRINT, part) for part in ("", "tp2-0", "tp2-1", "pp2-0")]
    assert parts[0] == WHOLE
    assert len(set(parts)) == 4 and all(len(part) == 16 for part in parts)
    models = [replace(MODEL, part=part) for part in parts]
    assert len({storage_key(model, IDENTITY) for model in models}) == 4
    mine = sealed(models[1])
    check(mine, models[1])
    for other in (models[0], *models[2:]):
        with pytest.raises(Foreign):
            check(mine, other)


# -- who has the key -----------------------------------------------------------------------------


def test_only_who_has_the_key_makes_blocks_that_are_served() -> None:
    for forger in (None, OTHER_KEY):
        for maker, reader in ((forger, KEY), (KEY, forger)):
            with pytest.raises(Forged):
                check(sealed(replace(KEYED, key=maker)), replace(KEYED, key=reader))


def test_bytes_that_are_exchanged_under_a_true_header_are_not_served() -> None:
    """Digests without a key would say that these are the block, if anybody found such bytes; with
    one nobody can tell."""
    frame = sealed(KEYED)
    digest = hashlib.blake2b(
        IDENTITY + FINGERPRINT + struct.pack("<II", 3, 4096) + DATA[:4096].tobytes(),
        digest_size=16, key=KEY, person=b"hc chunk",
    ).digest()  # fmt: skip
    assert frame[648:664].tobytes() == digest
    frame[HEADER:] ^= 1
    forged = sealed(replace(KEYED, key=None), data=DATA ^ 1)
    forged[612:628] = frame[612:628]  # the MAC of another header
    body = forged[: HEADER - 16].tobytes()
    forged[HEADER - 16 : HEADER] = np.frombuffer(xxhash.xxh3_128_digest(body), np.uint8)
    with pytest.raises(Damaged):
        check(frame, KEYED)
    with pytest.raises(Forged):
        check(forged, KEYED)


def test_a_table_with_a_forged_digest_is_not_served() -> None:
    frame = sealed(KEYED)
    frame[648:664] ^= 1
    body = frame[: HEADER - 16].tobytes()
    frame[HEADER - 16 : HEADER] = np.frombuffer(xxhash.xxh3_128_digest(body), np.uint8)
    with pytest.raises(Forged):
        check(frame, KEYED)


def test_the_mac_is_where_the_page_says() -> None:
    raw = sealed(KEYED).tobytes()
    covered = raw[:612] + raw[628 : HEADER - 16]
    mac = hashlib.blake2b(covered, digest_size=16, key=KEY, person=b"hc header").digest()
    assert raw[612:628] == mac != bytes(16)
    assert sealed(MODEL)[612:628].tobytes() == bytes(16), "no key, no MAC"


def test_servers_of_different_keys_use_different_names() -> None:
    models = [StoredModel.of(CHUNKS, FINGERPRINT, "", key=key) for key in (None, KEY, OTHER_KEY)]
    assert models[0].part == WHOLE and len({model.part for model in models}) == 3
    part = part_of(FINGERPRINT, "tp2-0")
    assert StoredModel.of(CHUNKS, FINGERPRINT, "", part, KEY).part not in (part, KEYED.part)
    assert mac_key(b"x" * 1000) != mac_key(b"x" * 1001), "all of a long secret counts"


# -- memory for blocks on their way --------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_bytes", "each"),
    [
        (4096, MOST_FRAMES),
        (FRAME_BYTES // MOST_FRAMES - HEADER, MOST_FRAMES),
        (FRAME_BYTES // MOST_FRAMES, MOST_FRAMES - 1),
        (FRAME_BYTES - HEADER, 1),
        (2 * FRAME_BYTES, 1),
    ],
)
def test_envelopes_under_way_take_so_much_memory_and_at_least_one_fits(
    block_bytes: int, each: int
) -> None:
    frames = Frames(HEADER, block_bytes)
    assert (frames.for_loads, frames.for_saves) == ([range(each)], [range(each, 2 * each)])
    assert frames.bytes.shape == (2 * each, HEADER + block_bytes)
