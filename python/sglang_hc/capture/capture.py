"""Capture: what a running request computes becomes blocks of the host tier when the tree commits.

    tap        the forward pass leaves the hidden states of its rows in a static buffer
    stage      rows are scattered into slots that the request owns, found by (request, position)
    commit     the radix tree keeps the tokens: slots become blocks, the partial last one too
    drop       the request was aborted, retracted or rejected: its slots are free again

A request writes each position once. If SGLang discards a step and computes a position again, the
last write wins. The rows before a request's first own position come from the host tier. If the host
tier does not have them there is a hole, and the request's hidden states are not kept (counted). KV
has no holes, because it is read from the device pool at commit.

What cannot be kept is cut from the end: a request keeps its rows up to the first one that found no
place (counted with the reason), and whole blocks of them are published.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from sglang_hc.capture.direct import DirectRows
from sglang_hc.capture.ends import EndRows, EndSaver, places_of
from sglang_hc.capture.saving import DeviceState, PassRows, kv_rows
from sglang_hc.capture.verified import Held
from sglang_hc.device.gather_scatter import word
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout
from sglang_hc.queue.requests import Serial
from sglang_hc.store.executor import CopyRows, RowSpan
from sglang_hc.store.scatter_queue import ScatterQueue
from sglang_hc.tree.block_tree import BlockNode, PathMatch
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import TOKEN_BYTES, Prefix


class Segment(NamedTuple):
    """`rows` rows of one forward pass: positions [position, position + rows) of a request."""

    request: Serial
    position: int
    row: int
    rows: int


@dataclass(eq=False)
class _Stage:
    """Slots a running request writes. Rows [start, end) of its sequence are in them.

    cut: rows after `end` were not taken, so no later rows are taken either. missed: tokens up to
    this position were already counted as kept or as not kept.
    """

    start: int
    end: int
    slots: dict[int, int] = field(default_factory=dict)
    cut: bool = False
    missed: int = 0


class Capture:
    """Stages of all running requests and their way into the host tier.

    Sequences are packed token ids (`tree.identity.pack_tokens`). Belongs to the scheduler thread.
    `counters` tells what was kept and why the rest was not.
    """

    def __init__(
        self,
        layout: BlockLayout,
        tier: HostTier,
        scatters: ScatterQueue,
        device: DeviceState,
        on_ready: Callable[[BlockNode], None],
        clock: Callable[[], float] = time.monotonic,
        ends: EndSaver | None = None,
    ) -> None:
        """on_ready: told of every block whose bytes are in place. ends: None where all layers have
        full attention."""
        self._layout = layout
        self._tier = tier
        self.scatters = scatters
        self.taps = device.taps
        self._verified = device.verified
        self.hidden = device.hidden
        self.kv = device.kv
        self._pool = device.pool
        self._on_ready = on_ready
        self._clock = clock
        self._ends = ends
        self._stages: dict[Serial, _Stage] = {}
        self.counters: Counter[str] = Counter()

    def is_open(self, request: Serial) -> bool:
        """Whether the request was opened and not dropped since. It need not be kept."""
        return request in self._stages

    def open(self, request: Serial, prefix: Prefix) -> None:
        """A request starts to compute behind `prefix`, whose state is on the device already.

        If the prefix ends inside a block, the rows of that block are copied from the host tier.
        """
        self.drop(request)
        start = prefix.num_tokens
        base = start % BLOCK_TOKENS
        stage = self._stages[request] = _Stage(start - base, start, cut=True)
        match = self._tier.tree.match(prefix)
        if match.tokens < start:
            self.counters["hole"] += 1
            stage.end = 0
            return
        if base:
            above = match.nodes[-1:]
            self._tier.pin(above)  # making room must not take the block to be copied
            slot = self._new_slot()
            if slot is None:
                self._tier.unpin(above)
                self.counters["host_full"] += 1
                stage.end = 0
                return
            stage.slots[start // BLOCK_TOKENS] = slot
            copied = self.scatters.submit(CopyRows(above[0].slot, slot, base))
            copied.then(lambda: self._tier.unpin(above))
        stage.cut = False

    def take_pass(self, segments: Sequence[Segment]) -> None:
        """Stage what the taps hold of a forward pass, whose rows `segments` are in order. A longer
        pass leaves its first rows in the taps."""
        if self.taps is not None and segments:
            rows = segments[-1].row + segments[-1].rows
            self.take(segments, self.taps.bytes(min(rows, self.taps.rows)))

    def take(self, segments: Sequence[Segment], taps: torch.Tensor) -> None:
        """Stage the rows of one forward pass. `taps`: (hidden layers, rows, hidden_bytes) uint8,
        the first rows of the pass; the pass may have had more.

        Rows are taken in the order of the pass; those at the end that do not fit are left out. The
        copies are on the compute stream before this returns, so the next pass may overwrite the
        rows.
        """
        if self.hidden is None:
            return

        def fill(targets: list[torch.Tensor], at: int, first: int, count: int) -> None:
            target, source = targets[0][:, at : at + count], taps[:, first : first + count]
            wide = word(target, source)
            target.view(wide).copy_(source.view(wide))

        if self.hidden.snapshots.room < taps.shape[1]:
            self.scatters.poll()  # some snapshots may be free again
        rows = PassRows(self.hidden, fill)
        for segment in segments:
            stage = self._stages.get(segment.request)
            if stage is not None:
                self._take_segment(stage, segment, rows, taps.shape[1])
        rows.end()

    def _take_segment(self, stage: _Stage, segment: Segment, rows: PassRows, tapped: int) -> None:
        if not stage.start <= segment.position <= stage.end:
            stage.end = min(stage.end, segment.position)  # the rows behind it are out of date
            self._cut(stage, "gap")
            return
        rewritten = segment.position < stage.end
        stage.cut = False
        count = min(segment.rows, max(0, tapped - segment.row))
        if count < segment.rows:
            self._cut(stage, "tap_overflow")
        room = rows.room(count, rewritten)
        if room < count:
            self._cut(stage, "backpressure")
        spans = self._place(stage, segment.position, segment.row, room)
        rows.add(segment.row, count, spans, rewritten)

    def hold(self, path: torch.Tensor, rows: int) -> None:
        """A verify pass was submitted: see `VerifiedRows.hold`."""
        if self._verified is not None:
            self._verified.hold(path, rows)

    def take_held(self) -> Held | None:
        """What was held of the last verify pass, once; None without hidden layers."""
        return None if self._verified is None else self._verified.take()

    def commit(
        self,
        request: Serial,
        kept: Prefix,
        slots: torch.Tensor,
        final: bool,
        end: EndRows | None = None,
    ) -> None:
        """The radix tree keeps `kept` of this request: make the blocks that the host tier lacks.

        slots: (tokens,) int64 device slots of what is kept. final: the request is over, and its
        stage ends. Until then the partial last block is kept as a copy, because the request goes on
        writing to its own slot. end: what is needed to go on behind some of its blocks; None where
        all layers have full attention.
        """
        if self._layout.ends is not None:  # nobody can go on inside a block
            kept = kept.up_to(kept.num_tokens // BLOCK_TOKENS)
        match = self._tier.tree.match(kept)
        known = match.branches_at(kept)
        if match.tokens < kept.num_tokens:
            self._tier.pin(match.nodes)  # making room must not take the path we extend
            try:
                self._publish(request, kept, match, slots, final)
            finally:
                self._tier.unpin(match.nodes)
            match = self._tier.tree.match(kept)
        self._tier.access(match.nodes, self._clock())
        if end is not None and self._ends is not None:
            whole = match.nodes[: match.tokens // BLOCK_TOKENS]
            places = places_of(end, kept.num_tokens, known, final)
            self._ends.save(whole, end, places, self.counters)
        if final:
            self.drop(request)
        else:
            self._release_published(request, match.tokens // BLOCK_TOKENS)

    def drop(self, request: Serial) -> None:
        """Forget a request's stage; harmless for one that has none."""
        stage = self._stages.pop(request, None)
        if stage is not None:
            self._discard(list(stage.slots.values()))

    def flush(self) -> None:
        """Have every staged row scattered."""
        if self.hidden is not None:
            self.hidden.snapshots.flush()

    def drop_all(self) -> None:
        """Forget every stage. Waits until every row is in its slot."""
        for request in list(self._stages):
            self.drop(request)
        self.flush()
        self.scatters.drain()

    def staged_slots(self) -> int:
        """Slots owned by running requests."""
        return len({slot for stage in self._stages.values() for slot in stage.slots.values()})

    def _place(self, stage: _Stage, position: int, row: int, rows: int) -> list[RowSpan]:
        """Places for rows [row, row + rows) of a pass, which belong to positions from `position`
        on. Gives the request the slots it needs; when no slot is left, the rest is cut off."""
        spans = []
        stop = position + rows
        while position < stop:
            block, offset = divmod(position, BLOCK_TOKENS)
            slot = stage.slots.get(block)
            if slot is None:
                slot = self._new_slot()
                if slot is None:
                    self._cut(stage, "host_full")
                    break
                stage.slots[block] = slot
            count = min(BLOCK_TOKENS - offset, stop - position)
            spans.append(RowSpan(row, slot, offset, count))
            position += count
            row += count
        stage.end = position
        return spans

    def _publish(
        self,
        request: Serial,
        kept: Prefix,
        known: PathMatch,
        device_slots: torch.Tensor,
        final: bool,
    ) -> None:
        first_block = known.tokens // BLOCK_TOKENS
        stage = self._stages.get(request)
        length = self._staged_length(stage, kept.num_tokens, known.tokens)
        blocks: list[tuple[int, int]] = []  # (block, slot), before anything is published
        created: list[BlockNode] = []
        try:
            for block in range(first_block, -(-length // BLOCK_TOKENS)):
                slot = self._slot_for(stage, block, min((block + 1) * BLOCK_TOKENS, length), final)
                if slot is None:
                    break
                blocks.append((block, slot))
            if self.kv is not None and blocks:
                self._gather_kv(self.kv, blocks, device_slots, length)
            self.flush()
            # Looked up only now: an empty namespace's root goes when making room empties it.
            above = known.nodes[first_block - 1] if first_block else None
            parent = above or self._tier.tree.root(kept.namespace)
            for block, slot in blocks:
                rows = min(BLOCK_TOKENS, length - block * BLOCK_TOKENS)
                piece = kept.block(block)[: rows * TOKEN_BYTES]
                outcome = self._tier.publish(parent, piece, slot, self._clock())
                parent = outcome.node
                if stage is not None and stage.slots.get(block) == slot:
                    del stage.slots[block]
                if outcome.created:
                    self.counters["kept_tokens"] += rows
                    created.append(parent)
        finally:  # after an error as well: rows may be on their way
            self._when_scattered(created)
            left = {slot for _, slot in blocks} - {*(stage.slots.values() if stage else ())}
            self._discard([slot for slot in left if self._tier.is_staged(slot)])

    def _staged_length(self, stage: _Stage | None, length: int, known: int) -> int:
        """How many of the first `length` tokens can be published: all of them, or the whole blocks
        of those that are staged. Counts the others once. The tree has the first `known` tokens."""
        if self.hidden is None or (stage is not None and stage.end >= length):
            return length
        end = stage.end // BLOCK_TOKENS * BLOCK_TOKENS if stage is not None else 0
        counted = max(end, known, stage.missed if stage is not None else 0)
        self.counters["not_staged_tokens"] += max(0, length - counted)
        if stage is not None:
            stage.missed = max(stage.missed, length)
        return end

    def _slot_for(self, stage: _Stage | None, block: int, high: int, final: bool) -> int | None:
        """A slot with this block's hidden rows that can be published; None when there is none."""
        if self.hidden is None:
            return self._new_slot()
        assert stage is not None
        own = stage.slots.get(block)
        if own is None or stage.start > block * BLOCK_TOKENS:
            self.counters["hole"] += 1
            return None
        if final or high == (block + 1) * BLOCK_TOKENS:
            return own
        self.flush()  # the rows must be on their way before the copy is
        copy = self._new_slot()
        if copy is not None:
            self.scatters.submit(CopyRows(own, copy, high - block * BLOCK_TOKENS))
        return copy

    def _gather_kv(
        self, kv: DirectRows, blocks: list[tuple[int, int]], device_slots: torch.Tensor, length: int
    ) -> None:
        """Save the KV rows of consecutive `blocks`."""
        low = blocks[0][0] * BLOCK_TOKENS
        rows = min((blocks[-1][0] + 1) * BLOCK_TOKENS, length) - low
        spans = [
            RowSpan(i * BLOCK_TOKENS, slot, 0, min(BLOCK_TOKENS, rows - i * BLOCK_TOKENS))
            for i, (_, slot) in enumerate(blocks)
        ]
        kv.add(0, rows, kv_rows(self._pool, self._layout, device_slots, low, rows), spans)

    def _when_scattered(self, nodes: Sequence[BlockNode]) -> None:
        """Serve blocks of one path once everything submitted so far, their rows included, is in
        place.

        They are pinned until then, because a slot must not get a new owner while rows are on their
        way to it. A later scatter would wait for them, but a read from disk would not. All are in
        the tree before: one whose rows failed already leaves at once, with those behind it.
        """
        self._tier.pin(nodes)
        for node in nodes:
            self.scatters.last().then(partial(self._scattered, node.slot, node))

    def _scattered(self, slot: int, node: BlockNode) -> None:
        self._tier.unpin([node])
        if node.parent is None or node.slot != slot:  # left the tier meanwhile
            return
        if slot in self._tier.damaged_slots:
            self.counters["scatter_failed"] += 1
            self._tier.drop_branch(node)
        else:
            self._tier.mark_ready(node)
            self._on_ready(node)

    def _release_published(self, request: Serial, full_blocks: int) -> None:
        """Free the slots of blocks that the tree has by now, from this request or another one."""
        stage = self._stages.get(request)
        if stage is None:
            return
        done = [block for block in stage.slots if block < full_blocks]
        self._discard([stage.slots.pop(block) for block in done])
        stage.start = max(stage.start, full_blocks * BLOCK_TOKENS)

    def _new_slot(self) -> int | None:
        return self._tier.stage(self._clock())

    def _cut(self, stage: _Stage, reason: str) -> None:
        """Keep nothing behind the end of this stage. Counted once, with the first reason."""
        if not stage.cut:
            self.counters[reason] += 1
        stage.cut = True

    def _discard(self, slots: list[int]) -> None:
        """Free staged slots once no rows are on their way to them."""
        if not slots:
            return
        self.flush()

        def unstage() -> None:
            for slot in slots:
                self._tier.unstage(slot)

        self.scatters.last().then(unstage)
