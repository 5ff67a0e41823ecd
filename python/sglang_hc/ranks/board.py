"""Votes of the ranks of one node, and what each of them counted, in memory that all of them map.

A rank says how its part of an operation ended by one word, which the others read when they want to:
no message, no lock, and nobody is held up. Several nodes share no memory; they are refused at the
start.
"""

from __future__ import annotations

import enum
import mmap
import os
import secrets
import struct
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from sglang_hc.store.outcome import Outcome

PLACES = 1 << 16
"""Operations of a kind, from the oldest that is not decided on, that may be under way."""

_TOKEN_BYTES = 16
"""In front of the votes, by which the memory is recognised."""

REPORT_BYTES = 1 << 16
"""Room for what one rank counted. A longer report is not shown."""

_REPORT = struct.Struct("<II")
"""Length and CRC-32 of a report, in front of it: whoever reads a half of it notices."""

_WORD_BYTES = 8
_LAPS = 16
_CODES: dict[Outcome, int] = {outcome: code for code, outcome in enumerate(Outcome, 1)}
_OUTCOMES = {code: outcome for outcome, code in _CODES.items()}


class Kind(enum.IntEnum):
    """Operations that are counted on their own."""

    SCATTER = 0
    BLOCK = 1
    BLOCK_LOOKUP = 2
    REMOTE = 3
    LOOKUP = 4
    END = 5
    END_LOOKUP = 6
    REMOTE_END = 7
    REMOTE_END_LOOKUP = 8


class Vote(NamedTuple):
    """How one rank's part of an operation ended.

    value: less than 2 ** 56. Of a look-up: how many of the first identities are there. Of a read:
    the microseconds that it took, 0 where that is not known.
    """

    outcome: Outcome
    value: int = 0


class CompletionBoard:
    """One word of 64 bits for each rank, kind and operation: the outcome, the lap in which the
    operation uses its place, and the value. 0: no vote yet. A word is written by one store.

    A place is used again after PLACES operations. Whoever votes there has seen the last one decided
    (`PendingOps`), so a vote of the lap before counts as none and nothing is ever wiped.
    """

    def __init__(self, descriptor: int, rank: int, ranks: int) -> None:
        """descriptor: of a memory file of `size` bytes; it stays open. Raises OSError."""
        self.rank, self.ranks = rank, ranks
        self._descriptor = descriptor
        self._memory = memoryview(mmap.mmap(descriptor, self.size(ranks)))
        self._reports = self._memory[-ranks * REPORT_BYTES :]
        votes = self._memory[_TOKEN_BYTES : -ranks * REPORT_BYTES].cast("Q")
        self._votes = [
            [votes[(kind * ranks + of) * PLACES :][:PLACES] for of in range(ranks)] for kind in Kind
        ]

    @classmethod
    def create(cls, ranks: int) -> CompletionBoard:
        """The board of rank 0, which the others attach to. Raises OSError."""
        descriptor = os.memfd_create("sglang-hc-ranks", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, cls.size(ranks))
        os.pwrite(descriptor, secrets.token_bytes(_TOKEN_BYTES), 0)
        return cls(descriptor, 0, ranks)

    @classmethod
    def attach(cls, name: str, rank: int, ranks: int) -> CompletionBoard:
        """The board of another rank, by rank 0's `name`, while rank 0 runs. Raises OSError, also
        when the name stands for something else here: then rank 0 is on another node."""
        path, _, token = name.partition(" ")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(descriptor, _TOKEN_BYTES, 0).hex() != token:
            os.close(descriptor)
            raise OSError(f"{path} is not the board of rank 0")
        return cls(descriptor, rank, ranks)

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes; the system gives a page when it is first written."""
        return _TOKEN_BYTES + ranks * (len(Kind) * PLACES * _WORD_BYTES + REPORT_BYTES)

    @property
    def name(self) -> str:
        """By which processes of the same user on this node find the memory. It is in no folder and
        goes with its last user."""
        token = bytes(self._memory[:_TOKEN_BYTES])
        return f"/proc/{os.getpid()}/fd/{self._descriptor} {token.hex()}"

    def vote(self, kind: Kind, number: int, vote: Vote) -> None:
        """How this rank's part of an operation ended."""
        lap, place = divmod(number, PLACES)
        word = vote.value << 8 | (lap % _LAPS) << 4 | _CODES[vote.outcome]
        self._votes[kind][self.rank][place] = word

    def vote_of(self, kind: Kind, number: int, rank: int) -> Vote | None:
        """How this rank's part ended; None while it has not said so."""
        lap, place = divmod(number, PLACES)
        word = self._votes[kind][rank][place]
        if not word or (word >> 4) % _LAPS != lap % _LAPS:
            return None
        return Vote(_OUTCOMES[word & 15], word >> 8)

    def votes(self, kind: Kind, number: int) -> list[Vote] | None:
        """How all ranks' parts ended, by rank; None while one of them has not said so."""
        found = []
        for rank in range(self.ranks):
            vote = self.vote_of(kind, number, rank)
            if vote is None:
                return None
            found.append(vote)
        return found

    def report(self, counts: Mapping[str, int]) -> None:
        """Show the other ranks what this one has counted."""
        text = msgspec.json.encode(dict(counts))
        if _REPORT.size + len(text) <= REPORT_BYTES:
            entry = _REPORT.pack(len(text), zlib.crc32(text)) + text
            self._reports[self.rank * REPORT_BYTES :][: len(entry)] = entry

    def reports(self) -> list[dict[str, int]]:
        """What each rank showed last, by rank; nothing of one that is about to show more."""
        found = []
        for rank in range(self.ranks):
            entry = bytes(self._reports[rank * REPORT_BYTES :][:REPORT_BYTES])
            length, digest = _REPORT.unpack_from(entry)
            text = entry[_REPORT.size : _REPORT.size + length]
            whole = length and zlib.crc32(text) == digest
            found.append(msgspec.json.decode(text, type=dict[str, int]) if whole else {})
        return found
