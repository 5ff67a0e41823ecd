"""What a trace of a server holds: its version, and token ids made unreadable.

A trace is a file of JSON lines (docs/trace-format.md). `transfer.recording` writes it, the
simulator replays it. It must show which prompts share how many tokens, and nothing else of them.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np

TRACE_VERSION = 1

TOKEN_LIMIT = 1 << 30
"""Token ids from here on cannot be made unreadable; no vocabulary comes near."""

_WORD = 1 << 64
_TOKEN_BITS = 30


class Pseudonyms:
    """Token ids shifted by a secret number that depends on all tokens before them.

    Two sequences agree in as many leading ids after as before, and where they part the smaller id
    stays the smaller one: a radix tree over pseudonyms has the shape of the tree over tokens. The
    secret is drawn anew for each trace and kept nowhere.
    """

    def __init__(self, block_tokens: int) -> None:
        base = secrets.randbits(64) | 1
        self._key = secrets.token_bytes(16)
        back = pow(base, -1, _WORD)
        self._powers = _powers(base, block_tokens + 1)
        self._inverse = _powers(back, block_tokens + 1)

    def start(self, namespace: str | None) -> int:
        """State before the first token of a namespace's sequences."""
        text = b"none" if namespace is None else b"some" + namespace.encode("utf-8", "replace")
        return int.from_bytes(
            hashlib.blake2b(text, digest_size=8, key=self._key).digest(), "little"
        )

    def block(self, state: int, tokens: bytes) -> tuple[bytes, int]:
        """Pseudonyms of one packed block, packed, and the state behind it.

        Raises OverflowError for an id from TOKEN_LIMIT on.
        """
        ids = np.frombuffer(tokens, dtype=">i4").astype(np.uint64)
        if int(ids.max(initial=0)) >= TOKEN_LIMIT:
            raise OverflowError(f"token ids from {TOKEN_LIMIT} on cannot be recorded")
        count = len(ids)
        sums = np.zeros(count + 1, dtype=np.uint64)
        np.cumsum((ids + np.uint64(1)) * self._inverse[1 : count + 1], out=sums[1:])
        states = (np.uint64(state) + sums) * self._powers[: count + 1]  # modulo 2**64
        shifts = _mixed(states[:count]) >> np.uint64(64 - _TOKEN_BITS)
        return (ids + shifts).astype(">i4").tobytes(), int(states[count])


def _powers(base: int, count: int) -> np.ndarray:
    return np.array([pow(base, i, _WORD) for i in range(count)], dtype=np.uint64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Every bit of the output depends on every bit of the input (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))
