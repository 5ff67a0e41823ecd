"""State behind a cut: what it is called, and where it was before the cut.

A prompt that was cut keeps `tokens[:head] + tokens[head + dropped:]`. With `--hc-overflow reembed`
what earlier turns stored of these tokens is used at its new positions (AttentionStore section 3.4).
Such state depends on the tokens that were dropped, so it must never be served to a prompt that
merely equals the cut one. It lives in a namespace of its own, which names the cut and everything up
to its end, as a part beside the client's own (`tree.namespaces`):

    HEAD/DROPPED/blake2b128(tokens[:head + dropped])

Block j of the cut path was block j + (dropped - less) / BLOCK_TOKENS when only `less` tokens had
been dropped; the head's blocks stay where they were. Pure: no I/O.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tree.identity import (
    BLOCK_ID_BYTES,
    TOKEN_BYTES,
    BlockPath,
    Prefix,
    block_ids,
    root_id,
)
from sglang_hc.tree.namespaces import Namespace


def cut_namespace(base: str | None, head: int, dropped: int, before: bytes) -> str:
    """Namespace of the path that is left after a cut.

    base: the namespace of the whole prompt. before: the packed tokens up to the end of the cut,
    `head + dropped` of them.
    """
    assert len(before) == (head + dropped) * TOKEN_BYTES
    digest = hashlib.blake2b(before, digest_size=BLOCK_ID_BYTES).hexdigest()
    packed = Namespace.of(base)._replace(cut=f"{head}/{dropped}/{digest}").pack()
    assert packed is not None
    return packed


def base_namespace(namespace: str | None) -> str | None:
    """The namespace of a path without its cut, if it has one, whichever weights made it."""
    return Namespace.of(namespace)._replace(cut=None, weights=None).pack()


@dataclass(frozen=True)
class EarlierCuts:
    """What a request's prompt was cut to in earlier turns, as far as the model's window reaches.

    head, dropped: the present cut, in tokens. cuts: (dropped tokens, namespace) of the earlier
    ones, the latest first; the whole prompt, of which 0 were dropped, is the last. left_out: packed
    tokens of the prompt from the end of the earliest cut within the window to the end of the
    present one. Of a prompt that was whole longer ago only the head is still of use.
    """

    head: int
    dropped: int
    cuts: tuple[tuple[int, str | None], ...]
    left_out: bytes

    def paths(self, fingerprint: bytes, tokens: bytes) -> tuple[EarlierPath, ...]:
        """Where the blocks of the cut prompt, packed `tokens`, were before; latest first."""
        head, rest = tokens[: self.head * TOKEN_BYTES], tokens[self.head * TOKEN_BYTES :]
        found = []
        for dropped, namespace in self.cuts:
            shift = self.dropped - dropped
            before = len(self.left_out) - shift * TOKEN_BYTES
            path = head + self.left_out[before:] + rest if before >= 0 else head
            ids = block_ids(fingerprint, root_id(fingerprint, namespace), path)
            block_path = BlockPath(Prefix(namespace, path), ids)
            found.append(EarlierPath(block_path, self.head // BLOCK_TOKENS, shift))
        return tuple(found)


class EarlierPath(NamedTuple):
    """One path that had the blocks of a cut prompt at other places.

    head: blocks that are at their place. shift: tokens by which the others were further from the
    start.
    """

    path: BlockPath
    head: int
    shift: int

    def place(self, block: int) -> int:
        """Where the block of the cut prompt was on this path."""
        return block if block < self.head else block + self.shift // BLOCK_TOKENS

    def shift_of(self, block: int) -> int:
        """Tokens by which the block was further from the start."""
        return 0 if block < self.head else self.shift
