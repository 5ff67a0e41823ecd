"""The envelope: its bytes as documented, and that no altered one is ever taken for intact."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.store.remote.backend import FRAME_BYTES, MOST_FRAMES, Frames
from sglang_hc.store.remote.envelope import (
    HEADER_BYTES,
    MAC_BYTES,
    VERSION,
    Verdict,
    fingerprint_of_key,
    fingerprint_of_part,
    inspect,
    mac_key,
    seal,
)

FINGERPRINT, IDENTITY = bytes(range(16)), bytes(range(100, 116))
PAYLOAD = np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)
SIZE = HEADER_BYTES + len(PAYLOAD)


def envelope(identity: bytes = IDENTITY, fingerprint: bytes = FINGERPRINT) -> np.ndarray:
    frame = np.zeros(SIZE, dtype=np.uint8)
    frame[HEADER_BYTES:] = PAYLOAD
    seal(frame, fingerprint, identity, 1_700_000_000_000_000)
    return frame


def verdict(frame: np.ndarray) -> Verdict:
    return inspect(frame[:HEADER_BYTES], frame[HEADER_BYTES:], FINGERPRINT, IDENTITY)


def test_an_untouched_envelope_is_intact() -> None:
    assert verdict(envelope()) is Verdict.INTACT


def test_bytes_are_where_the_page_says() -> None:
    raw = envelope().tobytes()
    assert raw[:8] == b"SGHCREMO"
    assert struct.unpack_from("<HHI", raw, 8) == (VERSION, 1, 0)
    assert raw[16:32] == IDENTITY and raw[32:48] == FINGERPRINT
    assert struct.unpack_from("<QQ", raw, 48) == (len(PAYLOAD), 1_700_000_000_000_000)
    covered = IDENTITY + FINGERPRINT + struct.pack("<Q", len(PAYLOAD)) + PAYLOAD.tobytes()
    assert raw[64:80] == xxhash.xxh3_128_digest(covered)
    assert raw[80:4080] == bytes(4000), "no key, no MAC"
    assert raw[4080:4096] == xxhash.xxh3_128_digest(raw[:4080])
    table = (Path(__file__).parents[3] / "docs/remote.md").read_text()
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")]
    places = [(a.strip(), b.strip()) for a, b in rows]
    for place in ("0", "8"), ("8", "2"), ("16", "16"), ("32", "16"), ("48", "8"), ("64", "16"):
        assert place in places


@given(at=st.integers(0, SIZE - 1), flip=st.integers(1, 255))
def test_an_envelope_altered_anywhere_is_never_served(at: int, flip: int) -> None:
    frame = envelope()
    frame[at] ^= flip
    assert verdict(frame) is not Verdict.INTACT


@given(start=st.integers(0, SIZE - 1), patch=st.binary(min_size=1, max_size=300))
def test_an_overwritten_envelope_is_never_served(start: int, patch: bytes) -> None:
    frame = envelope()
    before = frame.copy()
    patch = patch[: SIZE - start]
    frame[start : start + len(patch)] = np.frombuffer(patch, dtype=np.uint8)
    assert (verdict(frame) is Verdict.INTACT) == np.array_equal(frame, before)


@given(cut=st.integers(0, SIZE - 1))
def test_a_truncated_envelope_is_never_served(cut: int) -> None:
    frame = envelope()
    rest = frame[cut:].copy()
    frame[cut:] = 0
    assert (verdict(frame) is Verdict.INTACT) == (not rest.any())


@given(
    identity=st.binary(min_size=16, max_size=16), fingerprint=st.binary(min_size=16, max_size=16)
)
def test_another_blocks_or_plans_envelope_is_foreign(identity: bytes, fingerprint: bytes) -> None:
    same = (identity, fingerprint) == (IDENTITY, FINGERPRINT)
    wanted = Verdict.INTACT if same else Verdict.FOREIGN
    assert verdict(envelope(identity, fingerprint)) is wanted


def test_the_header_of_one_block_does_not_cover_anothers_bytes() -> None:
    mine, other = envelope(), envelope()
    other[HEADER_BYTES:] ^= 1
    seal(other, FINGERPRINT, bytes(16), 0)
    mine[HEADER_BYTES:] = other[HEADER_BYTES:]
    assert verdict(mine) is Verdict.DAMAGED


def test_another_version_is_told_from_damage() -> None:
    frame = envelope()
    frame[8] = VERSION + 1
    assert verdict(frame) is Verdict.UNKNOWN_VERSION


def test_a_block_of_another_size_is_foreign() -> None:
    frame = envelope()
    short = inspect(frame[:HEADER_BYTES], frame[HEADER_BYTES:-1], FINGERPRINT, IDENTITY)
    assert short is Verdict.FOREIGN


def test_parts_of_a_block_are_told_from_each_other_and_from_the_whole() -> None:
    whole = fingerprint_of_part(FINGERPRINT, "")
    parts = [fingerprint_of_part(FINGERPRINT, part) for part in ("tp2-0", "tp2-1", "pp2-0")]
    assert whole == FINGERPRINT
    assert len({whole, *parts}) == 4 and all(len(part) == 16 for part in parts)
    mine = envelope(fingerprint=parts[0])
    header, payload = mine[:HEADER_BYTES], mine[HEADER_BYTES:]
    assert inspect(header, payload, parts[0], IDENTITY) is Verdict.INTACT
    for other in (whole, *parts[1:]):
        assert inspect(header, payload, other, IDENTITY) is Verdict.FOREIGN


@pytest.mark.parametrize(
    ("slot_bytes", "each"),
    [
        (4096, MOST_FRAMES),
        (FRAME_BYTES // MOST_FRAMES - HEADER_BYTES, MOST_FRAMES),
        (FRAME_BYTES // MOST_FRAMES, MOST_FRAMES - 1),
        (FRAME_BYTES - HEADER_BYTES, 1),
        (2 * FRAME_BYTES, 1),
    ],
)
def test_envelopes_under_way_take_so_much_memory_and_at_least_one_fits(
    slot_bytes: int, each: int
) -> None:
    frames = Frames(slot_bytes)
    assert (frames.for_loads, frames.for_saves) == (range(each), range(each, 2 * each))
    assert frames.bytes.shape == (2 * each, HEADER_BYTES + slot_bytes)


KEY, OTHER_KEY = mac_key(b"sixteen bytes or"), mac_key(b"sixteen bytes of")


def sealed(key: bytes | None, payload: np.ndarray = PAYLOAD) -> np.ndarray:
    frame = np.zeros(SIZE, dtype=np.uint8)
    frame[HEADER_BYTES:] = payload
    seal(frame, FINGERPRINT, IDENTITY, 1, key)
    return frame


def verdict_with(key: bytes | None, frame: np.ndarray) -> Verdict:
    return inspect(frame[:HEADER_BYTES], frame[HEADER_BYTES:], FINGERPRINT, IDENTITY, key)


def test_only_who_has_the_key_makes_envelopes_that_are_served() -> None:
    assert verdict_with(KEY, sealed(KEY)) is Verdict.INTACT
    for forger in (None, OTHER_KEY):
        assert verdict_with(KEY, sealed(forger)) is Verdict.FORGED
        assert verdict_with(forger, sealed(KEY)) is Verdict.FORGED
    forged = sealed(None, PAYLOAD ^ 1)  # other bytes, with digests that fit, and the MAC of others
    forged[80 : 80 + MAC_BYTES] = sealed(KEY)[80 : 80 + MAC_BYTES]
    body = forged[: HEADER_BYTES - 16].tobytes()
    forged[HEADER_BYTES - 16 : HEADER_BYTES] = np.frombuffer(xxhash.xxh3_128_digest(body), np.uint8)
    assert verdict_with(KEY, forged) is Verdict.FORGED


@given(at=st.integers(0, SIZE - 1), flip=st.integers(1, 255))
def test_an_envelope_with_a_mac_altered_anywhere_is_never_served(at: int, flip: int) -> None:
    frame = sealed(KEY)
    frame[at] ^= flip
    assert verdict_with(KEY, frame) is not Verdict.INTACT


def test_servers_of_different_keys_use_different_names() -> None:
    names = [fingerprint_of_key(FINGERPRINT, key) for key in (None, KEY, OTHER_KEY)]
    assert names[0] == FINGERPRINT and len(set(names)) == 3 and {*map(len, names)} == {16}
    assert mac_key(b"x" * 1000) != mac_key(b"x" * 1001), "all of a long secret counts"
