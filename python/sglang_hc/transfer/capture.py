"""Capture: what a running request computes becomes blocks of the host tier when the tree commits.

    tap        the forward pass leaves the hidden states of its rows in a static buffer
    stage      rows are filed into slots that the request owns, found by (request, position)
    commit     the radix tree keeps the tokens: slots become blocks, tail included
    drop       the request was aborted, retracted or rejected: its slots are free again

Positions are written once per life of a request; a position written again (a step that was
discarded) is overwritten, so the last writer wins. Rows before a request's first own position come
from the host tier itself; where it does not have them there is a hole, and the request's hidden
states are not kept (counted). KV has no holes: it is read from the device pool at commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout
from sglang_hc.store.executor import CopyRows, RowSpan
from sglang_hc.transfer.filing import Filing, Snapshots
from sglang_hc.tree.block_tree import BlockNode, PathMatch
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import TOKEN_BYTES


class Segment(NamedTuple):
    """`rows` rows of one forward pass: positions [position, position + rows) of a request."""

    rid: str
    position: int
    row: int
    rows: int


class DevicePool(Protocol):
    """The device's KV pool, as far as it is read."""

    def gather(
        self, layers: Sequence[int], slots: torch.Tensor, targets: list[torch.Tensor], at: int
    ) -> None:
        """Rows `slots` of each layer to rows [at, at + n) of targets[part][layer's index].

        targets: per part of a KV row a (layers, capacity, part bytes) uint8 tensor.
        """


@dataclass(eq=False)
class _Stage:
    """Slots a running request writes. Rows [start, end) of its sequence are in them."""

    namespace: str | None
    start: int
    end: int
    slots: dict[int, int] = field(default_factory=dict)


