"""How far the host tier knows a prompt beyond what the device has, without comparing it twice.

The device tree has compared a prompt with its own path. Where the host tier was found to hold that
path is noted on the device node, so that only what is new is packed and compared. The blocks of the
last prompt looked up are kept for its admission, which follows in the same scheduling pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout
from sglang_hc.srt.binding import fields
from sglang_hc.srt.requests.images import marks_of, path_ids
from sglang_hc.tree.block_tree import BlockNode, PathMatch
from sglang_hc.tree.ends import EndPart, Ends
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import Prefix, pack_tokens

NOTE = "hc_block"
"""Attribute of a device node: the last whole block, or root, of its path that the host tier was
found to have, and the tokens up to that block's end."""

UNSEEN: tuple[BlockNode | None, int] = (None, 0)


class Found(NamedTuple):
    """The longest servable prefix of a request's prompt; `last` holds its end."""

    req: Any
    last: BlockNode
    tokens: int


class HostMatch:
    """Look-ups of one device tree in the host tier. Belongs to the scheduler thread."""

    def __init__(self, host: HostTier, layout: BlockLayout, ends: Ends | None = None) -> None:
        """ends: where paths can be continued; None where all layers have full attention, and they
        can be everywhere."""
        self._tree = host.tree
        self._ends = ends
        self._lag = layout.draft.lag
        """Tokens behind a position that its state depends on as well."""
        self._found: Found | None = None
        self.last_block_end = 0
        """Tokens of the whole blocks of the path that was looked up last."""

    def tokens(self, req: Any, key: RadixKey, device_node: Any, on_device: int) -> int:
        """Positions of a request's `key` that the host tier can serve.

        The device matched the first `on_device` of them, to the end of `device_node`. The key
        counts positions: with a draft model of the EAGLE family it has one token more.
        """
        self.last_block_end = 0
        root = self._tree.known_root(fields.namespace_of(key))
        if root is None:
            return 0
        block, known = _noted(device_node) or (root, 0)
        ids, end, below = path_ids(req, key.token_ids), len(key) + self._lag, self._tree.below
        # Mostly the host tier has no more than the device: then one block more tells.
        near = known + ((on_device - known) // BLOCK_TOKENS + 1) * BLOCK_TOKENS
        nodes, count = below(block, pack_tokens(ids[known : min(near, end)]))
        if known + count == near:
            further, more = below(nodes[-1], pack_tokens(ids[near:end]))
            nodes, count = nodes + further, count + more
        served, count = PathMatch(tuple(nodes), count).ready
        shared = min(count, on_device - known) // BLOCK_TOKENS
        if shared:
            setattr(device_node, NOTE, (served[shared - 1], known + shared * BLOCK_TOKENS))
        last, total = served[-1] if served else block, known + count
        self.last_block_end = total // BLOCK_TOKENS * BLOCK_TOKENS
        if self._ends is not None:
            last, total = self._up_to_end(last, total)
        self._found = Found(req, last, total)
        marks = marks_of(req)
        return (total if marks is None else marks.cut(total)) - self._lag

    def _up_to_end(self, last: BlockNode, tokens: int) -> tuple[BlockNode, int]:
        """Where the path of the first `tokens` tokens, up to block `last`, can be continued: the
        last block before that place, or the root, and its tokens."""
        assert self._ends is not None
        path = last.path()[: tokens // BLOCK_TOKENS]
        count = self._ends.deepest(path)
        if count:
            return path[count - 1], count * BLOCK_TOKENS
        while last.parent is not None:
            last = last.parent
        return last, 0

    def parts(self, path: Sequence[BlockNode]) -> list[EndPart] | None:
        """What is needed to go on behind a path of whole blocks that are served; None where it is
        not there any more."""
        assert self._ends is not None
        if self._ends.deepest(path) < len(path):
            return None
        return self._ends.parts(path, len(path))

    def ready(self, prompt: Prefix) -> PathMatch:
        """What the host tier can serve of a prompt."""
        return self._tree.match(prompt).ready

    def blocks(self, req: Any, positions: int) -> Sequence[BlockNode] | None:
        """Blocks of the first positions of the request's prompt; None: not servable any more.

        The request is the one that was looked up last: SGLang admits it right behind that. While
        its last block is served its path is too.
        """
        found, tokens = self._found, positions + self._lag
        if found is None or found.req is not req or tokens > found.tokens or not found.last.ready:
            return None
        return found.last.path()[: -(-tokens // BLOCK_TOKENS)]


def _noted(node: Any) -> tuple[BlockNode, int] | None:
    """What is noted on the deepest node of a device path whose block is still served."""
    while node is not None:
        block, known = getattr(node, NOTE, UNSEEN)
        if block is not None and block.ready:
            return block, known
        node = node.parent
    return None
