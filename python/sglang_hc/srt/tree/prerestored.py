"""Blocks on the device before the pass of the request that needs them.

A block gets device slots of its own and is written to them between two passes: when it has come
and the rest of its request's history is still on the way, or when it is in host memory and its
request waits for its turn (the read buffer of AttentionStore section 3.2.1, in free slots of the KV
pool). Until the request is loaded these slots belong to no request and to no node of the device
tree. SGLang sees them as evictable: when it needs the room it gets them back, and what they held is
restored in the request's pass, like everything else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from sglang_hc.device.copy_stream import Event
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.meeting import Meeting
from sglang_hc.queue.requests import Serial
from sglang_hc.restore.path import Restoration
from sglang_hc.restore.restorer import Restorer
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.tree.block_tree import BlockNode

Slots = Mapping[int, torch.Tensor]
"""Block of a prompt: its (BLOCK_TOKENS,) int64 device slots, which hold its K and V."""


@dataclass(eq=False, slots=True)
class _Held:
    """What one request has on the device. slots: of its blocks by number. nodes: what was written
    there. meeting: through which blocks come that have not joined the tree. unproven: these blocks,
    whose bytes count only if they keep their place until they are copied. todo: blocks of the tree
    that it still lacks while it waits; None until that was looked up."""

    slots: dict[int, torch.Tensor] = field(default_factory=dict)
    nodes: dict[int, BlockNode] = field(default_factory=dict)
    meeting: Meeting | None = None
    unproven: set[int] = field(default_factory=set)
    todo: list[tuple[int, BlockNode]] | None = None

    @property
    def lost(self) -> list[int]:
        """Unproven blocks that are not where they were written to any more."""
        return [n for n in self.unproven if self.meeting is None or not self.meeting.has(n)]


class PrerestoredBlocks:
    """The device slots of blocks that came before their request's pass. Belongs to the scheduler
    thread."""

    def __init__(self, allocator: Any, restorer: Restorer, compute: ComputeStream) -> None:
        """allocator: SGLang's, of device slots."""
        self._allocator = allocator
        self._restorer = restorer
        self._compute = compute
        self._held: dict[Serial, _Held] = {}
        self._copied: Event | None = None
        """Behind the copies of the last restoration."""

    @property
    def tokens(self) -> int:
        """Device slots in use."""
        return sum(map(self.tokens_of, self._held))

    def tokens_of(self, request: Serial) -> int:
        """Those of one request."""
        held = self._held.get(request)
        return 0 if held is None else BLOCK_TOKENS * len(held.slots)

    @property
    def requests(self) -> Collection[Serial]:
        """Who was looked at since it has come, or has something here."""
        return self._held.keys()

    def of(self, request: Serial) -> _Held:
        """What a request has here."""
        return self._held.setdefault(request, _Held())

    def wanted(self, request: Serial, meeting: Meeting, head: int, limit: int) -> list[int]:
        """Blocks between `head` and `limit` tokens that came and were not restored yet. Slots of
        others that are of no use any more are given back."""
        held = self.of(request)
        self._drop(held, held.lost)
        self.drop_before(request, head)
        if not meeting.as_they_come:
            return []
        blocks = range(head // BLOCK_TOKENS, limit // BLOCK_TOKENS)
        return [n for n in blocks if n not in held.slots and meeting.has(n)]

    def restore(
        self,
        request: Serial,
        nodes: Mapping[int, BlockNode],
        slots: torch.Tensor,
        meeting: Meeting | None = None,
    ) -> None:
        """Write blocks, in the order of their path, to device slots, which are free and as many as
        the blocks have tokens. What runs on the model's stream later finds them there. meeting: of
        which these blocks are, that have not joined the tree; None for blocks of the tree."""
        held = self.of(request)
        held.slots.update(zip(nodes, slots.split(BLOCK_TOKENS), strict=True))
        held.nodes.update(nodes)
        if meeting is not None:
            held.meeting = meeting
            held.unproven |= nodes.keys()
            meeting.restored = held.slots.keys()
        self._compute.will_read(slots)
        with self._compute.entered():
            runs = [self._restoration(held, run) for run in _runs(nodes)]
            self._copied = self._restorer.restore_early(runs)
            if meeting is None:
                self._restorer.keep(list(nodes.values()))

    def drop_before(self, request: Serial, head: int) -> None:
        """The first `head` tokens will be computed: what was restored of them goes back."""
        held = self.of(request)
        self._drop(held, [n for n in held.slots if n * BLOCK_TOKENS < head])

    def release(self) -> int:
        """Give all slots back. Returns how many. Nothing more is restored for who has any."""
        count = self.tokens
        for held in self._held.values():
            self._drop(held, list(held.slots))
            held.todo = []
            if held.meeting is not None:
                held.meeting.as_they_come = False
        return count

    def drop_unproven(self) -> None:
        """A meeting is over: what came through it will not join the tree."""
        for held in self._held.values():
            self._drop(held, list(held.unproven))

    def forget(self, requests: Iterable[Serial]) -> None:
        """Give back what these have, who do not wait any more."""
        for request in requests:
            held = self._held.pop(request, None)
            if held is not None:
                self._drop(held, list(held.slots))

    def prove(self, request: Serial) -> None:
        """The blocks of the request's meeting are about to join the tree.

        A block counts if its bytes lay in their place until its copy was over. One that joined the
        tree meanwhile, for another request, may have left its place: its slots are given back.
        """
        held = self.of(request)
        if held.unproven and self._copied is not None:
            self._copied.wait()
        self._drop(held, held.lost)
        held.unproven.clear()

    def hand_over(self, request: Serial, path: Sequence[BlockNode], start: int, stop: int) -> Slots:
        """The slots of tokens [start, stop) that hold the K and V of the blocks of `path`; they are
        the caller's from now on. The request has nothing here any more."""
        held = self.of(request)
        first, last = -(-start // BLOCK_TOKENS), stop // BLOCK_TOKENS
        fits = [n for n, node in held.nodes.items() if first <= n < last and _same(node, path[n])]
        there = {n: held.slots.pop(n) for n in sorted(set(fits) - held.unproven)}
        self.forget([request])
        return there

    def give_back(self, slots: Slots) -> None:
        """Slots that were handed over are free again."""
        if slots:
            # Whoever gets them next writes behind what is still written, on the same stream.
            self._allocator.free(torch.cat(list(slots.values())))

    def _restoration(self, held: _Held, run: list[int]) -> Restoration:
        nodes = [held.nodes[block] for block in run]
        first, slots = run[0], torch.cat([held.slots[block] for block in run])
        start = first * BLOCK_TOKENS
        return Restoration(tuple(nodes), start, start + len(slots), slots, first=first)

    def _drop(self, held: _Held, blocks: Iterable[int]) -> None:
        dropped = {block: held.slots.pop(block) for block in blocks}
        for block in dropped:
            del held.nodes[block]
        held.unproven -= dropped.keys()
        self.give_back(dropped)


def _same(node: BlockNode, other: BlockNode) -> bool:
    """Whether both stand for one state. A block that was computed at its place may have followed
    one of its identity that was moved there."""
    return (node.block_id, node.moved) == (other.block_id, other.moved)


def missing_ranges(there: Set[int] | Slots, start: int, stop: int) -> list[tuple[int, int]]:
    """Tokens [begin, end) between `start` and `stop` that no block of `there` has. None of these
    begins before `start`."""
    blocks = range(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS))
    runs = _runs(block for block in blocks if block not in there)
    return [
        (max(run[0] * BLOCK_TOKENS, start), min((run[-1] + 1) * BLOCK_TOKENS, stop)) for run in runs
    ]


def interleave_slots(there: Slots, others: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """(stop - start,) slots in the order of the tokens: those of `there`, and in the ranges that it
    lacks `others`."""
    parts, position, used = [], start, 0
    for begin, end in [*missing_ranges(there, start, stop), (stop, stop)]:
        parts += [there[block] for block in range(position // BLOCK_TOKENS, begin // BLOCK_TOKENS)]
        parts.append(others[used : used + end - begin])
        used, position = used + end - begin, end
    return torch.cat(parts)


def _runs(blocks: Iterable[int]) -> Iterator[list[int]]:
    """Runs of consecutive blocks; `blocks` ascend."""
    for _, run in groupby(enumerate(blocks), key=lambda numbered: numbered[1] - numbered[0]):
        yield [block for _, block in run]
