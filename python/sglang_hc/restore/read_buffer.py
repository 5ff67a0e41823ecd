"""The read buffer: what the next requests need, copied to the device before their turn.

A restoration begins when its request is admitted. Its first layers then wait for their copies, and
the device has no work to do beside them (AttentionStore section 3.2.1). So the chunks of the first
waiting requests are copied earlier, while other batches run:

    copied     pieces of consecutive blocks of one layer, layers in the model's order, into frames
               of the buffer; their blocks are pinned until the copy is over
    taken      by the restore pass of the request, which reads them from the frame
    dropped    when the request has left the queue without them, or the tiers are cleared

Chunks are found by the identity of their blocks, and by where these were computed: every request
that needs the same blocks can use them, and outdated ones are not found. Nothing else changes on
the device: before the request's turn no slot is allocated and no tree is touched.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from sglang_hc.device.copy_stream import CopyStream, Event
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout
from sglang_hc.policy.copy_order import early_bytes
from sglang_hc.policy.cost_model import CostModel
from sglang_hc.queue.requests import Serial, Waiting
from sglang_hc.ranks.agreement import ALONE, Ranks
from sglang_hc.restore.staging import (
    HostSpan,
    LayerSource,
    StagingRing,
    carve,
    copy_piece,
    cut,
)
from sglang_hc.store.host_pool import HostPool
from sglang_hc.tree.block_tree import BlockNode, Moved
from sglang_hc.tree.host_tier import HostTier

FRAME_BYTES = 8 << 20
"""Bytes of a frame: 1,024 hidden states of a 7B model, enough rows for an efficient projection."""

PIECES_PER_PASS = 8
"""Most copies enqueued in one scheduling pass: a restoration that begins after it waits on the link
for no more than these."""


def frames_for(
    size: int, layout: BlockLayout, device: torch.device, copy_stream: CopyStream
) -> StagingRing:
    """Frames of a read buffer of about `size` bytes: at least one, of at least one block."""
    row = max(layout.shape.hidden_bytes, layout.shape.kv_bytes)
    frame_bytes = max(min(FRAME_BYTES, size), BLOCK_TOKENS * row)
    return StagingRing(max(1, size // frame_bytes), frame_bytes, device, copy_stream)


class Early(NamedTuple):
    """Rows of tokens [start, stop) of a path in one layer that are on the device, or soon will be.

    parts: (stop - start, row bytes) uint8, one per part of the layer's form; valid after `event`.
    `done` gives their frame back. Call it when all compute work that reads them is submitted.
    """

    start: int
    stop: int
    parts: list[torch.Tensor]
    event: Event
    done: Callable[[], None]


_Key = tuple[bytes, Moved | None]
"""A block's identity, and how its state was moved: a block that was computed at its place may have
followed one of its identity that was moved there."""


@dataclass(eq=False)
class _Copied:
    """Whole chunks of consecutive blocks of one layer, in a frame."""

    owner: Serial
    layer: int
    keys: tuple[_Key, ...]
    parts: list[torch.Tensor]
    frame: torch.Tensor
    event: Event


class ReadBuffer:
    """Frames of one size, filled for the requests that are next. Belongs to the scheduler thread.

    `counters`: early_layer_tokens copied, early_used_layer_tokens of them read by a restoration.
    """

    def __init__(
        self,
        host: HostTier,
        pool: HostPool,
        frames: StagingRing,
        cost: CostModel | None = None,
        fetching: Callable[[Serial], bool] = lambda request: False,
        ranks: Ranks = ALONE,
    ) -> None:
        """cost: `early_bytes` bounds by it how much is copied for a request; None for no bound.
        fetching: whether blocks that a request needs are still on their way to the host tier."""
        self._layout = pool.layout
        self._host = host
        self._source = LayerSource(pool)
        self._copy_stream = frames.copy_stream
        self._frames = frames
        self._cost = cost
        self._fetching = fetching
        self._ranks = ranks
        self._to_copy: dict[Serial, Iterator[tuple[int, Sequence[BlockNode]]]] = {}
        self._copied: dict[int, dict[_Key, tuple[_Copied, int]]] = {}
        """By layer and block: the piece that holds it, and its place among the piece's blocks."""
        self._pinned: deque[tuple[Event, Sequence[BlockNode]]] = deque()
        self.counters: Counter[str] = Counter()

    def on_schedule_step(
        self, queue: Sequence[Serial], look_at: Callable[[Serial], Waiting]
    ) -> None:
        """Copy chunks of the waiting requests, the next one first, while frames are free. Once per
        pass."""
        if self._to_copy:
            waiting = set(queue)
            for request in [one for one in self._to_copy if one not in waiting]:
                self.drop(request)
        room = PIECES_PER_PASS
        for request in queue:
            if not room or not self._frames.has_free:
                return
            if request not in self._to_copy:
                if self._fetching(request):
                    continue
                self._to_copy[request] = self._copies_for(look_at(request))
            for layer, nodes in self._to_copy[request]:
                self._copy(request, layer, nodes)
                room -= 1
                if not room or not self._frames.has_free:
                    return

    def take(
        self, layer: int, nodes: Sequence[BlockNode], start: int, stop: int
    ) -> Iterator[Early]:
        """Take out the parts of tokens [start, stop) of a path in a layer, in order."""
        known = self._copied.get(layer)
        position = start
        while known and position < stop:
            block = position // BLOCK_TOKENS
            copied, index = known.get(_key(nodes[block]), (None, 0))
            if copied is None:
                position = (block + 1) * BLOCK_TOKENS
                continue
            self._forget(copied)
            last = block + 1
            for key in copied.keys[index + 1 :]:
                if last == len(nodes) or _key(nodes[last]) != key:
                    break
                last += 1
            end = min(last * BLOCK_TOKENS, stop)
            first = (index - block) * BLOCK_TOKENS + position
            parts = [part[first : first + end - position] for part in copied.parts]
            self.counters["early_used_layer_tokens"] += end - position
            yield Early(
                position, end, parts, copied.event, partial(self._frames.give_back, copied.frame)
            )
            position = end

    def drop(self, request: Serial) -> None:
        """The request does not wait any more: free the frames that hold its chunks."""
        if self._to_copy.pop(request, None) is None:
            return
        for known in list(self._copied.values()):
            for copied in {id(c): c for c, _ in known.values() if c.owner == request}.values():
                self._forget(copied)
                self._frames.give_back_unread(copied.frame)

    def poll(self) -> None:
        """Unpin the blocks whose copies are over. Never waits."""
        while self._pinned and self._pinned[0][0].done():
            self._host.unpin(self._pinned.popleft()[1])

    def clear(self) -> None:
        """Forget everything; waits for copies under way."""
        for request in list(self._to_copy):
            self.drop(request)
        while self._pinned:
            self._pinned[0][0].wait()
            self.poll()

    @property
    def held(self) -> int:
        """Frames with chunks that no restoration has taken yet."""
        return len({id(c) for known in self._copied.values() for c, _ in known.values()})

    def check_integrity(self) -> None:
        """Raise AssertionError if a chunk is found under another layer or block than its own."""
        for layer, known in self._copied.items():
            for key, (copied, index) in known.items():
                assert copied.layer == layer and copied.keys[index] == key
                assert copied.owner in self._to_copy

    def _copies_for(self, waiting: Waiting) -> Iterator[tuple[int, Sequence[BlockNode]]]:
        """(layer, consecutive blocks) to copy for a request. Ends if one of its blocks leaves."""
        prompt, on_device = waiting.prompt, waiting.on_device()
        match = self._host.tree.match(prompt).ready
        nodes = match.nodes[on_device // BLOCK_TOKENS :]
        left = self._worth(len(nodes), match.tokens - on_device, on_device, prompt.num_tokens)
        for layer in self._layout.stored_layers:
            blocks = self._frames.rows(sum(self._source.widths(layer))) // BLOCK_TOKENS
            for first in range(0, len(nodes), blocks):
                group = nodes[first : first + blocks]
                if left <= 0 or not all(node.ready for node in group):
                    return
                left -= len(group) * BLOCK_TOKENS * sum(self._source.widths(layer))
                known = self._copied.get(layer, {})
                if not any(_key(node) in known for node in group):
                    yield layer, group

    def _worth(self, blocks: int, history: int, context: int, length: int) -> int:
        """Bytes worth copying early, of a history of `history` tokens in `blocks` blocks."""
        size = blocks * self._layout.slot_bytes
        if self._cost is None or history <= 0:
            return size if history > 0 else 0
        new = max(1, length - context - history)
        plan = self._layout.plan
        return early_bytes(self._cost, plan, size, history=history, context=context, new=new)

    def _copy(self, request: Serial, layer: int, nodes: Sequence[BlockNode]) -> None:
        rows = len(nodes) * BLOCK_TOKENS
        frame = self._frames.take()
        parts = carve(frame, rows, self._source.widths(layer))
        (piece,) = cut([HostSpan(node.slot, 0, BLOCK_TOKENS) for node in nodes], rows)
        for source, target in zip(self._source.parts(layer), parts, strict=True):
            copy_piece(self._copy_stream, piece, source, target)
        event = self._copy_stream.record()
        self._host.pin(nodes)
        self._pinned.append((self._ranks.mark(event), nodes))
        keys = tuple(map(_key, nodes))
        copied = _Copied(request, layer, keys, parts, frame, event)
        known = self._copied.setdefault(layer, {})
        for index, key in enumerate(keys):
            known[key] = copied, index
        self.counters["early_layer_tokens"] += rows

    def _forget(self, copied: _Copied) -> None:
        known = self._copied[copied.layer]
        for key in copied.keys:
            del known[key]


def _key(node: BlockNode) -> _Key:
    return node.block_id, node.moved
