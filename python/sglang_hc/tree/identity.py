"""Block identity: a keyed chain hash over everything a block's state depends on.

    root(namespace)  = blake2b(namespace, key = fingerprint)
    block(i)         = blake2b(parent || tokens(i), key = fingerprint)

The fingerprint covers model, weights, dtype, layer plan and layout
(`forms.BlockLayout.fingerprint`); the namespace says whose they are (`tree.namespaces`). A
block's hash therefore covers all token ids up to its end. Token ids are hashed as big-endian int32,
the byte order the tree sorts by.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_hc.forms import BLOCK_TOKENS

TOKEN_BYTES = 4
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
BLOCK_ID_BYTES = 16

FEW = 1024
"""Up to so many tokens are packed without numpy."""

OUT_OF_RANGE = "token ids must lie in [0, 2**31)"


class Prefix(NamedTuple):
    """A sequence from its first token on: packed token ids, in a namespace."""

    namespace: str | None
    tokens: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def block(self, index: int) -> bytes:
        """Packed tokens of one block; fewer than BLOCK_TOKENS at the end of the sequence."""
        return self.tokens[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]

    def up_to(self, block: int) -> Prefix:
        """The part before this block."""
        return Prefix(self.namespace, self.tokens[: block * BLOCK_BYTES])


class BlockPath(NamedTuple):
    """A prefix whose whole blocks have names. block_ids: their identities."""

    prefix: Prefix
    block_ids: Sequence[bytes]


def pack_tokens(tokens: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Token ids as big-endian int32, so that byte order is token order.

    Raises OverflowError for an id outside [0, 2**31).
    """
    if len(tokens) <= FEW:
        return _pack_few(tokens)
    wide = np.asarray(tokens, dtype=np.int64)
    if int(wide.view(np.uint64).max(initial=0)) >= 1 << 31:  # as unsigned, negative is large
        raise OverflowError(OUT_OF_RANGE)
    return wide.astype(">i4").tobytes()


def _pack_few(tokens: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """The same without numpy, whose first call after other work waits for memory many times."""
    wide = array("q", tokens)
    if sys.byteorder == "little":
        wide.byteswap()
    halves = memoryview(wide).cast("B").cast("i")
    packed = halves[1::2].tobytes()
    if halves[::2].tobytes().strip(b"\0") or not packed[::TOKEN_BYTES].isascii():
        raise OverflowError(OUT_OF_RANGE)  # a high half is not 0, or a low half is negative
    return packed


def unpack_tokens(packed: bytes) -> npt.NDArray[np.int64]:
    """Token ids of packed tokens."""
    return np.frombuffer(packed, dtype=">i4").astype(np.int64)


def root_id(fingerprint: bytes, namespace: str | None) -> bytes:
    """Identity of a namespace's root. None and the empty string are different namespaces."""
    text = b"none" if namespace is None else b"some" + namespace.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=BLOCK_ID_BYTES, key=fingerprint).digest()


def block_id(fingerprint: bytes, parent: bytes, tokens: bytes) -> bytes:
    """Identity of the block that holds `tokens` (packed) below `parent`."""
    state = _keyed(fingerprint).copy()
    state.update(parent + tokens)
    return state.digest()


def block_ids(fingerprint: bytes, parent: bytes, tokens: bytes) -> list[bytes]:
    """Identities of the whole blocks of packed `tokens`, one below the other, below `parent`."""
    fresh, size = _keyed(fingerprint).copy, BLOCK_BYTES
    found = []
    for end in range(size, len(tokens) + 1, size):
        state = fresh()
        state.update(parent + tokens[end - size : end])
        parent = state.digest()
        found.append(parent)
    return found


@lru_cache(maxsize=16)
def _keyed(fingerprint: bytes) -> hashlib.blake2b:
    """The state of a hash that has taken in its key; copied, because that is the dearer half."""
    return hashlib.blake2b(digest_size=BLOCK_ID_BYTES, key=fingerprint)
