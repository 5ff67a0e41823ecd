"""States of recurrent layers between SGLang's tree and the ends of host memory.

A node of the tree has slots for the K and V of its tokens, and may have a state: that of the
recurrent layers behind its last token, in a slot of another pool. A path can be continued behind a
node that has one. Who does gets a copy, in a slot of its own, in its first pass.

    saved      as soon as a node has a state, or a request that is retracted leaves one
    restored   at admission: the K and V of a path and the state behind it, or nothing. K and V that
               are on the device still are not restored again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.ends import Stay
from sglang_hc.policy.restore_plan import Reason, RestorePlan
from sglang_hc.srt.binding import fields
from sglang_hc.srt.model.state_pool import StatePool
from sglang_hc.tiers.tiers import States
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.ends import EndPart, Ends
from sglang_hc.tree.identity import Prefix, pack_tokens


class Inserted(NamedTuple):
    """A node of the tree that a path to be restored ends in. slots: of the tokens behind the
    request's prefix. resident: tokens of the path whose K and V were on the device already. own: a
    new slot for the request's copy of the node's state; None where the request had one."""

    node: int
    slots: torch.Tensor
    resident: int
    own: torch.Tensor | None


class TreeStates:
    """Belongs to the scheduler thread. `tree`: the `HcRadixCache` whose states these are."""

    def __init__(self, pool: StatePool, ends: Ends, moves: States) -> None:
        """moves: them, to and from end parts."""
        self._pool = pool
        self._ends = ends
        self._capture, self._restorer = moves.capture, moves.restorer

    # -- save ------------------------------------------------------------------------------------

    def keep_of_tree(self, tree: Any, req: Any, before: int) -> None:
        """The tree has taken what a request computed: the state at the end of that is kept, if the
        tree got one. before: tokens that the tree had of the request until then."""
        node, tokens = fields.prefix_node(req), fields.tokens_in_tree(req)
        slot = tree.tree_core.get_component_device_value(node, ComponentType.MAMBA)
        if slot is None:
            return
        stay = Stay.REPLY
        if tokens == fields.branch_of(req) and tokens > before:
            stay = Stay.SHARED
        elif not fields.is_over(req) and tokens > len(fields.prompt_of(req)) - BLOCK_TOKENS:
            stay = Stay.PROMPT
        self._keep(tree, req, tokens, slot, stay)

    def keep_of_request(self, tree: Any, req: Any) -> None:
        """A request gives up its slots, and the tree takes none of them: its last state is kept."""
        tracked = fields.tracked_state(tree, req)
        if tracked is not None:
            self._keep(tree, req, *tracked, Stay.REPLY)

    def _keep(self, tree: Any, req: Any, tokens: int, slot: torch.Tensor, stay: Stay) -> None:
        """slot: (1,) that of the state behind the first `tokens` tokens of a request."""
        path = Prefix(fields.namespace_of(req), pack_tokens(fields.first_ids(req, tokens)))
        if not self._capture.wants(path, stay):
            return
        slot = slot.clone()  # SGLang may give the slot, or this number, to another request
        tree.compute_stream.will_read(slot)
        with tree.compute_stream.entered():
            self._capture.keep(path, self._pool.read(slot), stay)

    def track_branch(self, tree: Any, result: MatchResult, known: int) -> MatchResult:
        """A match, whose request leaves a state where it leaves the path that was known before, so
        that the next one goes on from there. known: tokens of that path's blocks; the last place of
        them at which the model can leave one counts."""
        known -= known % tree.components[ComponentType.MAMBA].mamba_checkpoint_grid
        if known <= max(result.device_prefix_len, result.mamba_branching_seqlen or 0):
            return result
        return result._replace(mamba_branching_seqlen=known)

    # -- restore ---------------------------------------------------------------------------------

    def load_back(
        self, tree: Any, req: Any, blocks: Sequence[BlockNode], stop: int
    ) -> tuple[torch.Tensor, Any]:
        """Slots for the tokens from the end of the request's prefix to `stop`, the end of a path of
        `blocks` that can be continued there, and the node that has them; or none."""
        start = fields.prefix_length(req)
        if self._ends.deepest(blocks) < len(blocks):
            return tree.refuse(req, Reason.BLOCKS_GONE)
        (part,) = self._ends.parts(blocks, len(blocks))
        new = max(1, len(fields.prompt_of(req)) - stop)
        plan = tree.restorer.planner.choose(stop - start, start, new)
        if plan.tokens < stop - start:
            return tree.refuse(req, plan.reason)
        self._ends.pin((part,))  # making room on the device must not cost it
        try:
            inserted = self._insert(tree, req, stop, part)
            if inserted is None:
                return tree.refuse(req, Reason.NO_DEVICE_SLOTS)
            self._restore(tree, req, inserted, blocks, plan)
        finally:
            self._ends.unpin((part,))
        return inserted.slots, inserted.node

    def _insert(self, tree: Any, req: Any, stop: int, part: EndPart) -> Inserted | None:
        """A node at the end of the first `stop` tokens of a request's prompt, with slots for what
        the device lacks of them, and the state of `part`, which is written before anybody can find
        it. None where the device has no room."""
        start = fields.prefix_length(req)
        key = RadixKey(fields.prompt_of(req)[:stop], fields.namespace_of(req))
        resident, above, _ = tree.tree_core.match_full_device_prefix(key)
        lock = tree.lock(above)  # what is there already must not make room for the rest
        states: list[torch.Tensor | None] = []
        slots: torch.Tensor | None = None
        try:
            while len(states) < (1 if fields.has_state(req) else 2):
                states.append(self.allocate(tree))
            slots = None if None in states else tree.allocate(stop - resident)
            if slots is None:
                self._free(tree, states)
                return None
            self._write(tree, part, states[0])
            value = torch.cat([tree.path_device_indices(above)[:resident], slots])
            # Neither the slots of what is there nor its uses are counted again.
            params = InsertParams(key, value, prev_prefix_len=resident, inserted_len=resident)
            params.mamba_value, params.priority = states[0], fields.priority_of(req)
            result = tree.insert(params)
        except Exception:
            self._free(tree, states)
            if slots is not None:
                tree.token_to_kv_pool_allocator.free(slots)
            raise
        finally:
            tree.unlock(lock)
        if result.mamba_exist:
            self._free(tree, states[:1])
        node = result.last_device_node
        slots = tree.path_device_indices(node)[start:stop]
        return Inserted(node, slots, resident, states[1] if len(states) > 1 else None)

    def _write(self, tree: Any, part: EndPart, slot: torch.Tensor) -> None:
        """Have the device write the state of `part` to a slot that nobody reads yet."""
        tree.compute_stream.will_read(slot)
        with tree.compute_stream.entered():
            self._restorer.restore(part, slot)

    def _restore(
        self, tree: Any, req: Any, inserted: Inserted, blocks: Sequence[BlockNode],
        plan: RestorePlan,
    ) -> None:  # fmt: skip
        """Queue the K and V that a node lacks, and have the request go on with a copy of its state.
        After an error what is not restored is taken out: nobody may read it."""
        start, restorer = fields.prefix_length(req), tree.restorer
        stop, queued = start + len(inserted.slots), restorer.num_queued
        try:
            missing = [(max(start, inserted.resident), stop)] if inserted.resident < stop else []
            before = fields.prefix_slots(tree, req)
            tree.queue_restorations(blocks, inserted.slots, inserted.node, before, plan, missing)
            tree.reporting.restored(req, blocks, plan, start, stop)
            if tree.audit is not None:
                tree.audit.restored(req, blocks, start, stop)
        except Exception:
            restorer.unqueue(queued)
            if inserted.resident < stop:
                tree.remove(inserted.node)
            self._free(tree, [inserted.own])
            raise
        source = tree.tree_core.get_component_device_value(inserted.node, ComponentType.MAMBA)
        fields.go_on_with_state(req, inserted.own, source)
        if fields.was_retracted(req):
            restorer.counters["retracted_restored_tokens"] += stop - start

    def allocate(self, tree: Any) -> torch.Tensor | None:
        """(1,) a slot for a state, for which others may leave; None: there is no room."""
        allocator = tree.req_to_token_pool.mamba_allocator
        slot = allocator.alloc(1)
        if slot is None:
            tree.evict(EvictParams(num_tokens=0, mamba_num=1))
            slot = allocator.alloc(1)
        return slot

    def _free(self, tree: Any, slots: Sequence[torch.Tensor | None]) -> None:
        for slot in slots:
            if slot is not None:
                tree.req_to_token_pool.mamba_allocator.free(slot)
