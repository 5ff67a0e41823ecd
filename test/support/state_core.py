"""SGLang's engine with recurrent layers on a CPU, and a conversation of two turns with it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sglang_hc.tree.namespaces import client_namespace
from support import state_kernels, state_model
from support.core import Core, Reply
from support.prompts import NO_PROCESSOR, SMALL, prompt
from support.ranked_core import RankedCore

STATES = "--max-mamba-cache-size", "24", "--max-running-requests", "4"
"""A request that runs needs three states, and one that it began with is the tree's."""

PROMPT, MORE = prompt("state", 300), prompt("more", 90)
KEPT = 320
"""Tokens up to the last state of the first turn of a model that leaves one each 64 tokens: the
prompt has one at 256, the reply at 320."""


Start = Callable[..., Core]
"""Starts an engine with a model and flags."""

Spoil = Callable[[Core, str], None]
"""Puts something wrong into host memory, of the conversation with this salt."""


def engine(model: str, *flags: str, **options: Any) -> Core:
    """model: path of one of `state_model`."""
    state_kernels.use()
    if Path(model).name in state_model.PUBLISHED:
        flags = *flags, *NO_PROCESSOR
    return Core(*SMALL, *STATES, *flags, model=model, **options)


def engine_of_rank(rank: int, port: int, model: str, *flags: str) -> RankedCore:
    """The same, one of two ranks."""
    state_kernels.use()
    return RankedCore(rank, port, *SMALL, *STATES, *flags, model=model)


def kept_of(model: str) -> int:
    """As KEPT, of any model."""
    step = state_model.step_of(model)
    return (len(PROMPT) + 23) // step * step


def history(first: list[int]) -> list[int]:
    """The prompt of the second turn, given the reply to the first."""
    return [*PROMPT, *first, *MORE]


def on_device(core: Core, tokens: list[int], name: str | None) -> list[torch.Tensor]:
    """What the device has behind the last state of a path: K and V of all `tokens`, which end
    there, and the state, as bytes of all layers. name: the salt of the conversation."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    tree, key = core.tree, RadixKey(array("q", tokens), client_namespace(None, name))
    node = tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
    slots = tree.path_device_indices(node).long()
    state = tree.tree_core.get_component_device_value(node, ComponentType.MAMBA)
    assert state is not None and len(slots) == len(tokens), f"{len(slots)} tokens are on the device"
    pool = core.scheduler.token_to_kv_pool_allocator.get_kvcache()
    cache, full = pool.mamba_pool.mamba_cache, pool.full_kv_pool
    rows = full.kv_buffer if hasattr(full, "kv_buffer") else (*full.k_buffer, *full.v_buffer)
    states = [part[:, state].clone() for part in (*cache.conv, cache.temporal)]
    return [*(layer[slots].clone() for layer in rows), *states]


def by_transformers(model: str) -> list[list[int]]:
    """The replies of another implementation, in which a prompt is never continued."""
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    loaded.generation_config.eos_token_id = None

    def ask(tokens: list[int]) -> list[int]:
        ids = torch.tensor([tokens])
        with torch.no_grad():
            found = loaded.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
            )
        return [int(token) for token in found[0, len(tokens) :]]

    first = ask(PROMPT)
    return [first, ask(history(first))]


class Told(NamedTuple):
    """Both replies. same: whether the device had the same bytes before and after. stats: behind
    them."""

    first: list[int]
    second: Reply
    same: bool
    stats: dict[str, Any]


def never_evicted(model: str, *flags: str, start: Start = engine) -> list[list[int]]:
    """The replies of SGLang alone, which keeps states as often."""
    steps = "--mamba-track-interval", str(state_model.step_of(model))
    core = start(model, *flags, "--hc-disable", *steps)
    first = core.ask(PROMPT, 24).tokens
    return [first, core.ask(history(first), 24).tokens]


def evicted(
    model: str, *flags: str, spoils: Sequence[Spoil | None] = (None,), start: Start = engine
) -> list[Told]:
    """Others write over everything on the device between the turns of a conversation for each of
    `spoils`, which is called before the second one."""
    core, found, kept = start(model, *flags), [], kept_of(model)
    for number, spoil in enumerate(spoils):
        name = f"talk {number}"
        first = core.ask(PROMPT, 24, name).tokens
        told = history(first)
        before = on_device(core, told[:kept], name)
        core.push_out()
        if spoil is not None:
            spoil(core, name)
        second = core.ask(told, 24, name)
        core.settle()
        same = all(map(torch.equal, before, on_device(core, told[:kept], name)))
        found.append(Told(first, second, same, core.tree.stats()))
    return found


def ends(core: Core, name: str | None) -> list[Any]:
    """End parts of a conversation, the first one first."""
    names = client_namespace(None, name)
    known = core.tree.tiers.host.tree.nodes(lambda found: found == names)
    path = max((node.path() for node in known), key=len)
    return [node.end for node in path if node.end is not None]


def copy_state(core: Core, source: Any, target: Any) -> None:
    """Have one end part the bytes of another; None: none at all."""
    core.tree.tiers.drain()
    for part in core.tree.tiers.states.restorer.rows:
        part[target.slot] = 0 if source is None else part[source.slot]


def stale(core: Core, name: str) -> None:
    """The state of an earlier place of the path."""
    earlier, last = ends(core, name)
    copy_state(core, earlier, last)


def another(core: Core, name: str) -> None:
    """The state of somebody else."""
    copy_state(core, ends(core, "flood")[-1], ends(core, name)[-1])


def missing(core: Core, name: str) -> None:
    """No state at all."""
    copy_state(core, None, ends(core, name)[-1])


def without_a_layer(core: Core, name: str) -> None:
    """The state of all recurrent layers but the last one."""
    core.tree.tiers.drain()
    for part in core.tree.tiers.states.restorer.rows:
        part[ends(core, name)[-1].slot][-1] = 0
