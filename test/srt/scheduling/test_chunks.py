"""Slots of a prompt that is computed in chunks, by SGLang's own account of them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_hc.srt.scheduling import meeting
from sglang_hc.srt.tree.tree_backend import HcRadixCache


class Allocator:
    page_size = 1

    def __init__(self, free: int) -> None:
        self.free = free

    def available_size(self) -> int:
        return self.free

    def create_prefill_budget(self, tree: Any, num_mixed_decode_tokens: int) -> PrefillBudget:
        return PrefillBudget(self, tree, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def request_slot_reserve(self, **_: Any) -> int:
        return 0


class Tree(HcRadixCache):
    """Of a model with recurrent layers. Nothing is stored."""

    def __init__(self) -> None:
        self.states: Any = SimpleNamespace()
        self.meetings: Any = SimpleNamespace(of=lambda serial: None)
        self.tree_core: Any = SimpleNamespace(page_size=1)

    def supports_mamba(self) -> bool:
        return True

    def full_evictable_size(self) -> int:
        return 0

    def promise(self, req: Any) -> None:
        pass

    def lock(self, node: Any) -> Any:
        return None


class Request(SimpleNamespace):
    """As SGLang's scheduler has it."""

    @property
    def extend_len(self) -> int:
        return int(self.extend_end - self.prefix_len)


def request(prompt: int, prefix: int, new: int, branch: int | None = None) -> Request:
    """It has device slots for a prefix of its prompt, wants so many new tokens, and leaves a path
    that is known behind `branch`."""
    return Request(
        full_untruncated_fill_ids=range(prompt),
        prefix_len=prefix,
        extend_end=prefix,
        output_ids=[],
        sampling_params=SimpleNamespace(max_new_tokens=new, ignore_eos=False),
        kv=SimpleNamespace(holds_mamba=True, req_pool_idx=0),
        host_hit_length=0,
        swa_host_hit_length=0,
        auxiliary_swa_host_hit_length=0,
        mamba_host_hit_length=0,
        retracted_stain=False,
        last_node=None,
        needs_host_load_back=lambda: False,
        mamba_branching_seqlen=branch,
    )


class Adder(PrefillAdder):
    """Without questions to settings of the server, and to the source of a prefix."""

    def _lock_node(self, *_: Any, **__: Any) -> Any:
        return nullcontext()

    def _replay_len(self, req: Any, prefix_len: int) -> int:
        return 0

    def _account_prefill_cache_admission(self, req: Any, prefix_len: int) -> None:
        pass


def adder(free: int, chunk: int, replying: list[Any]) -> PrefillAdder:
    running = SimpleNamespace(reqs=replying)
    return Adder(1, Tree(), Allocator(free), running, 0.7, 16384, chunk)


def add(to: PrefillAdder, req: Any) -> Any:
    return meeting.add_one_req(PrefillAdder.add_one_req, to, req, False, None)


def go_on(to: PrefillAdder, req: Any) -> Any:
    return meeting.add_chunked_req(PrefillAdder.add_chunked_req, to, req)


def test_nobody_is_admitted_behind_a_prompt_that_is_cut() -> None:
    """The 30 tokens left of the pass are enough for the second, and so are the slots, until the
    first goes on."""
    pass_ = adder(free=402, chunk=94, replying=[])
    add(pass_, request(277, 0, 21))
    assert pass_.can_run_list[0].extend_end == 64
    assert pass_.budget_state().name == "OTHER"


def test_nobody_is_admitted_behind_a_chunk_that_is_not_the_last() -> None:
    pass_ = adder(free=402, chunk=100, replying=[])
    assert go_on(pass_, request(277, 64, 21)) is not None
    assert pass_.can_run_list[0].extend_end == 128
    assert pass_.budget_state().name == "OTHER"


@pytest.mark.parametrize(
    ("prompt", "branch", "cut"), [(277, 128, 128), (191, 128, 191), (277, 64, 277), (277, 320, 277)]
)
def test_a_prompt_is_cut_where_it_leaves_a_known_path(prompt: int, branch: int, cut: int) -> None:
    """A pass leaves one state. Not where it has less than a block behind that, or before it."""
    pass_ = adder(free=1024, chunk=512, replying=[])
    add(pass_, request(prompt, 64, 21, branch))
    assert pass_.can_run_list[0].extend_end == cut


@pytest.mark.parametrize(("waiting", "cut"), [(2, 277), (1, 128)])
def test_a_prompt_is_not_cut_there_while_others_wait(waiting: int, cut: int) -> None:
    """It is one of those that wait. Each of many would take a pass of its own."""
    pass_ = adder(free=1024, chunk=512, replying=[])
    pass_.waiting_queue_len = waiting
    add(pass_, request(277, 64, 21, 128))
    assert pass_.can_run_list[0].extend_end == cut


@pytest.mark.parametrize("free", [27, 107])
def test_a_chunk_waits_for_slots_while_others_reply(free: int) -> None:
    """SGLang computes 108 tokens where the replies may take all slots that are left."""
    pass_ = adder(free, chunk=128, replying=[request(162, 162, 200)])
    req = request(277, 169, 21)
    assert go_on(pass_, req) is req
    assert not pass_.can_run_list
    assert pass_.rem_chunk_tokens == 0


def test_a_chunk_that_has_slots_is_computed() -> None:
    pass_ = adder(free=108, chunk=128, replying=[request(162, 162, 200)])
    assert go_on(pass_, request(277, 169, 21)) is None
    assert pass_.can_run_list[0].extend_end == 277
