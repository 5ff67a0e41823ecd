"""The device tree of a model with sliding windows that have a pool of their own in SGLang.

A token has two device slots: one for the layers with full attention, and as long as it is in
somebody's window a second one for the others. A path can be continued where the second slots of its
last tokens are there. They are kept in whole blocks here (`EndLayout.blocks`), which may reach a
little further back than the window, so that what is saved of a block is all of its rows.

SGLang frees second slots while a request runs. This is held back, so that those before the last
whole block are there when the request ends: at most a block's more of each running request. Where
they run out, nothing is held back any more, at the price of an end: SGLang would end the last
request that runs with an error.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import EvictDeviceNextNodeResult

from sglang_hc.capture.ends import EndRows
from sglang_hc.forms import BLOCK_TOKENS, EndLayout
from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.guard import SglangMethod, SglangTree, method
from sglang_hc.srt.tree.device_tree import DeviceTree

SWA = ComponentType.SWA

LATE = 4
"""Passes that SGLang may be ahead of what it knows of a request."""


class Grown(NamedTuple):
    """What `grow` added to a path.

    node: at its end. there: of its tokens so many had their slots. slots: those of the others.
    ranges: tokens [begin, end) that have new second slots; windows: these, in their order.
    """

    node: int
    there: int
    slots: torch.Tensor
    ranges: list[tuple[int, int]]
    windows: torch.Tensor


class WindowTree(DeviceTree):
    """Belongs to the scheduler thread. ends: what an end needs; None where all layers have full
    attention."""

    ends: EndLayout | None = None
    ahead_of_decode = 2
    """Slots that SGLang takes ahead for a request that decodes; more where it verifies tokens."""
    _freed: tuple[Any, int, torch.Tensor] | None = None
    """Of the row that is given back now: whose it is, and the second slots that its last tokens
    had, from this one on."""

    @property
    def kept(self) -> int:
        """Tokens before an end whose second slots it needs."""
        return self.ends.blocks * BLOCK_TOKENS if self.ends is not None else 0

    @property
    def brought_back(self) -> int:
        """Tokens before an end whose second slots come back: a window, in whole pages, which is
        what SGLang's lock on the end holds. Others could leave for somebody else while their rows
        are on the way."""
        page, window = self.page_size, self.swa_retain_window or 0
        return min(self.kept, -(-window // page) * page)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._chunk: int | None = params.chunked_prefill_size

    def has_space_for(self, windows: int, new: int) -> bool:
        """Whether the pool is large enough that a request with `new` tokens to compute gets so many
        second slots beside those that SGLang's admission counts, whatever else it holds. In a
        smaller one it would wait for ever."""
        window, page = self.sliding_window_size, self.page_size
        computed = min(new, self._chunk) if self._chunk and self._chunk > 0 else new
        counted = max(computed, window) + page + windows
        locked = window  # behind its prefix on the device
        return bool(counted + locked < self.token_to_kv_pool_allocator.size_swa)

    # -- hold back -------------------------------------------------------------------------------

    @method()
    def swa_retain_floor(self, theirs: SglangMethod, req: Any) -> int | None:
        """SGLang frees no second slots of a running request from this token on."""
        floor: int | None = theirs(req)
        if self.ends is None or self._is_short():
            return floor
        own = fields.settled_tokens(req) // BLOCK_TOKENS * BLOCK_TOKENS - self.kept
        return own if floor is None else min(own, floor)

    @method()
    def release_swa_prefix_lock(self, theirs: SglangMethod, req: Any) -> None:
        """SGLang lets the windows of a prompt go when a reply is longer than a window: a block
        later."""
        late = fields.decode_steps(req) >= self.kept + BLOCK_TOKENS + LATE
        if self.ends is None or late or self._is_short():
            theirs(req)

    def give_way(self, requests: list[Any]) -> None:
        """Second slots are lacking and nothing can leave: what is held back of requests that decode
        goes, and what SGLang frees only together with more of them."""
        if self.ends is None or not self._is_short():
            return
        for req in requests:
            if fields.decode_steps(req) >= 1:  # the pass before that may still run
                self.evict_sliding_windows(req, fields.settled_tokens(req))

    def _is_short(self) -> bool:
        """Whether second slots may run out before SGLang asks again what it may free: in this pass
        and in the next one."""
        rows, allocator = self.req_to_token_pool, self.token_to_kv_pool_allocator
        free = allocator.swa_available_size() + self.swa_evictable_size()
        running = rows.size - rows.available_size()
        page = self.page_size
        most = max(LATE, (page - 1 + self.ahead_of_decode) // page * page)
        return bool(free < 2 * running * most)

    @method()
    def free_kv_row(self, theirs: SglangMethod, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """A request gives its slots back: it is over, or is queued again. What its second slots
        were is noted, for it is forgotten with them."""
        noted = self._freed is not None and self._freed[0] is kv
        if self.ends is not None and ranges and not noted:
            stop = ranges[-1][1]
            first = max(0, stop - self.kept - BLOCK_TOKENS)
            row = self.req_to_token_pool.req_to_token[fields.row_of_record(kv), first:stop]
            self._freed = kv, first, self._second(row)
        theirs(kv, ranges)

    def end_rows(self, req: Any, length: int) -> EndRows | None:
        """What is needed to go on behind whole blocks of the first `length` tokens of a request, as
        much of it as is there; None where there is no whole block."""
        stop, prompt = length // BLOCK_TOKENS * BLOCK_TOKENS, fields.prompt_tokens(req)
        if self.ends is None or not stop:
            return None
        first = max(0, self._first_window(req))
        freed = self._freed
        if freed is not None and fields.is_record_of(freed[0], req):
            first = max(first, freed[1])
            if stop <= first:  # an end before these: nobody knows any more
                return None
            return EndRows(first, freed[2][first - freed[1] : stop - freed[1]], prompt)
        row = self.req_to_token_pool.req_to_token[fields.row_of(req), first:stop]
        return EndRows(first, self._second(row), prompt)

    def _first_window(self, req: Any) -> int:
        """First token from which on all tokens of a request have second slots."""
        first, freed = fields.tokens_in_tree(req), fields.freed_windows(req)
        if freed > first:
            return freed
        node = self.node(fields.prefix_node(req))
        while first > 0 and node.parent is not None:
            if node.component_data[SWA].value is None:
                break
            first -= len(node.key)
            node = node.parent
        return first

    def _second(self, slots: torch.Tensor) -> torch.Tensor:
        """(n,) int64 second slots of tokens with these slots; 0 where there is none."""
        allocator = self.token_to_kv_pool_allocator
        return allocator.translate_loc_from_full_to_swa(slots.to(torch.int64)).to(torch.int64)

    # -- grow ------------------------------------------------------------------------------------

    def grow(self, before: torch.Tensor, key: RadixKey, priority: int = 0) -> Grown | None:
        """Have the path of `key` on the device, so that it can be continued there: slots for what
        it lacks, second slots for what they lack before its end. before: (n,) int64 slots of its
        first tokens, which are locked. priority: of whose it is.

        None where there is no room, or the tree has changed since. Else all rows of new slots are
        to be written, or `take_back` is called.
        """
        core, key = self.tree_core, self.positions_of(key)
        stop = len(key)
        there, deepest, _ = core.match_full_device_prefix(key)
        if there < len(before):
            return None
        lock = self.lock(deepest)  # what is there must not leave for what is not
        try:
            low = max(0, stop - self.brought_back)
            if not self._make_room(stop - there, stop - max(low, there) + self._holes(key, there)):
                return None
            holes = core.swa_tombstone_ranges(key, low, there)  # one more may have left
            ranges = [*holes, (max(low, there), stop)] if stop > there else holes
            path = self.path_device_indices(deepest)[:there]
            taken = self._take(stop - there, sum(end - begin for begin, end in ranges))
            if taken is None:
                return None
            slots, windows = taken
            done = 0
            for begin, end in holes:
                own = windows[done : done + end - begin]
                done += end - begin
                self._apply_cache_actions(core.attach_swa_window(key, begin, end, own))
                self._pair(path[begin:end], own)
            if stop > there:
                self._pair(slots[len(slots) - len(windows) + done :], windows[done:])
                value = torch.cat([path, slots])
                params = InsertParams(key, value, prev_prefix_len=there, inserted_len=there)
                params.priority = priority
                params.set_evicted_seqlen(SWA, low)
                self.insert(params)
        finally:
            self.unlock(lock)
        found = SglangTree.match_prefix(self, MatchPrefixParams(key=key))
        grown = Grown(found.last_device_node, there, slots, ranges, windows)
        if found.device_prefix_len < stop:
            self.take_back(key, grown)
            raise AssertionError(f"{found.device_prefix_len} of {stop} tokens are on the device")
        return grown

    def allocate_apart(self, slots: int, windows: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(n,) int64 free slots of each kind, for which others may leave, none of which is another
        one's second slot; None where there is no room."""
        return self._take(slots, windows) if self._make_room(slots, windows) else None

    def take_back(self, key: RadixKey, grown: Grown) -> None:
        """The rows of new slots will not be written: take them out of the tree."""
        nodes, end = list(self.path_of(key)), len(self.positions_of(key))
        for node in reversed(nodes):
            begin = end - len(node.key)
            if begin >= grown.there:
                self.remove(node.id)
            elif any(low <= begin < high for low, high in grown.ranges):
                self._empty_window(node)
            end = begin

    def _empty_window(self, node: Any) -> None:
        core, data = self.tree_core, node.component_data[SWA]
        size = core.components_by_type[SWA].reclaimable_value_len(node)
        if data.lock_ref:  # SGLang takes what leaves from what could leave
            core.component_protected_size_[SWA] -= size
            core.component_evictable_size_[SWA] += size
        gone = EvictDeviceNextNodeResult()
        core._evict_component_and_detach_lru(
            node, core.components_by_type[SWA], device_frees=gone.device_frees,
            host_frees=gone.host_frees, cache_actions=gone.cache_actions,
        )  # fmt: skip
        self._apply_eviction_result(gone)

    def _holes(self, key: RadixKey, there: int) -> int:
        """How many of the last tokens before the end, which are there, have no second slots."""
        low = max(0, len(key) - self.brought_back)
        holes = self.tree_core.swa_tombstone_ranges(key, low, there)
        return sum(end - begin for begin, end in holes)

    def _make_room(self, slots: int, windows: int) -> bool:
        """Have others leave for so many slots of each kind."""
        allocator = self.token_to_kv_pool_allocator
        short = max(0, slots - allocator.full_available_size())
        windows_short = max(0, windows - allocator.swa_available_size())
        if short or windows_short:
            self.evict_for_alloc(EvictParams(num_tokens=short, swa_num_tokens=windows_short))
        full, window = allocator.full_available_size(), allocator.swa_available_size()
        return bool(full >= slots and window >= windows)

    def _take(self, slots: int, windows: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Free slots of each kind, (n,) int64; None where there are not so many."""
        allocator = self.token_to_kv_pool_allocator
        if allocator.swa_available_size() < windows:
            return None
        own = allocator.full_attn_allocator.alloc(slots).to(torch.int64)
        second = allocator.swa_attn_allocator.alloc(windows).to(torch.int64)
        allocator.clear_full_to_swa_mapping(own)
        return own, second

    def _pair(self, slots: torch.Tensor, windows: torch.Tensor) -> None:
        if len(windows):
            last = slots[len(slots) - len(windows) :]
            self.token_to_kv_pool_allocator.set_full_to_swa_mapping(last, windows)
