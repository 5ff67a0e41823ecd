"""Messages between the scheduler process and the I/O process, in msgpack.

The I/O process gets `Setup` once, as all of its standard input. Then it gets lists of requests
through one ZMQ pair, the last of them `Close`. It sends `Answers` until every identity on disk was
named, then `Ready`, and then `Answers`, at least one every HEARTBEAT_S. If it cannot open the disk,
it sends only `Refused`. Blocks do not travel in messages; they are in the shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sglang_hc.forms import BlockLayout
from sglang_hc.store.block_io import BlockDone, Erase, SlotRead, SlotWrite
from sglang_hc.store.disk import DirectorySpec, DiskStore, StoredModel, Upkeep
from sglang_hc.store.executor import Completion, Operation
from sglang_hc.store.host_memory import MemorySpec

HEARTBEAT_S = 0.25
IDS_PER_MESSAGE = 2048
"""Bounded so that one message costs the scheduler thread less than a millisecond."""
REQUESTS_PER_MESSAGE = 64
"""Most that are sent together: the first of them should not wait for long."""


@dataclass(frozen=True)
class DiskSpec:
    """The disk tier of one model; see `StoredModel` and `Upkeep`."""

    directories: tuple[DirectorySpec, ...]
    fingerprint: bytes
    label: str
    part: bytes
    ttl_s: float | None = None

    def open(self, layout: BlockLayout) -> DiskStore:
        """Raises DirectoryError with a message for users."""
        model = StoredModel.of(layout.chunks(), self.fingerprint, self.label, self.part)
        upkeep = Upkeep(self.ttl_s)
        return DiskStore.open(self.directories, model, upkeep)


class _Message(msgspec.Struct, array_like=True):
    pass


class Setup(_Message):
    """What the process needs to know. disk: None for scatters only."""

    memory: MemorySpec
    disk: DiskSpec | None


class Execute(_Message, tag=True):
    """See Executor.submit."""

    ticket: int
    operation: Operation


class Touch(_Message, tag=True):
    """Identities of a path that was used."""

    block_ids: list[bytes]


class Expect(_Message, tag=True):
    """See BlockIo.expect."""

    uses: dict[bytes, float | None]


class Close(_Message, tag=True):
    """Finish what was submitted, say so in a last `Answers`, and end."""


class Ready(_Message, tag=True):
    """Operations are taken from now on. capacity: blocks that fit on disk."""

    capacity: int


class Refused(_Message, tag=True):
    """The disk tier cannot be opened; `message` is for users. The process ends."""

    message: str


class Answers(_Message, tag=True):
    """What happened since the last message.

    changes: at most IDS_PER_MESSAGE identities of blocks that came or left by themselves, and
    whether they can be read now; a block that was stored and left again since is also in `blocks`.
    directories: how many may be asked now. counts: by how much the
    store's counters have grown.
    """

    scattered: list[Completion]
    blocks: list[BlockDone]
    changes: dict[bytes, bool]
    directories: int
    counts: dict[str, int]


DiskRequest = SlotWrite | SlotRead | Touch | Expect | Erase
Request = Execute | DiskRequest | Close
Reply = Ready | Refused | Answers

encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_requests = msgspec.msgpack.Decoder(list[Request]).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
