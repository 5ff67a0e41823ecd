"""Block identity: a keyed chain hash over everything a block's state depends on.

    root(namespace)  = blake2b(namespace, key = fingerprint)
    block(i)         = blake2b(parent || tokens(i), key = fingerprint)

The fingerprint covers model, weights, dtype, layer plan and layout
(`forms.BlockLayout.fingerprint`); the namespace is SGLang's extra_key (cache salt, LoRA id). A
block's hash therefore covers all token ids up to its end. Token ids are hashed as big-endian int32,
the byte order the tree sorts by.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4
BLOCK_ID_BYTES = 16


def pack_tokens(tokens: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Token ids as big-endian int32, so that byte order is token order.

    Raises OverflowError for an id outside [0, 2**31).
    """
    wide = np.asarray(tokens, dtype=np.int64)
    if int(wide.view(np.uint64).max(initial=0)) >= 1 << 31:  # as unsigned, negative is large
        raise OverflowError("token ids must lie in [0, 2**31)")
    return wide.astype(">i4").tobytes()


def unpack_tokens(packed: bytes) -> npt.NDArray[np.int64]:
    """Token ids of packed tokens."""
    return np.frombuffer(packed, dtype=">i4").astype(np.int64)


def root_id(fingerprint: bytes, namespace: str | None) -> bytes:
    """Identity of a namespace's root. None and the empty string are different namespaces."""
    text = b"none" if namespace is None else b"some" + namespace.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=BLOCK_ID_BYTES, key=fingerprint).digest()


def block_id(fingerprint: bytes, parent: bytes, tokens: bytes) -> bytes:
    """Identity of the block that holds `tokens` (packed) below `parent`."""
    return hashlib.blake2b(parent + tokens, digest_size=BLOCK_ID_BYTES, key=fingerprint).digest()
