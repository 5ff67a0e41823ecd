"""The envelope around a block's bytes in a remote store: docs/remote.md, repeated and checked.

Never change the magic, VERSION's place in the header, or the meaning of a version once released.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct

import numpy as np
import xxhash

from sglang_hc.forms import CHUNK_ALIGN
from sglang_hc.store.host_pool import Bytes

VERSION = 1
MAGIC = b"SGHCREMO"  # never change
HEADER_BYTES = CHUNK_ALIGN
"""One page, so that a block's bytes stay as aligned as the frame that holds the envelope."""

DIGEST_BYTES = 16
MAC_BYTES = 32
_HEAD = struct.Struct("<8sHHI16s16sQQ16s")
_NO_MAC = bytes(MAC_BYTES)
_DIGEST_PREFIX = struct.Struct("<16s16sQ")


class Verdict(enum.Enum):
    """What a received envelope is. Only INTACT may be served."""

    INTACT = "intact"
    DAMAGED = "damaged"
    FORGED = "forged"  # whole, but its writer did not have the key
    FOREIGN = "foreign"  # intact, but another block's, another model's or another plan's
    UNKNOWN_VERSION = "unknown_version"


def storage_key(fingerprint: bytes, identity: bytes) -> str:
    """Name of a block in a remote store: format version, model and plan, block."""
    return f"hc{VERSION}-{fingerprint.hex()}-{identity.hex()}"


def fingerprint_of_part(fingerprint: bytes, part: str) -> bytes:
    """What stands for the fingerprint where a store has only a part of each block: ranks write each
    its own, and neither another rank nor a server with other ranks reads it.

    part: which part of how many (`srt.replicas.Place.part`); empty for whole blocks.
    """
    if not part:
        return fingerprint
    key = fingerprint + part.encode()
    return hashlib.blake2b(key, digest_size=16, person=b"hc part").digest()


def fingerprint_of_key(fingerprint: bytes, key: bytes | None) -> bytes:
    """What stands for the fingerprint among those who have this key (`mac_key`): nobody else knows
    the names of their blocks."""
    if key is None:
        return fingerprint
    return hashlib.blake2b(fingerprint, digest_size=16, key=key, person=b"hc names").digest()


def mac_key(secret: bytes) -> bytes:
    """32 bytes of key that follow from a secret of any length."""
    return hashlib.blake2b(secret, digest_size=32, person=b"hc remote key").digest()


def seal(
    frame: Bytes, fingerprint: bytes, identity: bytes, created: int, key: bytes | None = None
) -> None:
    """Write the header of the block whose bytes follow it in `frame`, shape (envelope bytes,).

    created: microseconds since 1970, for people. key: of the MAC; None for none.
    """
    payload = frame[HEADER_BYTES:]
    digest = _payload_digest(fingerprint, identity, payload)
    fields = (MAGIC, VERSION, 1, 0, identity, fingerprint, len(payload), created, digest)
    head = _HEAD.pack(*fields)
    body = (head + _mac(head, payload, key)).ljust(HEADER_BYTES - DIGEST_BYTES, b"\0")
    frame[:HEADER_BYTES] = np.frombuffer(body + xxhash.xxh3_128_digest(body), dtype=np.uint8)


def inspect(
    header: Bytes, payload: Bytes, fingerprint: bytes, identity: bytes, key: bytes | None = None
) -> Verdict:
    """Whether `header` and `payload` are the envelope and the bytes of the block asked for.

    header: shape (HEADER_BYTES,). payload: all bytes that are about to be served, wherever they
    lie; the check covers each of them. key: as in `seal`.
    """
    page = header.tobytes()
    magic, version, _, _, named, model, length, _, digest = _HEAD.unpack_from(page)
    if magic != MAGIC:
        return Verdict.DAMAGED
    if version != VERSION:
        return Verdict.UNKNOWN_VERSION
    if xxhash.xxh3_128_digest(page[:-DIGEST_BYTES]) != page[-DIGEST_BYTES:]:
        return Verdict.DAMAGED
    if (named, model, length) != (identity, fingerprint, len(payload)):
        return Verdict.FOREIGN
    if _payload_digest(fingerprint, identity, payload) != digest:
        return Verdict.DAMAGED
    head, mac = page[: _HEAD.size], page[_HEAD.size : _HEAD.size + MAC_BYTES]
    if not hmac.compare_digest(mac, _mac(head, payload, key)):
        return Verdict.FORGED
    return Verdict.INTACT


def _mac(head: bytes, payload: Bytes, key: bytes | None) -> bytes:
    """Of the header up to the MAC and all of the block's bytes; zeros without a key."""
    if key is None:
        return _NO_MAC
    state = hashlib.blake2b(head, digest_size=MAC_BYTES, key=key, person=b"hc envelope")
    state.update(payload.data)
    return state.digest()


def _payload_digest(fingerprint: bytes, identity: bytes, payload: Bytes) -> bytes:
    state = xxhash.xxh3_128(_DIGEST_PREFIX.pack(identity, fingerprint, len(payload)))
    state.update(payload.data)
    return state.digest()
