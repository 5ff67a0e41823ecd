"""Recording a server's run (`--hc-trace`): what its tiers were told, and what they decided.

The host tier and the look-ahead window of a recorded server are the subclasses below. Each call
from outside becomes an event: its input, and as its outcome the blocks that left. `replay` of the
simulator makes the same calls on its own objects and compares the outcomes.

The scheduler thread only appends to a bounded queue. A writer thread makes token ids unreadable
(`trace.Pseudonyms`) and writes JSON lines. What it cannot keep up with is left out and counted, and
the file says where.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_hc.policy.eviction import EvictionPolicy, IsProtected
from sglang_hc.policy.pins import SessionPins, TimeToLive
from sglang_hc.queue.lookahead import LookAhead, QueueChange
from sglang_hc.queue.requests import Serial
from sglang_hc.tiers.trace import TraceWriter
from sglang_hc.tree.block_tree import BlockNode, BlockTree, Insertion
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import Prefix

QUEUE_EVENTS = 200_000
"""Events that may wait to be written; beyond it they are left out and counted."""


class Recorder:
    """The queue between the scheduler thread, which calls everything here, and the writer."""

    def __init__(
        self,
        path: Path,
        header: Mapping[str, object],
        fingerprint: bytes,
        limit: int = QUEUE_EVENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises FileExistsError or another OSError when the file cannot be made."""
        self._writer = TraceWriter(path, header, fingerprint)
        self._limit = limit
        self._lost = 0
        self._clock = clock
        self._started = clock()
        self._matched: dict[Serial, dict[str, int]] = {}
        self._passed: set[Serial] = set()
        self.events = 0
        self.dropped = 0

    def note(self, op: str, **fields: Any) -> None:
        """One event; what its fields may be is said in `TraceWriter`. They must not change
        afterwards."""
        if len(self._writer.queue) >= self._limit or self._writer.failed:
            self._lost += 1
            self.dropped += 1
            return
        if self._lost:
            self._writer.queue.append(("lost", {"events": self._lost}))
            self._lost = 0
        self._writer.queue.append((op, fields))
        self.events += 1

    def now(self) -> float:
        """Seconds since the start, as events have them."""
        return round(self._clock() - self._started, 4)

    def watch(self, pins: SessionPins) -> None:
        """Note which blocks sessions begin and cease to pin."""
        pins.subscribe(
            lambda block_id: self.note("hold", block=block_id, on=pins.is_pinned(block_id))
        )

    # Requests

    def arrived(self, request: Serial, prompt: Prefix) -> None:
        """A request with this prompt was queued, or queued again."""
        self.note("arrive", t=self.now(), req=request, path=prompt)

    def matched(self, request: Serial, limit: int, on_device: int, hit: int) -> None:
        """The first `limit` tokens were looked up: `hit` in the tiers beyond those on the device.

        Becomes an event when the request is admitted before it is looked up again.
        """
        self._matched[request] = {"limit": limit, "device": on_device, "hit": hit}

    def passed_over(self, request: Serial) -> None:
        """The request could have been admitted, but its state is still on the way."""
        if request not in self._passed:
            self._passed.add(request)
            self.note("passed", t=self.now(), req=request)

    def admitted(self, request: Serial, restored: int, from_disk: int) -> None:
        """The request is in a batch; `restored` tokens of its hit come back from the tiers."""
        match = self._matched.pop(request, None)
        self._passed.discard(request)
        if match is not None:
            done = {"restored": restored, "disk": from_disk}
            self.note("admit", t=self.now(), req=request, **match, **done)

    def gone(self, request: Serial) -> None:
        """The request left the queue without being admitted."""
        self._matched.pop(request, None)
        self._passed.discard(request)
        self.note("gone", t=self.now(), req=request)

    def finished(self, request: Serial, computed: Prefix) -> None:
        """The request is over; `computed` is what was computed of prompt and answer."""
        self._matched.pop(request, None)
        self.note("finish", t=self.now(), req=request, path=computed)

    def stats(self) -> dict[str, object]:
        """Plain numbers for /server_info and the metrics."""
        return {"trace_events": self.events, "trace_dropped": self.dropped}

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._limit += 2  # room for the last words
        self.note("end", t=self.now())
        self._writer.close()


