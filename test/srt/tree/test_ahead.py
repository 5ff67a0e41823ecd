"""What of waiting requests is restored ahead, in which pass, and what their own pass loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.policy.restore_plan import Choice, Reason, RestorePlan
from sglang_hc.queue.requests import QueuedPrompt, Serial
from sglang_hc.restore.prerestored import PrerestoredBlocks
from sglang_hc.restore.restorer import Restorer
from sglang_hc.srt.engine.intake import SERIAL
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.srt.tree.ahead import BLOCKS_PER_PASS, Placed, RestoreAhead
from sglang_hc.srt.tree.device_tree import DeviceTree
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.identity import Prefix, unpack_tokens
from support.early_world import Allocator, Copies
from support.host import host_tier, keep, tokens_of
from support.profiles import cost_model

SLOTS = 40 * BLOCK_TOKENS


class Tree:
    """A device tree with slots; `evictable` more belong to prefixes."""

    page_size, stopped = 1, False

    def __init__(self) -> None:
        self.slots, self.evictable, self.evicted = Allocator(SLOTS), 0, 0

    @property
    def free(self) -> int:
        return self.slots.available_size()

    @property
    def room(self) -> int:
        return self.free + self.evictable

    def allocate(self, count: int) -> torch.Tensor | None:
        if self.free < count:
            self.evicted += count - self.free
            return None
        return self.slots.alloc(count)


class Queue:
    """Waiting requests over a host tier, and what is restored of them."""

    def __init__(self, planner: RestorePlanner | None = None) -> None:
        self.tree, self.host = Tree(), host_tier(40)
        content = {n: b"" for n in range(40)}
        self.copies = Copies(content)
        compute = ComputeStream(torch.device("cpu"))
        restorer = cast(Restorer, self.copies)
        self.blocks = PrerestoredBlocks(self.tree.slots, restorer, compute)
        self.queue: list[Any] = []
        self.fetching: set[Serial] = set()
        self.planner = planner or RestorePlanner(None, LayerPlan(0, 1, 1), True, Counter())
        waiting: Any = SimpleNamespace(
            has=lambda one: any(getattr(req, SERIAL) == one for req in self.queue),
            first=lambda count: self.queue[:count],
            is_fetching=self.fetching.__contains__,
            look_at=self._look_at,
        )
        meetings: Any = SimpleNamespace(of=lambda request: None, decoding=0)
        match: Any = SimpleNamespace(ready=lambda prompt: self.host.tree.match(prompt).ready)
        self.ahead = RestoreAhead(self.blocks, meetings, waiting, self.planner, match)

    def come(self, number: int, words: str) -> Serial:
        tokens = unpack_tokens(tokens_of(words + "q")).tolist()
        req = SimpleNamespace(
            full_untruncated_fill_ids=tokens, prefix_len=0,
            _compute_max_prefix_len=lambda length: length - 1, **{SERIAL: Serial(number)},
        )  # fmt: skip
        self.queue.append(req)
        return Serial(number)

    def _look_at(self, request: Serial) -> QueuedPrompt:
        req = next(req for req in self.queue if getattr(req, SERIAL) == request)
        ids = req.full_untruncated_fill_ids
        words = next(w for w in WORDS if unpack_tokens(tokens_of(w + "q")).tolist() == ids)
        return QueuedPrompt(Prefix(None, tokens_of(words + "q")), lambda: 0)

    def a_pass(self) -> None:
        self.ahead.restore_waiting(cast(DeviceTree, self.tree))
        assert self.tree.free + self.blocks.tokens == SLOTS

    def restored(self, request: Serial) -> list[int]:
        return sorted(self.blocks.of(request).restored)

    def first(self) -> tuple[DeviceTree, Any, list[BlockNode]]:
        """The tree, the first request, and its blocks in host memory."""
        req = self.queue[0]
        nodes = self.host.tree.match(self._look_at(getattr(req, SERIAL)).prompt).nodes
        return cast(DeviceTree, self.tree), req, nodes

    def place(self, stop: int) -> Placed | Reason:
        """As SGLang admits the first request: what is promised is kept."""
        promised = self.ahead.promise(*self.first(), stop)
        return self.ahead.place(*self.first(), promised, met=False)


WORDS = ("abcdef", "abcdgh", "abcdefij")


def restored_ahead(planner: RestorePlanner | None = None) -> Queue:
    """Of a request whose history is in host memory, the first four blocks are on the device."""
    queue = Queue(planner)
    keep(queue.host, tokens_of(WORDS[0]))
    queue.come(1, WORDS[0])
    queue.a_pass()
    queue.a_pass()
    return queue


def test_of_a_shared_history_each_block_is_restored_once() -> None:
    queue = Queue()
    for words in WORDS[:2]:
        keep(queue.host, tokens_of(words))
    first, second = queue.come(1, WORDS[0]), queue.come(2, WORDS[1])
    for _ in range(4):
        queue.a_pass()
    assert queue.restored(first) == [0, 1, 2, 3, 4, 5]
    assert queue.restored(second) == [4, 5], "but for what the first one has"


def test_no_prefix_leaves_the_device_for_a_block_from_host_memory() -> None:
    queue = Queue()
    keep(queue.host, tokens_of(WORDS[0]))
    queue.tree.slots.alloc(SLOTS - 2 * BLOCK_TOKENS - 1)
    queue.tree.evictable = SLOTS - 2 * BLOCK_TOKENS - 1
    request = queue.come(1, WORDS[0])
    for _ in range(3):
        queue.ahead.restore_waiting(cast(DeviceTree, queue.tree))
    assert queue.restored(request) == [0, 1] and queue.tree.evicted == 0


def test_a_request_is_looked_at_again_when_its_fetch_is_over() -> None:
    queue = Queue()
    keep(queue.host, tokens_of("ab"))
    request = queue.come(1, WORDS[0])
    queue.a_pass()
    queue.a_pass()
    assert queue.restored(request) == [0, 1]
    queue.fetching.add(request)
    queue.a_pass()
    keep(queue.host, tokens_of(WORDS[0]))
    queue.fetching.clear()
    queue.a_pass()
    assert queue.restored(request) == [0, 1, 2, 3, 4, 5] and BLOCKS_PER_PASS == 4
    queue.fetching.add(request)
    queue.blocks.release()
    queue.a_pass()
    queue.fetching.clear()
    queue.a_pass()
    assert queue.restored(request) == [], "what others needed goes to nobody"


class Planner:
    """Answers `choose` as told, and notes what it is asked."""

    can_restore_early = True

    def __init__(self, rest: Choice) -> None:
        self.rest = rest
        self.asked: list[Sequence[int]] = []

    def choose(self, tokens: int, context: int, new: int) -> RestorePlan:
        self.asked.append((tokens, context, new))
        choice = self.rest if context > 0 else Choice.LOAD
        count = 0 if choice is Choice.REFUSE else tokens
        return RestorePlan(choice, Reason.SLOW_TIER, count, 0)

    def as_stored(self, tokens: int) -> RestorePlan:
        return RestorePlan(Choice.LOAD, Reason.AS_STORED, tokens, 0)


@pytest.mark.parametrize("rest", [Choice.LOAD, Choice.REFUSE, Choice.RECOMPUTE_MORE])
def test_what_is_left_to_restore_is_weighed(rest: Choice) -> None:
    queue = restored_ahead(cast(RestorePlanner, Planner(rest)))
    stop = 6 * BLOCK_TOKENS
    planner = cast(Planner, queue.planner)
    planner.asked.clear()
    placed = queue.place(stop)
    assert isinstance(placed, Placed)
    assert planner.asked[0] == (2 * BLOCK_TOKENS, 4 * BLOCK_TOKENS, BLOCK_TOKENS)
    assert len(planner.asked) == (2 if rest is Choice.RECOMPUTE_MORE else 1), "asked once"
    if rest is Choice.LOAD:
        assert placed.early == 4 * BLOCK_TOKENS and placed.missing == [(256, 384)]
    elif rest is Choice.REFUSE:
        assert placed.early == 4 * BLOCK_TOKENS and placed.missing == []
        stop = 4 * BLOCK_TOKENS
    else:
        assert planner.asked[1] == (stop, 0, BLOCK_TOKENS) and placed.early == 0
        assert placed.missing == [(0, stop)]
    assert len(placed.slots.unique()) == len(placed.slots) == stop
    assert queue.tree.free == SLOTS - stop and queue.blocks.tokens == 0


def test_what_is_left_of_a_met_history_is_not_weighed_but_its_copies_are_counted() -> None:
    costs = cost_model(host=1e-3, prefill=1e-9)
    planner = RestorePlanner(costs, LayerPlan(0, 1, 1), True, Counter())
    assert planner.as_stored(64).copy_seconds > 0 == planner.as_stored(0).copy_seconds


@pytest.mark.parametrize("where", ["choose", "allocate"])
def test_an_error_before_the_slots_are_placed_loses_none(where: str) -> None:
    queue = restored_ahead()

    def broken(*_: Any) -> RestorePlan:
        raise OSError("planted")

    setattr(queue.planner if where == "choose" else queue.tree, where, broken)
    with pytest.raises(OSError, match="planted"):
        queue.place(6 * BLOCK_TOKENS)
    assert queue.tree.free + queue.blocks.tokens == SLOTS
    assert where == "choose" or queue.blocks.tokens == 0, "they were handed over"


def test_what_was_promised_is_given_whole_or_not_at_all() -> None:
    """SGLang ends the scheduler's process where it gets a part."""
    queue = restored_ahead(cast(RestorePlanner, Planner(Choice.REFUSE)))
    assert queue.ahead.promise(*queue.first(), 6 * BLOCK_TOKENS) == 4 * BLOCK_TOKENS
    refused = queue.ahead.place(*queue.first(), 6 * BLOCK_TOKENS, met=False)
    assert refused is Reason.AS_STORED
    assert queue.tree.free + queue.blocks.tokens == SLOTS


def test_blocks_that_left_since_the_promise_are_not_counted_on() -> None:
    queue = restored_ahead(cast(RestorePlanner, Planner(Choice.LOAD)))
    assert queue.ahead.promise(*queue.first(), 6 * BLOCK_TOKENS) == 6 * BLOCK_TOKENS
    queue.blocks.release()
    placed = queue.ahead.place(*queue.first(), 6 * BLOCK_TOKENS, met=False)
    assert placed is Reason.BLOCKS_GONE and queue.tree.free == SLOTS


def test_a_promise_notes_nothing_of_a_request_that_has_nothing_here() -> None:
    """The pass would take it for one that was looked at before."""
    queue = Queue()
    keep(queue.host, tokens_of(WORDS[0]))
    queue.come(1, WORDS[0])
    assert queue.ahead.promise(*queue.first(), 6 * BLOCK_TOKENS) == 6 * BLOCK_TOKENS
    assert not queue.blocks.requests
