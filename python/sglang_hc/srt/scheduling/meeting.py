"""A prompt's chunks while the end of its history is read from below (`queue/meeting.py`).

SGLang computes a long prompt in chunks. Here a request that meets its stored history is given short
chunks, and between two of them what has come is restored in place of being computed. SGLang sees a
request whose prefix has grown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.meeting import Action, Meeting
from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.scheduling.chunks import (
    admit_nobody_behind,
    cut_between_blocks,
    cut_where_it_branches,
    has_slots,
)
from sglang_hc.srt.tree.ahead import restorable
from sglang_hc.srt.tree.tree_backend import HcRadixCache

UNLIMITED = 1 << 62
"""Tokens of a chunk that need not end early."""


def add_one_req(
    original: Callable[..., Any],
    self: Any,
    req: Any,
    has_chunked_req: bool,
    truncation_align_size: int | None,
) -> Any:
    """AROUND PrefillAdder.add_one_req: the first chunk ends where the history is to be met.

    Nobody is added behind such a chunk in this pass: only one request at a time may be cut.
    """
    tree = self.tree_cache
    if not isinstance(tree, HcRadixCache):
        return original(self, req, has_chunked_req, truncation_align_size)
    tree.promise(req)
    chunks = self.rem_chunk_tokens is not None
    meeting = tree.meetings.of(serial_of(req)) if chunks else None
    if meeting is not None:
        head = fields.prefix_length(req) + fields.host_hit(req)
        step = tree.meetings.next(serial_of(req), head)
        if step.action is Action.RESTORE and meeting.path_to(head) is not None:
            # The scheduler makes room for it as for any host hit, and calls `init_load_back`.
            stop = restorable(meeting, req, tree.page_size)
            fields.set_host_hit(req, max(0, stop - fields.prefix_length(req)))
        elif step.action is not Action.OVER:
            # What is here already joins behind a first chunk.
            tokens = _aligned(tree, head, max(step.tokens, BLOCK_TOKENS))
            self.rem_chunk_tokens = min(self.rem_chunk_tokens, tokens)
    if not has_chunked_req:  # only one at a time may be cut
        cut_where_it_branches(tree, self, req)
    truncation_align_size = cut_between_blocks(tree, self, truncation_align_size)
    answer = original(self, req, has_chunked_req, truncation_align_size)
    admit_nobody_behind(tree, self, self.new_chunked_req)
    return answer


def add_chunked_req(original: Callable[..., Any], self: Any, req: Any):
    """AROUND PrefillAdder.add_chunked_req: restore the rest if it is here, compute a part of it,
    or, as SGLang does with sliding windows, return the request without adding it to this batch."""
    tree = self.tree_cache
    if not isinstance(tree, HcRadixCache) or self.rem_chunk_tokens is None:
        return original(self, req)
    meeting = tree.meetings.of(serial_of(req))
    tokens = UNLIMITED
    if not has_slots(self, req, meets=meeting is not None):
        tokens = 0
    elif meeting is not None:
        tokens = _between_chunks(tree, meeting, req)
    self.rem_chunk_tokens = min(self.rem_chunk_tokens, tokens)
    if not tokens:
        return req  # nor may anybody else be cut meanwhile
    cut_between_blocks(tree, self, None)
    cut = original(self, req)
    admit_nobody_behind(tree, self, cut)
    return cut


def _between_chunks(tree: HcRadixCache, meeting: Meeting, req: Any) -> int:
    """Tokens that the next chunk may have; 0 for no chunk in this pass."""
    head = fields.prefix_length(req)
    if head != fields.tokens_in_tree(req):  # the last page is not full: nothing can follow it
        return _aligned(tree, head, 1)
    meetings = tree.meetings
    if not meeting.is_here(head) and tree.ahead.restore_what_came(tree, meeting, req, head):
        return 0  # the next pass sees what came meanwhile
    if fields.middle_chunks_under_way(req) and not (meetings.decoding or meeting.is_here(head)):
        # With overlap scheduling the last chunk is still running: once it is over more will be
        # here. SGLang takes its result in before the next pass.
        return 0
    step = meetings.next(serial_of(req), head)
    if step.action is Action.RESTORE:
        slots, node = tree.load_met(meeting, req) or ((), None)
        if len(slots):
            fields.go_on_behind(tree, req, slots, node)
            tree.drop(req)  # its state is saved from there on
        return UNLIMITED
    if step.action is Action.OVER:
        return UNLIMITED
    if step.action is Action.WAIT:
        return 0
    tree.prerestored.drop_before(serial_of(req), head + step.tokens)
    return _aligned(tree, head, step.tokens)


def _aligned(tree: HcRadixCache, head: int, tokens: int) -> int:
    """So many tokens or more, so that the chunk ends with a block and with a page."""
    unit = math.lcm(BLOCK_TOKENS, tree.page_size)
    return -(-(head + tokens) // unit) * unit - head
