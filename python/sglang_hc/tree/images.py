"""Images in paths: ids of 31 bits that say which image stands there.

SGLang's ids of an image have 62 bits of a digest. A path has instead, in the place of an image,

    seed = blake2b(seed of the image before, content, place, text), 150 of its bits
    ids  = 2**30 + 30 bits of the seed, then the next 30, over and over

and no vocabulary has such ids. Five of them in a row, a *window*, are the whole seed, so blocks,
their identities and whoever compares them need not know of images. Each block with tokens of an
image has a window of it, or continues one that has. Where fewer than five tokens of an image fit
into its first block, text beside it is hashed into the seed, and has ids of the seed as well.

Pure: no I/O.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tree.identity import TOKEN_BYTES, pack_tokens

FIRST_ID = 1 << 30
"""Ids from here on stand for images."""

WINDOW = 5
"""Tokens whose ids are a whole seed."""

_SEED_BYTES = WINDOW * TOKEN_BYTES
_HIGH = FIRST_ID >> 24
"""Of a packed id that stands for an image, the least first byte."""


class Image(NamedTuple):
    """Tokens [start, stop) of a path stand for an image. content: all that their state depends on
    beside the tokens before: a digest of 16 bytes or more, or more than that."""

    start: int
    stop: int
    content: bytes


class Mark(NamedTuple):
    """Ids of the tokens from `start` on; the first WINDOW of them are the window."""

    start: int
    ids: array[int]


class Marks:
    """What a path has in the place of its images."""

    def __init__(self, tokens: Sequence[int], images: Sequence[Image]) -> None:
        """tokens: of the path, with any ids in the place of images. images: in their order.

        Raises ValueError for other ids outside [0, FIRST_ID), and for an image that is empty, or
        does not lie with its window in the path and behind the one before.
        """
        text = array("q", tokens)
        end = 0
        for image in images:
            if not end <= image.start < image.stop <= len(text):
                raise ValueError("images must lie one behind the other in their path")
            end = image.stop
            text[image.start : end] = array("q", bytes(8 * (end - image.start)))
        if text and not 0 <= min(text) <= max(text) < FIRST_ID:
            raise ValueError("ids of text must lie in [0, 2**30)")
        self._marks: list[Mark] = []
        seed = b""
        for image in images:
            begin, end = _span(image)
            if end > len(text):
                raise ValueError("a path ends too soon behind an image")
            place = struct.pack(">4q", begin, *image[:2], end)
            told = seed + place + pack_tokens(text[begin:end]) + image.content
            seed = hashlib.blake2b(told, digest_size=_SEED_BYTES, person=b"hc image").digest()
            window = [FIRST_ID | part % FIRST_ID for part in struct.unpack(f">{WINDOW}I", seed)]
            ids = array("q", window * (-(-(end - begin) // WINDOW)))
            self._marks.append(Mark(begin, ids[: end - begin]))
        self._last = array("q")

    def ids(self, tokens: array[int]) -> array[int]:
        """The ids of a path, given the first of its int64 tokens as SGLang has them. Not to be
        changed. Of one length they are always the same tokens."""
        if len(self._last) != len(tokens):
            found = tokens[:]
            for start, ids in self._marks:
                if start < len(found):
                    found[start : start + len(ids)] = ids[: len(found) - start]
            self._last = found
        return self._last

    def cut(self, tokens: int) -> int:
        """How many of so many leading tokens are known to be equal where their ids are: a window
        that ends behind them says less than a seed."""
        for start, _ in reversed(self._marks):
            if start < tokens < start + WINDOW:
                tokens = start
        return tokens


def _span(image: Image) -> tuple[int, int]:
    """Tokens that get ids of an image's seed, at least WINDOW of them in the first block."""
    first = image.start // BLOCK_TOKENS * BLOCK_TOKENS
    there = min(image.stop, first + BLOCK_TOKENS)
    begin = max(first, min(image.start, there - WINDOW))
    return begin, max(image.stop, begin + WINDOW)


def may_begin_with(block: bytes, tokens: bytes) -> bool:
    """Whether a block of packed ids may begin with these packed tokens. What stands in the place of
    an image, or beside it, may be any token."""
    if block.startswith(tokens):
        return True
    return len(tokens) <= len(block) and all(
        block[at] >= _HIGH or block[at : at + TOKEN_BYTES] == tokens[at : at + TOKEN_BYTES]
        for at in range(0, len(tokens), TOKEN_BYTES)
    )
