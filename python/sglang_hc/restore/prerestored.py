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
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, Protocol

import torch

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.loads import BlockLoad, Load
from sglang_hc.queue.meeting import Meeting
from sglang_hc.queue.requests import Serial
from sglang_hc.restore.path import Restoration
from sglang_hc.restore.restorer import Restorer
from sglang_hc.store.scatter_queue import Event
from sglang_hc.tree.block_tree import BlockNode

Slots = Mapping[int, torch.Tensor]
"""Block of a prompt: its (BLOCK_TOKENS,) int64 device slots, which hold its K and V."""


class ComputeStream(Protocol):
    """Where the model runs; `srt/engine/streams.py` has it."""

    def entered(self) -> AbstractContextManager[None]:
        """What is submitted inside is ordered with the passes."""

    def will_read(self, *tensors: torch.Tensor) -> None:
        """Tensors made outside are used inside."""


class PrerestoredBlocks:
    """The device slots of blocks that came before their request's pass. Belongs to the scheduler
    thread."""

    def __init__(self, allocator: Any, restorer: Restorer, compute: ComputeStream) -> None:
        """allocator: SGLang's, of device slots."""
        self._allocator = allocator
        self._restorer = restorer
        self._compute = compute
        self._loads: dict[Serial, Load] = {}
        self._met: dict[Serial, Meeting] = {}
        """Through which blocks come that have not joined the tree."""
        self._count = 0
        self._copied: Event | None = None
        """Behind the copies of the last restoration."""

    @property
    def tokens(self) -> int:
        """Device slots in use."""
        return BLOCK_TOKENS * self._count

    def tokens_of(self, request: Serial) -> int:
        """Those of one request."""
        load = self._loads.get(request)
        return 0 if load is None else BLOCK_TOKENS * len(load.restored)

    @property
    def requests(self) -> Collection[Serial]:
        """Who was looked at since it has come, or has something here."""
        return self._loads.keys()

    def of(self, request: Serial) -> Load:
        """What is in motion for a request."""
        return self._loads.setdefault(request, Load())

    def wanted(self, request: Serial, meeting: Meeting, head: int, limit: int) -> list[int]:
        """Blocks between `head` and `limit` tokens that came and were not restored yet. Slots of
        others that are of no use any more are given back."""
        if request not in self._met:
            before = self.of(request)  # in host memory when the request came
            self._drop(before, [n for n in before.restored if n >= meeting.first])
            meeting.load.blocks.update({n: before.blocks[n] for n in before.restored})
            self._loads[request], self._met[request] = meeting.load, meeting
        self._drop_lost(request)
        self.drop_before(request, head)
        if not (meeting.as_they_come and meeting.has_room):
            return []
        blocks = range(head // BLOCK_TOKENS, limit // BLOCK_TOKENS)
        there = set(meeting.load.restored)
        return [n for n in blocks if n not in there and meeting.has(n)]

    def restore(self, request: Serial, nodes: Mapping[int, BlockNode], slots: torch.Tensor) -> None:
        """Write blocks, in the order of their path, to device slots, which are free and as many as
        the blocks have tokens. What runs on the model's stream later finds them there. After an
        error the slots are free again, and the request has none of these blocks."""
        load, in_tree = self.of(request), request not in self._met
        self._drop(load, [n for n in load.restored if n in nodes])
        rows = dict(zip(nodes, torch.split(slots, BLOCK_TOKENS), strict=True))
        try:
            self._compute.will_read(slots)
            with self._compute.entered():
                runs = [_restoration(nodes, rows, run) for run in _runs(nodes)]
                self._copied = self._restorer.restore_early(runs)
                if in_tree:
                    self._restorer.keep(list(nodes.values()))
        except Exception:
            self.give_back(rows)
            raise
        for n, node in nodes.items():
            load.blocks.setdefault(n, BlockLoad()).write_to(rows[n], node, proven=in_tree)
        self._count += len(nodes)

    def drop_before(self, request: Serial, head: int) -> None:
        """The first `head` tokens will be computed: what was restored of them goes back."""
        load = self.of(request)
        self._drop(load, [n for n in load.restored if n * BLOCK_TOKENS < head])

    def release(self, keep: Serial | None = None) -> int:
        """Give all slots back, but for those of one request. Returns how many. Nothing more is
        restored before their passes for those of now."""
        before = self.tokens
        for request, load in self._loads.items():
            if request == keep:
                continue
            self._drop(load, load.restored)
            load.todo, load.is_closed = (), True
            if request in self._met:
                self._met[request].has_room = False
        return before - self.tokens

    def drop_unproven(self) -> None:
        """A meeting is over: what came through it will not join the tree."""
        self._met.clear()
        for load in self._loads.values():
            self._drop(load, [n for n in load.restored if not load.blocks[n].proven])

    def forget(self, requests: Iterable[Serial]) -> None:
        """Give back what these have, who do not wait any more."""
        for request in requests:
            self._met.pop(request, None)
            load = self._loads.pop(request, None)
            if load is not None:
                self._drop(load, load.restored)

    def prove(self, request: Serial) -> None:
        """The blocks of the request's meeting are about to join the tree.

        A block counts if its bytes lay in their place until its copy was over. One that joined the
        tree meanwhile, for another request, may have left its place: its slots are given back.
        """
        if request in self._met and self._copied is not None:
            self._copied.wait()
        self._drop_lost(request)
        load = self.of(request)
        for n in load.restored:
            load.blocks[n].proven = True

    def handed_over(
        self, request: Serial, path: Sequence[BlockNode], start: int, stop: int
    ) -> Set[int]:
        """The blocks of which `hand_over` would give the slots."""
        load = self._loads.get(request)
        blocks = {} if load is None else load.blocks
        numbers = range(-(-start // BLOCK_TOKENS), stop // BLOCK_TOKENS)
        return {
            n
            for n in numbers
            if n in blocks and blocks[n].proven and _same(blocks[n].node, path[n])
        }

    def hand_over(self, request: Serial, path: Sequence[BlockNode], start: int, stop: int) -> Slots:
        """The slots of tokens [start, stop) that hold the K and V of the blocks of `path`; they are
        the caller's from now on. The request keeps nothing here but what is not proven yet."""
        load = self.of(request)
        blocks = load.blocks
        numbers = sorted(self.handed_over(request, path, start, stop))
        there = {n: blocks[n].take_rows() for n in numbers}
        self._count -= len(there)
        if all(blocks[n].proven for n in load.restored):
            self.forget([request])
        return there

    def give_back(self, slots: Slots) -> None:
        """Slots that were handed over are free again."""
        if slots:
            # Whoever gets them next writes behind what is still written, on the same stream.
            self._allocator.free(torch.cat(list(slots.values())))

    def _drop_lost(self, request: Serial) -> None:
        """Blocks that are not where they were written to any more before they were proven."""
        load, meeting = self.of(request), self._met.get(request)
        gone = [n for n in load.restored if not load.blocks[n].proven]
        self._drop(load, [n for n in gone if meeting is None or not meeting.has(n)])

    def _drop(self, load: Load, blocks: Sequence[int]) -> None:
        self._count -= len(blocks)
        self.give_back({block: load.blocks[block].take_rows() for block in blocks})


def _restoration(nodes: Mapping[int, BlockNode], rows: Slots, run: list[int]) -> Restoration:
    slots, start = torch.cat([rows[number] for number in run]), run[0] * BLOCK_TOKENS
    path = tuple(nodes[number] for number in run)
    return Restoration(path, start, start + len(slots), slots, first=run[0])


def _same(node: BlockNode | None, other: BlockNode) -> bool:
    """Whether both stand for one state. A block that was computed at its place may have followed
    one of its identity that was moved there."""
    return node is not None and (node.block_id, node.moved) == (other.block_id, other.moved)


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
