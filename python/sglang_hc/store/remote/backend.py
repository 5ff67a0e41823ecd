"""What this package asks of a remote store, and the memory it moves blocks through."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sglang_hc.store.host_pool import Bytes

FRAME_BYTES = 64 << 20
"""Memory for envelopes on their way, per direction."""

MOST_FRAMES = 16
"""Most envelopes per call of a back end."""

CALLS = 4
"""Gets, and puts, that may be under way at a time in a back end that allows it."""


class Frames:
    """Page-aligned memory for envelopes on their way: one part for loads, one for saves.

    A back end touches nothing but frames, so it may register them once with its transport, and one
    that hangs or writes late cannot spoil a slot that has another owner by then.

    bytes: shape (frames, envelope bytes) uint8. for_loads, for_saves: the frames of each call that
    may be under way, all of one size.
    """

    def __init__(self, header_bytes: int, block_bytes: int, calls: int = 1) -> None:
        """Sizes of a block's header and of the block; whole pages both. calls: loads, and saves,
        that may be under way at a time; fewer where memory is short."""
        self._header_bytes = header_bytes
        size = header_bytes + block_bytes
        room = max(1, FRAME_BYTES // size)
        self.call_frames = each = min(MOST_FRAMES, -(-room // calls))
        calls = min(calls, room // each)
        parts = [range(first, first + each) for first in range(0, 2 * calls * each, each)]
        self.for_loads, self.for_saves = parts[:calls], parts[calls:]
        frames = 2 * calls * each
        self.buffer = mmap.mmap(-1, frames * size)
        self.buffer.madvise(mmap.MADV_DONTDUMP)  # as the host tier, whose bytes pass here
        self.bytes: Bytes = np.frombuffer(self.buffer, dtype=np.uint8).reshape(frames, size)

    def header(self, frame: int) -> Bytes:
        """Shape (header bytes,)."""
        part: Bytes = self.bytes[frame, : self._header_bytes]
        return part

    def payload(self, frame: int) -> Bytes:
        """Shape (block bytes,)."""
        part: Bytes = self.bytes[frame, self._header_bytes :]
        return part


class RemoteBackend(Protocol):
    """A store somewhere else that keeps envelopes under keys.

    One thread calls `exists`, `delete` and `clear`; `get`, and `put`, as many as the frames have
    calls. They may take their time, raise, or lie: nothing they answer is believed without the
    envelope's checks.
    """

    @property
    def name(self) -> str:
        """For people, such as `MooncakeStore`."""

    def exists(self, keys: Sequence[str]) -> int:
        """How many of the first keys are there without a gap."""

    def get(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
        """Read one envelope per key into one frame each; one answer per key."""

    def put(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
        """Store one frame per key; true where the key is there afterwards, whoever stored it."""

    def delete(self, keys: Sequence[str]) -> bool:
        """Remove these; False where the store can remove no single key."""

    def clear(self) -> None:
        """Remove everything. Raises where the store did not."""

    def close(self) -> None: ...
