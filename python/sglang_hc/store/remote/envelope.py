"""The envelope around a block's bytes in a remote store: docs/remote.md, repeated and checked.

Never change the magic, VERSION's place in the header, or the meaning of a version once released.
"""

from __future__ import annotations

import enum
import hashlib
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
_HEAD = struct.Struct("<8sHHI16s16sQQ16s")
_DIGEST_PREFIX = struct.Struct("<16s16sQ")


class Verdict(enum.Enum):
    """What a received envelope is. Only INTACT may be served."""

    INTACT = "intact"
    DAMAGED = "damaged"
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


def seal(frame: Bytes, fingerprint: bytes, identity: bytes, created: int) -> None:
    """Write the header of the block whose bytes follow it in `frame`, shape (envelope bytes,).

    created: microseconds since 1970, for people.
    """
    payload = frame[HEADER_BYTES:]
    digest = _payload_digest(fingerprint, identity, payload)
    fields = (MAGIC, VERSION, 1, 0, identity, fingerprint, len(payload), created, digest)
    body = _HEAD.pack(*fields).ljust(HEADER_BYTES - DIGEST_BYTES, b"\0")
    frame[:HEADER_BYTES] = np.frombuffer(body + xxhash.xxh3_128_digest(body), dtype=np.uint8)


def inspect(header: Bytes, payload: Bytes, fingerprint: bytes, identity: bytes) -> Verdict:
    """Whether `header` and `payload` are the envelope and the bytes of the block asked for.

    header: shape (HEADER_BYTES,). payload: all bytes that are about to be served, wherever they
    lie; the check covers each of them.
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
    return Verdict.INTACT


def _payload_digest(fingerprint: bytes, identity: bytes, payload: Bytes) -> bytes:
    state = xxhash.xxh3_128(_DIGEST_PREFIX.pack(identity, fingerprint, len(payload)))
    state.update(payload.data)
    return state.digest()
