"""Whatever is left behind is noticed in every engine test: each kind is planted once. Those that
SGLang's strict checks name come first, then those of `support/leaks.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from sglang_hc.tree.identity import Prefix, pack_tokens
from support.core import Core, run_in_child
from support.during import When
from support.prompts import SMALL, prompt
from support.storm_models import KINDS, prepared


def decoding(core: Core) -> bool:
    running = core.scheduler.running_batch.reqs
    return bool(running) and len(running[0].output_ids) > 3


def slot_while_idle(core: Core) -> None:
    core.scheduler.token_to_kv_pool_allocator.alloc(1)
    core.run()


def slot_while_busy(core: Core) -> None:
    allocator = core.scheduler.token_to_kv_pool_allocator
    core.submit(prompt(2, 100), 20)
    core.run(each_pass=When(partial(decoding, core), partial(allocator.alloc, 1)))


def slot_of_another(core: Core) -> None:
    """It is free again while its request decodes; the sums are right."""
    allocator = core.scheduler.token_to_kv_pool_allocator
    core.submit(prompt(2, 100), 20)

    def swap() -> None:
        (req,) = core.scheduler.running_batch.reqs
        row = core.scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        taken = allocator.alloc(1)
        allocator.free(row[req.kv.kv_committed_len - 1].reshape(1).to(taken.dtype))

    core.run(each_pass=When(partial(decoding, core), swap))


def row(core: Core) -> None:
    core.scheduler.req_to_token_pool.free_slots.pop()
    core.run()


def lock(core: Core) -> None:
    core.tree.lock(next(iter(core.tree.root_node.children.values())).id)
    core.run()


def waiting(core: Core) -> None:
    core.tree.tiers.queue.requests.arrived(-1)
    core.run()


def stage(core: Core) -> None:
    known = Prefix(None, pack_tokens(prompt(1, 200)[:150]))
    core.tree.tiers.capture.open(-1, known)
    core.run()


def staged_slot(core: Core) -> None:
    core.tree.tiers.host.stage(0.0)
    core.settle()


def pin(core: Core) -> None:
    host = core.tree.tiers.host
    host.pin(islice(host.tree.nodes(), 1))
    core.settle()


def second_slot(core: Core) -> None:
    core.scheduler.token_to_kv_pool_allocator.swa_attn_allocator.alloc(1)
    core.run()


def state(core: Core) -> None:
    core.scheduler.req_to_token_pool.mamba_allocator.alloc(1)
    core.run()


def end_slot(core: Core) -> None:
    core.tree.tiers.ends.stage()
    core.settle()


def planted(leave: Callable[[Core], None]) -> None:
    core = Core("--hc-forms", "hidden", *SMALL)
    core.ask(prompt(1, 200), 8)
    core.settle()
    leave(core)


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (slot_while_idle, "memory leak detected"),
        (slot_while_busy, "Pool Mem Leak Detected"),
        (slot_of_another, "use-after-free"),
        (row, "req_to_token_pool memory leak"),
        (lock, "a lock is left"),
        (waiting, "somebody waits"),
        (stage, "host slots are left"),
        (staged_slot, "a staged slot is left"),
        (pin, "1 blocks are left pinned"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_is_left_behind_is_noticed(
    models: None, leave: Callable[[Core], None], said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        run_in_child(planted, leave)


def planted_beside_ends(model: str, leave: Callable[[Core], None]) -> None:
    core = Core(*SMALL, *prepared(Path(model).name, model), model=model)
    core.ask(prompt(1, 200), 8)
    core.settle()
    leave(core)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "leave", "said"),
    [
        ("gpt-oss-96", second_slot, "memory leak detected"),
        ("gpt-oss-96", end_slot, "a staged slot of an end part is left"),
        ("qwen3-next", state, "memory leak detected"),
        ("qwen3-next", end_slot, "a staged slot of an end part is left"),
    ],
)
def test_what_is_left_of_ends_and_their_pools_is_noticed(
    tmp_path: Path, name: str, leave: Callable[[Core], None], said: str
) -> None:
    KINDS[name].make(tmp_path)
    with pytest.raises(AssertionError, match=said):
        run_in_child(planted_beside_ends, str(tmp_path / name), leave)
