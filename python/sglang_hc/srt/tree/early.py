"""Blocks of a meeting that are restored before all of them are here (`queue/meeting.py`).

A block gets device slots of its own when its bytes are in host memory, and is written to them
between two chunks of the prompt. Until both ends meet, these slots belong to no request and to no
node of the device tree. SGLang sees them as evictable: when it needs the room it gets them back,
and what they held is restored where both ends meet, like everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch

from sglang_hc.device.copy_stream import Event
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.meeting import Meeting
from sglang_hc.restore.path import Restoration
from sglang_hc.restore.restorer import Restorer
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.tree.block_tree import BlockNode

Slots = Mapping[int, torch.Tensor]
"""Block of a prompt: its (BLOCK_TOKENS,) int64 device slots, which hold its K and V."""


class EarlyBlocks:
    """The device slots of one meeting's early blocks; there is one meeting at a time. Belongs to
    the scheduler thread."""

    def __init__(self, allocator: Any, restorer: Restorer, compute: ComputeStream) -> None:
        """allocator: SGLang's, of device slots."""
        self._allocator = allocator
        self._restorer = restorer
        self._compute = compute
        self._slots: dict[int, torch.Tensor] = {}
        self._meeting: Meeting | None = None
        self._copied: Event | None = None
        """Behind the copies of the last restoration."""

    @property
    def tokens(self) -> int:
        """Device slots in use."""
        return BLOCK_TOKENS * len(self._slots)

    def wanted(self, meeting: Meeting, head: int, limit: int) -> list[int]:
        """Blocks between `head` and `limit` tokens that came and were not restored yet. Slots of
        others that are of no use any more are given back."""
        self._drop([n for n in self._slots if n * BLOCK_TOKENS < head or not meeting.has(n)])
        if not meeting.as_they_come:
            return []
        blocks = range(head // BLOCK_TOKENS, limit // BLOCK_TOKENS)
        return [n for n in blocks if n not in self._slots and meeting.has(n)]

    def restore(self, meeting: Meeting, blocks: list[int], slots: torch.Tensor) -> None:
        """Write blocks, in the order of their path, to device slots, which are free and as many as
        the blocks have tokens. What runs on the model's stream later finds them there."""
        self._meeting = meeting
        self._slots.update(zip(blocks, slots.split(BLOCK_TOKENS), strict=True))
        meeting.restored = self._slots.keys()
        self._compute.will_read(slots)
        with self._compute.entered():
            restorations = [self._restoration(meeting, run) for run in _runs(blocks)]
            self._copied = self._restorer.restore_early(restorations)

    def drop_before(self, head: int) -> None:
        """The first `head` tokens will be computed: what was restored of them goes back."""
        self._drop([n for n in self._slots if n * BLOCK_TOKENS < head])

    def release(self) -> int:
        """Give all slots back. Returns how many. Nothing more is restored early."""
        count = self.tokens
        if self._meeting is not None:
            self._meeting.as_they_come = False
        self._drop(list(self._slots))
        return count

    def hand_over(self) -> Slots:
        """The slots that hold their block's K and V; they are the caller's from now on.

        A block counts if its bytes lay in their place until its copy was over. One that joined the
        tree meanwhile, for another request, may have left its place: its slots are given back.
        """
        if self._copied is not None:
            self._copied.wait()
        meeting = self._meeting
        self._drop([n for n in self._slots if meeting is None or not meeting.has(n)])
        slots = self._slots.copy()
        self._slots.clear()
        return slots

    def give_back(self, slots: Slots) -> None:
        """Slots that were handed over are free again."""
        if slots:
            # Whoever gets them next writes behind what is still written, on the same stream.
            self._allocator.free(torch.cat(list(slots.values())))

    def _restoration(self, meeting: Meeting, run: list[int]) -> Restoration:
        nodes = [standing_for(meeting, block) for block in run]
        first, slots = run[0], torch.cat([self._slots[block] for block in run])
        start = first * BLOCK_TOKENS
        return Restoration(tuple(nodes), start, start + len(slots), slots, first=first)

    def _drop(self, blocks: list[int]) -> None:
        self.give_back({block: self._slots.pop(block) for block in blocks})


def standing_for(meeting: Meeting, block: int) -> BlockNode:
    """A node in no tree, for a block of a meeting."""
    promotion = meeting.promotion(block)
    node = BlockNode(None, promotion.tokens, promotion.block_id, promotion.namespace)
    node.slot = promotion.slot
    return node


def gaps(there: Slots, start: int, stop: int) -> list[tuple[int, int]]:
    """Tokens [begin, end) between `start` and `stop` that no block of `there` has. None of these
    begins before `start`."""
    blocks = range(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS))
    runs = _runs(block for block in blocks if block not in there)
    return [
        (max(run[0] * BLOCK_TOKENS, start), min((run[-1] + 1) * BLOCK_TOKENS, stop)) for run in runs
    ]


def woven(there: Slots, others: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """(stop - start,) slots in the order of the tokens: those of `there`, and in its gaps
    `others`."""
    parts, position, used = [], start, 0
    for begin, end in [*gaps(there, start, stop), (stop, stop)]:
        parts += [there[block] for block in range(position // BLOCK_TOKENS, begin // BLOCK_TOKENS)]
        parts.append(others[used : used + end - begin])
        used, position = used + end - begin, end
    return torch.cat(parts)


def _runs(blocks: Iterable[int]) -> Iterator[list[int]]:
    """Runs of consecutive blocks; `blocks` ascend."""
    for _, run in groupby(enumerate(blocks), key=lambda numbered: numbered[1] - numbered[0]):
        yield [block for _, block in run]
