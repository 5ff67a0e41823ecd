"""The look at the waiting queue: what it tells the tiers, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_hc.policy.eviction import make_policy
from sglang_hc.policy.pins import Claims, SessionPins
from sglang_hc.queue.lookahead import QueueView, Waiting
from sglang_hc.queue.windows import LookAhead
from sglang_hc.store.disk_tier import DiskTier
from sglang_hc.tree.block_tree import BlockTree
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import pack_tokens
from support.no_blocks import NoBlocks

PINS = SessionPins(0, 0, 1.0)


class Below(NoBlocks):
    """BlockIo that only remembers what it is told."""

    capacity = 100

    def __init__(self) -> None:
        self.uses: dict[bytes, float | None] = {}
        self.told = 0

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        self.uses |= uses
        self.told += 1


def view(*, tell_disk: bool = True) -> tuple[QueueView, Below]:
    window: LookAhead[str] = LookAhead()
    host = HostTier(BlockTree(b"f" * 16), 100, make_policy("queue", window))
    below = Below()
    disk = DiskTier(below, host)
    claims = Claims(window, PINS) if tell_disk else None
    queue = QueueView(host, disk, window, (100, 100), "queue", claims)
    for _ in range(9):
        queue.finished("earlier", 2)
    return queue, below


def waiting(rid: str) -> Waiting:
    """Requests a1, a2 ... share their first block."""
    tokens = [ord(rid[0])] * 64 + [int(rid[1:])] * 64
    return Waiting(None, pack_tokens(tokens), 0)


def ids(rid: str) -> list[bytes]:
    return BlockTree(b"f" * 16).identities(None, waiting(rid).tokens)


def test_the_disk_is_told_what_changed_and_only_then() -> None:
    queue, below = view()
    queue.look(["a1", "a2", "b1"], waiting)
    shared, own = ids("a2")
    first, second, third = (below.uses[ids(rid)[1]] for rid in ("a1", "a2", "b1"))
    assert None not in (first, second, third)
    assert below.uses[shared] == first < second == below.uses[own] < third  # type: ignore[operator]
    queue.look(["a1", "a2", "b1"], waiting)
    assert below.told == 1
    queue.look(["a2", "b1"], waiting)
    assert below.uses[ids("a1")[1]] is None
    assert below.uses[shared] == second, "it is now needed by the next one"
    queue.left("a2")
    queue.left("b1")
    queue.look([], waiting)
    assert set(below.uses.values()) == {None}


def test_a_disk_that_evicts_by_age_is_told_nothing() -> None:
    queue, below = view(tell_disk=False)
    queue.look(["a1"], waiting)
    assert below.told == 0


class Gathering(NoBlocks):
    """BlockIo that has everything, and keeps what it is asked for to itself until it is told."""

    capacity = 100

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.begun: list[list[bytes]] = []

    def contains(self, block_ids: Sequence[bytes]) -> int:
        return len(block_ids)

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        self.asked.append(block_id)

    def flush(self) -> None:
        self.begun.append(self.asked.copy())


def test_reads_begin_at_once_and_together() -> None:
    """A forward pass may lie between them and the next poll."""
    below = Gathering()
    window: LookAhead[str] = LookAhead()
    host = HostTier(BlockTree(b"f" * 16), 100, make_policy("queue", window))
    queue = QueueView(host, DiskTier(below, host), window, (100, 100), "queue")
    queue.look(["a1"], waiting)
    assert below.begun == [ids("a1")]
    queue.arrived("b1", "b1", waiting)
    queue.ready("b1", waiting)  # its turn has come, and nobody looked at the queue since
    assert below.begun[1:] == [ids("a1") + ids("b1")]
