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


class Frames:
    """Page-aligned memory for envelopes on their way: one part for loads, one for saves.

    A back end touches nothing but frames, so it may register them once with its transport, and one
    that hangs or writes late cannot spoil a slot that has another owner by then.

    bytes: shape (frames, envelope bytes) uint8.
    """

    def __init__(self, header_bytes: int, block_bytes: int) -> None:
        """Sizes of a block's header and of the block; whole pages both."""
        self._header_bytes = header_bytes
        size = header_bytes + block_bytes
        each = min(MOST_FRAMES, max(1, FRAME_BYTES // size))
        self.for_loads = range(each)
        self.for_saves = range(each, 2 * each)
        self.buffer = mmap.mmap(-1, 2 * each * size)
        self.buffer.madvise(mmap.MADV_DONTDUMP)  # as the host tier, whose bytes pass here
        self.bytes: Bytes = np.frombuffer(self.buffer, dtype=np.uint8).reshape(2 * each, size)

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

    One thread calls `exists`, `delete` and `clear`, one `get`, one `put`. They may take their time,
    raise, or lie: nothing they answer is believed without the envelope's checks.
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