class RecordingHostTier(HostTier):
    """A host tier that records every call from outside and the slots that lost their block.

    A slot names the block in it: no two blocks share one.
    """

    def __init__(
        self,
        recorder: Recorder,
        tree: BlockTree,
        num_slots: int,
        policy: EvictionPolicy[BlockNode],
        ttl: TimeToLive[BlockNode] | None = None,
    ) -> None:
        super().__init__(tree, num_slots, policy, ttl)
        self.recorder = recorder
        self._gone: list[int] | None = None

    def stage(self, now: float, is_protected: IsProtected[BlockNode] | None = None) -> int | None:
        protected: list[int] = []
        with self._call() as gone:
            slot = super().stage(now, _noting(is_protected, protected))
        if gone is not None:
            self.recorder.note("stage", slot=slot, gone=gone, spared=protected)
        return slot

    def unstage(self, slot: int) -> None:
        super().unstage(slot)
        self.recorder.note("unstage", slot=slot)

    def publish(
        self,
        parent: BlockNode,
        tokens: bytes,
        slot: int,
        now: float,
        identity: bytes | None = None,
    ) -> Insertion:
        under = parent.slot
        with self._call() as gone:
            outcome = super().publish(parent, tokens, slot, now, identity)
        assert gone is not None
        block = parent.namespace, parent.block_id, tokens
        created = outcome.created
        self.recorder.note(
            "publish", slot=slot, under=under, block=block, created=created, gone=gone
        )
        return outcome

    def mark_ready(self, node: BlockNode) -> None:
        super().mark_ready(node)
        self.recorder.note("ready", slot=node.slot)

    def access(self, path: Sequence[BlockNode], now: float) -> None:
        super().access(path, now)
        self.recorder.note("access", slots=[node.slot for node in path])

    def pin(self, nodes: Iterable[BlockNode]) -> None:
        nodes = list(nodes)
        super().pin(nodes)
        self.recorder.note("pin", slots=[node.slot for node in nodes])

    def unpin(self, nodes: Iterable[BlockNode]) -> None:
        nodes = list(nodes)
        slots = [node.slot for node in nodes]  # a block that has left loses its slot with its pin
        super().unpin(nodes)
        self.recorder.note("unpin", slots=slots)

    def evict(
        self, count: int, now: float, is_protected: IsProtected[BlockNode] | None = None
    ) -> int:
        protected: list[int] = []
        with self._call() as gone:
            freed = super().evict(count, now, _noting(is_protected, protected))
        if gone is not None:
            self.recorder.note("evict", count=count, gone=gone, spared=protected)
        return freed

    def drop(self, node: BlockNode) -> None:
        slot = node.slot
        with self._call() as gone:
            super().drop(node)
        if gone is not None:
            self.recorder.note("drop", slot=slot)

    def clear(self) -> None:
        with self._call():
            super().clear()
        self.recorder.note("clear")

    def _retire(self, node: BlockNode) -> None:
        if self._gone is not None:
            self._gone.append(node.slot)
        super()._retire(node)

    @contextmanager
    def _call(self) -> Iterator[list[int] | None]:
        """Slots that lost their block during the call; None for a call from within another."""
        if self._gone is not None:
            yield None
            return
        self._gone = []
        try:
            yield self._gone
        finally:
            self._gone = None


class RecordingLookAhead(LookAhead[Serial]):
    """A look-ahead window that records each change."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def update(
        self, queue: Sequence[Serial], length: int, blocks_of: Callable[[Serial], Sequence[bytes]]
    ) -> QueueChange[Serial]:
        before = self.order
        change = super().update(queue, length, blocks_of)
        order = self.order
        if change.entered or order != before:
            needs = {request: self.requests[request].needs or () for request in change.entered}
            self.recorder.note("look", t=self.recorder.now(), order=order, needs=needs)
        return change

    def leave(self, request: Serial) -> None:
        if request in self:
            self.recorder.note("discard", req=request)
        super().leave(request)


def _noting(
    is_protected: IsProtected[BlockNode] | None, protected: list[int]
) -> IsProtected[BlockNode] | None:
    """`is_protected`, with the slots of the blocks it protects noted."""
    if is_protected is None:
        return None

    def asked(node: BlockNode) -> bool:
        answer = is_protected(node)
        if answer:
            protected.append(node.slot)
        return answer

    return asked
