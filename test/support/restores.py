"""A host pool full of random bytes, and what a restoration must make of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.restore.path import Restoration
from sglang_hc.store.host_pool import HostPool
from sglang_hc.tree.block_tree import BlockNode
from support.tiers import HIDDEN_BYTES, PARTS, project

FRAME = BLOCK_TOKENS * sum(PARTS)
"""Bytes of a frame: one block as KV, two as hidden states."""


def filled_pool(plan: LayerPlan, slots: int) -> HostPool:
    layout = BlockLayout(plan, StateShape(plan.num_layers, HIDDEN_BYTES, PARTS, "uint8"))
    pool = HostPool(layout, slots)
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(0, 256, pool.bytes.shape, dtype=torch.uint8, generator=generator)
    torch.from_numpy(pool.bytes).copy_(drawn)
    return pool


def nodes_in(slots: Sequence[int]) -> tuple[BlockNode, ...]:
    nodes = []
    for number, slot in enumerate(slots):
        node = BlockNode(None, b"\0" * 4 * BLOCK_TOKENS, number.to_bytes(2, "big"), None)
        node.slot = slot
        nodes.append(node)
    return tuple(nodes)


def expected(pool: HostPool, restoration: Restoration, layer: int) -> list[torch.Tensor]:
    """K/V rows of a restoration's tokens, read from the host pool one by one."""
    plan = pool.layout.plan
    places = [
        (restoration.nodes[t // BLOCK_TOKENS].slot, t % BLOCK_TOKENS)
        for t in range(restoration.start, restoration.stop)
    ]
    if layer in plan.hidden_layers:
        hidden = torch.stack([torch.from_numpy(pool.hidden)[s, layer, r] for s, r in places])
        return project(layer, hidden, torch.arange(restoration.start, restoration.stop))
    parts = [torch.from_numpy(part)[:, layer - plan.hidden] for part in pool.kv]
    return [torch.stack([part[s, r] for s, r in places]) for part in parts]