class Capture:
    """Stages of all running requests and their way into the host tier.

    Sequences are packed token ids (`tree.identity.pack_tokens`). Belongs to the scheduler thread.
    `counters` tells what was kept and why the rest was not.
    """

    def __init__(
        self,
        layout: BlockLayout,
        tier: HostTier,
        filing: Filing,
        hidden: Snapshots | None,
        kv: Snapshots | None,
        pool: DevicePool,
        clock: Callable[[], float],
    ) -> None:
        """`hidden` and `kv` are None when the layer plan has no such layers."""
        self._layout = layout
        self._tier = tier
        self._filing = filing
        self._hidden = hidden
        self._kv = kv
        self._pool = pool
        self._clock = clock
        self._stages: dict[str, _Stage | None] = {}
        self.counters: Counter[str] = Counter()
        self.on_ready: Callable[[BlockNode], None] = lambda node: None
        """Told of every block whose bytes are in place."""

    @property
    def needs_taps(self) -> bool:
        return self._hidden is not None

    def is_open(self, rid: str) -> bool:
        """The request was opened and not dropped since, whether or not it is being kept."""
        return rid in self._stages

    def open(self, rid: str, namespace: str | None, prefix: bytes) -> None:
        """A request starts to compute after `prefix`, whose state is on the device already.

        The first rows of a block that the prefix ends in are copied from the host tier.
        """
        self.drop(rid)
        self._stages[rid] = None
        start = len(prefix) // TOKEN_BYTES
        match = self._tier.tree.match(namespace, prefix)
        if match.tokens < start:
            self.counters["hole"] += 1
            return
        base = start % BLOCK_TOKENS
        stage = _Stage(namespace, start - base, start)
        if base:
            node = match.nodes[-1]
            self._tier.pin([node])  # making room must not take the block to be copied
            slot = self._new_slot()
            if slot is not None:
                self._copy(node, slot, base)
                stage.slots[start // BLOCK_TOKENS] = slot
            self._tier.unpin([node])
            if slot is None:
                return
        self._stages[rid] = stage

    def take(self, segments: Sequence[Segment], taps: torch.Tensor) -> None:
        """Stage the rows of one forward pass. `taps`: (hidden layers, rows, hidden_bytes) uint8.

        The rows are copied on the compute stream before this returns, so the next pass may
        overwrite them.
        """
        if self._hidden is None:
            return
        spans: list[RowSpan] = []
        last = 0
        for segment in segments:
            spans += self._place(segment)
            last = max(last, segment.row + segment.rows)
        if not spans:
            return
        if self._hidden.room < last:
            self._filing.poll()
        if self._hidden.room < last:
            self._refuse({segment.rid for segment in segments}, "backpressure")
            return

        def fill(targets: list[torch.Tensor], at: int, first: int, count: int) -> None:
            targets[0][:, at : at + count].copy_(taps[:, first : first + count])

        self._hidden.add(last, fill, spans)

    def commit(
        self, rid: str, namespace: str | None, tokens: bytes, slots: torch.Tensor, final: bool
    ) -> None:
        """The radix tree keeps `tokens` of this request: make their blocks, as far as missing.

        slots: (len(tokens),) int64 device slots of the sequence. final: the request is over; its
        stage is given up. Before that the tail block is kept as a copy, because the request goes
        on writing to its own.
        """
        length = len(tokens) // TOKEN_BYTES
        match = self._tier.tree.match(namespace, tokens)
        if match.tokens < length:
            self._tier.pin(match.nodes)  # making room must not take the path we extend
            self._publish(rid, namespace, match, tokens, slots, final)
            self._tier.unpin(match.nodes)
            match = self._tier.tree.match(namespace, tokens)
        self._tier.access(match.nodes, self._clock())
        if final:
            self.drop(rid)
        else:
            self._release_published(rid, match.tokens // BLOCK_TOKENS)

    def drop(self, rid: str) -> None:
        """Forget a request's stage; harmless for one that has none."""
        stage = self._stages.pop(rid, None)
        if stage is not None:
            self._discard(list(stage.slots.values()))

    def flush(self) -> None:
        """Send every staged row on its way."""
        for snapshots in (self._hidden, self._kv):
            if snapshots is not None:
                snapshots.flush()

    def give_up(self, rid: str) -> None:
        """Keep nothing more of a running request."""
        self._refuse({rid}, "given_up")

    def clear(self) -> None:
        """Forget every stage and every block. Waits for what is being filed."""
        for rid in list(self._stages):
            self.drop(rid)
        self.flush()
        self._filing.drain()
        self._tier.clear()

    def staged_slots(self) -> int:
        """Slots owned by running requests."""
        return len(self._staged())

    def _staged(self) -> set[int]:
        stages = [stage for stage in self._stages.values() if stage is not None]
        return {slot for stage in stages for slot in stage.slots.values()}

    def _place(self, segment: Segment) -> list[RowSpan]:
        """Where the rows go; gives the request the slots it needs. Empty: it is not kept."""
        stage = self._stages.get(segment.rid)
        if stage is None:
            return []
        if not stage.start <= segment.position <= stage.end:
            self._refuse({segment.rid}, "gap")
            return []
        spans = []
        position, row = segment.position, segment.row
        stop = segment.position + segment.rows
        while position < stop:
            block, offset = divmod(position, BLOCK_TOKENS)
            slot = stage.slots.get(block)
            if slot is None:
                slot = self._new_slot()
                if slot is None:
                    self._refuse({segment.rid}, "host_full")
                    return []
                stage.slots[block] = slot
            count = min(BLOCK_TOKENS - offset, stop - position)
            spans.append(RowSpan(row, slot, offset, count))
            position += count
            row += count
        stage.end = stop
        return spans

    def _publish(
        self,
        rid: str,
        namespace: str | None,
        known: PathMatch,
        tokens: bytes,
        device_slots: torch.Tensor,
        final: bool,
    ) -> None:
        first_block = known.tokens // BLOCK_TOKENS
        length = len(tokens) // TOKEN_BYTES
        stage = self._stages.get(rid)
        if self._hidden is not None and (stage is None or stage.end < length):
            self.counters["not_staged_tokens"] += length - first_block * BLOCK_TOKENS
            return
        blocks: list[tuple[int, int]] = []  # (block, slot), before anything is published
        for block in range(first_block, -(-length // BLOCK_TOKENS)):
            slot = self._slot_for(stage, block, min((block + 1) * BLOCK_TOKENS, length), final)
            if slot is None:
                break
            blocks.append((block, slot))
        if self._kv is not None and blocks:
            blocks = self._gather_kv(blocks, device_slots, length)
        self.flush()
        # Looked up only now: an empty namespace's root goes when making room empties it.
        parent = known.nodes[first_block - 1] if first_block else self._tier.tree.root(namespace)
        for block, slot in blocks:
            low = block * BLOCK_TOKENS
            high = min(low + BLOCK_TOKENS, length)
            piece = tokens[low * TOKEN_BYTES : high * TOKEN_BYTES]
            outcome = self._tier.publish(parent, piece, slot, self._clock())
            parent = outcome.node
            if stage is not None and stage.slots.get(block) == slot:
                del stage.slots[block]
            if not outcome.created:
                self._discard([slot])
                continue
            self.counters["kept_tokens"] += high - low
            self._when_filed(slot, parent)

    def _slot_for(self, stage: _Stage | None, block: int, high: int, final: bool) -> int | None:
        """A staged slot with this block's hidden rows, ready to be published; None: no such."""
        if self._hidden is None:
            return self._new_slot()
        assert stage is not None
        own = stage.slots.get(block)
        if own is None or stage.start > block * BLOCK_TOKENS:
            self.counters["hole"] += 1
            return None
        if final or high == (block + 1) * BLOCK_TOKENS:
            return own
        copy = self._new_slot()
        if copy is not None:
            self._hidden.flush()  # the rows must be on their way before the copy is
            self._filing.submit(CopyRows(own, copy, high - block * BLOCK_TOKENS))
        return copy

    def _gather_kv(
        self, blocks: list[tuple[int, int]], device_slots: torch.Tensor, length: int
    ) -> list[tuple[int, int]]:
        """Send the KV rows of `blocks` on their way; returns the blocks there was room for."""
        assert self._kv is not None
        self._filing.poll()
        fitting = blocks[: self._kv.room // BLOCK_TOKENS]
        if len(fitting) < len(blocks):
            self.counters["backpressure"] += 1
            staged = self._staged()
            self._discard([slot for _, slot in blocks[len(fitting) :] if slot not in staged])
        if not fitting:
            return []
        low = fitting[0][0] * BLOCK_TOKENS
        high = min((fitting[-1][0] + 1) * BLOCK_TOKENS, length)
        spans = [
            RowSpan(i * BLOCK_TOKENS, slot, 0, min(BLOCK_TOKENS, high - block * BLOCK_TOKENS))
            for i, (block, slot) in enumerate(fitting)
        ]
        layers = self._layout.plan.kv_layers

        def fill(targets: list[torch.Tensor], at: int, first: int, count: int) -> None:
            wanted = device_slots[low + first : low + first + count]
            self._pool.gather(layers, wanted, targets, at)

        self._kv.add(high - low, fill, spans)
        return fitting

    def _when_filed(self, slot: int, node: BlockNode) -> None:
        """Serve the block once everything submitted so far, its rows included, is in place.

        Until then it is pinned: a slot that rows are on their way to must get no new owner. Another
        filing would come after them, but a read from disk would not.
        """
        filed = self._filing.last()
        self._tier.pin([node])

        def settle() -> None:
            self._tier.unpin([node])
            if node.parent is None or node.slot != slot:  # left the tier meanwhile
                return
            if slot in self._filing.bad_slots:
                self.counters["file_failed"] += 1
                self._tier.drop_branch(node)
            else:
                self._tier.mark_ready(node)
                self.on_ready(node)

        if filed.done:
            settle()
        else:
            filed.on_done.append(settle)

    def _release_published(self, rid: str, full_blocks: int) -> None:
        """Slots of blocks that the tree has by now, from this request or another."""
        stage = self._stages.get(rid)
        if stage is None:
            return
        done = [block for block in stage.slots if block < full_blocks]
        self._discard([stage.slots.pop(block) for block in done])
        stage.start = max(stage.start, full_blocks * BLOCK_TOKENS)

    def _copy(self, source: BlockNode, target: int, rows: int) -> None:
        self._tier.pin([source])
        filed = self._filing.submit(CopyRows(source.slot, target, rows))
        filed.on_done.append(lambda: self._tier.unpin([source]))

    def _new_slot(self) -> int | None:
        slot = self._tier.stage(self._clock())
        if slot is not None:
            self._filing.bad_slots.discard(slot)
        return slot

    def _refuse(self, rids: set[str], reason: str) -> None:
        for rid in rids:
            if self._stages.get(rid) is not None:
                self.counters[reason] += 1
                self.drop(rid)
                self._stages[rid] = None

    def _discard(self, slots: list[int]) -> None:
        """Free staged slots once nothing is on its way to them any more."""
        if not slots:
            return
        if self._hidden is not None:
            self._hidden.flush()

        def unstage() -> None:
            for slot in slots:
                self._tier.unstage(slot)

        filed = self._filing.last()
        if filed.done:
            unstage()
        else:
            filed.on_done.append(unstage)


__all__ = ["Capture", "DevicePool", "Segment"]
