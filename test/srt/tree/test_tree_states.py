"""States between SGLang's tree and ends, with stand-ins for both: where a request leaves one for
others, how long it is kept, and that an error on the way leaves every slot to its owner."""

from __future__ import annotations

from array import array
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchResult
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_hc.policy.ends import Stay
from sglang_hc.policy.restore_plan import Reason
from sglang_hc.srt.tree.states import TreeStates
from sglang_hc.tiers.tiers import States
from sglang_hc.tree.identity import Prefix

NONE: Any = None


def match_of(device: int, branch: int | None) -> MatchResult:
    return MatchResult(
        device_prefix_len=device, last_device_node=NONE, last_host_node=NONE,
        best_match_node=NONE, mamba_branching_seqlen=branch,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "device", "branch", "known", "left"),
    [
        (64, 0, None, 192, 192),
        (64, 192, None, 192, None),
        (64, 0, 256, 192, 256),
        (256, 0, None, 320, 256),
        (256, 0, 256, 448, 256),  # and not at 448, where the model leaves none
        (256, 256, None, 448, None),
        (256, 256, None, 512, 512),
    ],
)
def test_a_branch_is_where_the_model_can_leave_a_state(
    grid: int, device: int, branch: int | None, known: int, left: int | None
) -> None:
    component = SimpleNamespace(mamba_checkpoint_grid=grid)
    tree: Any = SimpleNamespace(components={ComponentType.MAMBA: component})
    states = TreeStates(NONE, NONE, States(NONE, NONE))
    found = states.track_branch(tree, match_of(device, branch), known)
    assert found.mamba_branching_seqlen == left


class Wanted:
    """In place of the capture: notes for how long an end is wanted, which is there already."""

    def __init__(self) -> None:
        self.stays: list[Stay] = []

    def wants(self, path: Prefix, stay: Stay) -> bool:
        self.stays.append(stay)
        return False


def request(**fields: Any) -> Any:
    kv = SimpleNamespace(cache_protected_len=192, holds_kv=False, holds_mamba=False)
    given: dict[str, Any] = dict(
        kv=kv, last_node=1, prefix_len=0, origin_input_ids=array("q", range(230)),
        output_ids=array("q"), full_untruncated_fill_ids=array("q", range(230)), extra_key=None,
        mamba_branching_seqlen=192, finished=lambda: False, priority=None,
    )  # fmt: skip
    return SimpleNamespace(**given | fields)


@pytest.mark.parametrize(("before", "stay"), [(0, Stay.SHARED), (192, Stay.PROMPT)])
def test_who_goes_on_behind_an_end_makes_it_no_branch(before: int, stay: Stay) -> None:
    """A request that was continued at 192 has left no state there."""
    capture: Any = Wanted()
    core = SimpleNamespace(get_component_device_value=lambda *_: torch.tensor([3]))
    tree: Any = SimpleNamespace(tree_core=core)
    TreeStates(NONE, NONE, States(capture, NONE)).keep_of_tree(tree, request(), before)
    assert capture.stays == [stay]


class Slots:
    """Slots of one pool, each of which has one owner."""

    def __init__(self) -> None:
        self.there = set(range(1, 9))

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > len(self.there):
            return None
        return torch.tensor([self.there.pop() for _ in range(count)])

    def free(self, slots: torch.Tensor) -> None:
        for slot in slots.tolist():
            assert slot not in self.there
            self.there.add(slot)


class Tree:
    """Of nothing. fails: what raises an error."""

    def __init__(self, fails: str) -> None:
        self.fails, self.locks = fails, 0
        self.written: list[int] = []
        self.token_to_kv_pool_allocator, self.states = Slots(), Slots()
        self.req_to_token_pool = SimpleNamespace(mamba_allocator=self.states)
        self.compute_stream = SimpleNamespace(will_read=lambda *_: None, entered=nullcontext)
        self.tree_core = SimpleNamespace(match_full_device_prefix=lambda key: (0, 0, 0))
        planner = SimpleNamespace(choose=lambda tokens, *_: SimpleNamespace(tokens=tokens))
        self.restorer = SimpleNamespace(planner=planner)

    def _may(self, name: str) -> None:
        if self.fails == name:
            raise RuntimeError(name)

    def lock(self, node: int) -> int:
        self.locks += 1
        return node

    def unlock(self, lock: int) -> None:
        self.locks -= 1

    def path_device_indices(self, node: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64)

    def allocate(self, count: int) -> torch.Tensor | None:
        self._may("allocate")
        return self.token_to_kv_pool_allocator.alloc(4)  # pages, say

    def restore(self, part: Any, slot: torch.Tensor) -> None:
        self._may("write")
        self.written += slot.tolist()

    def insert(self, params: InsertParams) -> None:
        self._may("insert")

    def evict(self, params: EvictParams) -> None:
        assert params.mamba_num == 1

    def refuse(self, req: Any, reason: Reason) -> Reason:
        return reason


BLOCKS: Any = ["a", "b", "c"]


def states_over(tree: Tree, pins: list[int]) -> TreeStates:
    ends: Any = SimpleNamespace(
        deepest=len, parts=lambda path, count: ["part"],
        pin=lambda parts: pins.append(1), unpin=lambda parts: pins.append(-1),
    )  # fmt: skip
    moves: Any = States(NONE, tree)  # type: ignore[arg-type]
    return TreeStates(NONE, ends, moves)


@pytest.mark.parametrize("fails", ["allocate", "write", "insert"])
def test_an_error_on_the_way_leaves_every_slot_to_its_owner(fails: str) -> None:
    tree, pins = Tree(fails), [0]
    with pytest.raises(RuntimeError, match=fails):
        states_over(tree, pins).load_back(tree, request(), BLOCKS, 192)
    assert len(tree.states.there) == 8 and len(tree.token_to_kv_pool_allocator.there) == 8
    assert tree.locks == sum(pins) == 0


@pytest.mark.parametrize(("states", "slots"), [(0, 8), (1, 8), (2, 3)])
def test_without_room_a_request_goes_on_without(states: int, slots: int) -> None:
    """It computes, and does not wait: of two states, or four slots, there is one less."""
    tree, pins = Tree(""), [0]
    tree.states.there = set(range(states))
    tree.token_to_kv_pool_allocator.there = set(range(slots))
    found: Any = states_over(tree, pins).load_back(tree, request(), BLOCKS, 192)
    assert found is Reason.NO_DEVICE_SLOTS
    assert len(tree.states.there) == states
    assert len(tree.token_to_kv_pool_allocator.there) == slots
    assert tree.locks == sum(pins) == 0


def test_with_room_for_it_the_state_is_written_first() -> None:
    tree = Tree("insert")
    tree.states.there = {1, 2}
    with pytest.raises(RuntimeError, match="insert"):
        states_over(tree, [0]).load_back(tree, request(), BLOCKS, 192)
    assert tree.written and set(tree.written) <= {1, 2}
