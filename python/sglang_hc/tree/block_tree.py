"""The tree of blocks held in host memory: which token paths are there, found by their tokens.

A path through the tree is a token prefix; every edge is one block. Only full blocks have children.
A block shorter than BLOCK_TOKENS is the tail of a conversation. Siblings are an antichain: no
sibling's tokens are a prefix of another's, so one path answers every lookup, and a lookup can use
the first rows of a block whose later tokens differ (a state depends only on the tokens before it).

Tokens are compared, not only their hashes: the identity (`identity.py`) names blocks on disk, where
tokens are not at hand. Structure only: slots and eviction are in `host_tier.py`. No I/O.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.tree.identity import (
    BLOCK_BYTES,
    TOKEN_BYTES,
    BlockPath,
    Prefix,
    block_id,
    block_ids,
    root_id,
)

_tokens_of = attrgetter("tokens")


class Moved(NamedTuple):
    """Where a block came from whose state was computed at other positions.

    origin: identity under which the state was computed. shift: tokens by which it was further from
    the start there.
    """

    origin: bytes
    shift: int


class EndPart:
    """What layers without full attention keep of one block.

    node: the block; it may have left the tree. slot: in the pool of end parts; -1 once it is free.
    ready: the bytes are complete, and the block is in the tree. pins: who reads or writes the slot,
    which is not used again meanwhile. ends: those that need it. source: the tier below that its
    bytes came from; HOST for what was computed here. below: as of a `BlockNode`.
    """

    __slots__ = ("below", "ends", "node", "pins", "ready", "slot", "source")

    def __init__(self, node: BlockNode, slot: int) -> None:
        self.node = node
        self.slot = slot
        self.ready = False
        self.pins = 0
        self.source = SourceTier.HOST
        self.below = False
        self.ends: dict[Any, None] = {}
        """In the order in which they came, which is the same on all ranks."""


class BlockNode:
    """One block of one path.

    tokens: packed token ids, at most BLOCK_TOKENS; empty for a namespace's root.
    slot: index of the block's slot in the host pool; -1 only for roots and detached nodes.
    parent: None for a root, and for a block that has left the tier.
    ready: the slot's bytes are complete; a block is not served before. Ends when the block leaves
        the tree.
    pins: users of the slot (restorations, copies); a pinned block is not evicted or reused.
    source: the tier below that its bytes came from; HOST for a block that was computed here.
    below: it was written below, or came from there; it may have left there since.
    moved: its state was taken over from another place; None for state computed on this path.
    end: what layers without full attention keep of it; None where they keep nothing (`ends.py`).
    """

    __slots__ = (
        "below",
        "block_id",
        "children",
        "end",
        "moved",
        "namespace",
        "parent",
        "pins",
        "ready",
        "slot",
        "source",
        "tokens",
    )

    def __init__(
        self, parent: BlockNode | None, tokens: bytes, block_id: bytes, namespace: str | None
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block_id = block_id
        self.namespace = namespace
        self.children: list[BlockNode] | None = None
        self.slot = -1
        self.source = SourceTier.HOST
        self.below = False
        self.ready = False
        self.moved: Moved | None = None
        self.end: EndPart | None = None
        self.pins = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def is_full(self) -> bool:
        return len(self.tokens) == BLOCK_BYTES

    @property
    def is_root(self) -> bool:
        return not self.tokens

    @property
    def is_leaf(self) -> bool:
        return not self.children

    def branch(self) -> list[BlockNode]:
        """This block and all below it, each before its children."""
        nodes = [self]
        for node in nodes:  # which grows meanwhile
            nodes += node.children or ()
        return nodes

    def path(self) -> list[BlockNode]:
        """Blocks from below the root down to this one."""
        nodes: list[BlockNode] = []
        node: BlockNode | None = self
        while node is not None and not node.is_root:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class PathMatch(NamedTuple):
    """Longest known prefix. `nodes` cover `tokens` tokens; the last may be covered in part."""

    nodes: tuple[BlockNode, ...]
    tokens: int

    def branches_at(self, prefix: Prefix) -> int:
        """Tokens behind which a prefix, of which this is the match, leaves what is known; 0 where
        it continues a path, or is known."""
        if not self.nodes or self.tokens == prefix.num_tokens:
            return 0
        last, rows = self.nodes[-1], self.tokens - (len(self.nodes) - 1) * BLOCK_TOKENS
        return self.tokens if last.children or rows < last.num_tokens else 0

    @property
    def ready(self) -> PathMatch:
        """The part of it that can be served: up to the first block that is not ready."""
        for index, node in enumerate(self.nodes):
            if not node.ready:
                return PathMatch(self.nodes[:index], index * BLOCK_TOKENS)
        return self


class Insertion(NamedTuple):
    """Outcome of `BlockTree.insert`.

    node: the block that now stands for the tokens.
    created: False when an equal block, or one that continues these tokens, was already there.
    superseded: a shorter tail that the new block replaces; it has left the tree.
    """

    node: BlockNode
    created: bool
    superseded: BlockNode | None


def common_tokens(a: bytes, b: bytes) -> int:
    """Number of leading tokens two packed sequences share."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit // TOKEN_BYTES
    low, high = 0, limit // TOKEN_BYTES  # a[:low] equal, a[:high] not
    while high - low > 1:
        middle = (low + high) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low


class BlockTree:
    """All paths of all namespaces of one (model, layer plan).

    Not thread-safe: the scheduler thread owns it. `fingerprint` keys every block's identity.
    """

    def __init__(self, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint
        self._roots: dict[str | None, BlockNode] = {}
        self.num_blocks = 0

    def root(self, namespace: str | None) -> BlockNode:
        """Root of a namespace, made on first use."""
        node = self._roots.get(namespace)
        if node is None:
            node = BlockNode(None, b"", root_id(self.fingerprint, namespace), namespace)
            self._roots[namespace] = node
        return node

    def known_root(self, namespace: str | None) -> BlockNode | None:
        """Root of a namespace that has blocks; None when it has none. Changes nothing."""
        root = self._roots.get(namespace)
        return root if root is not None and root.children else None

    def match(self, prefix: Prefix) -> PathMatch:
        """The longest part of a prefix that is known, ready or not. Changes nothing."""
        root = self._roots.get(prefix.namespace)
        if root is None:
            return PathMatch((), 0)
        nodes, count = self.below(root, prefix.tokens)
        return PathMatch(tuple(nodes), count)

    def below(self, node: BlockNode, tokens: bytes) -> tuple[list[BlockNode], int]:
        """Longest prefix of packed `tokens` under a full block or root: its blocks, its length."""
        nodes: list[BlockNode] = []
        start = 0
        while start < len(tokens) and node.children:
            children = node.children
            child = children[0]
            # Most blocks have one successor; comparing in place there makes long paths cheap.
            if len(children) == 1 and child.is_full and tokens.startswith(child.tokens, start):
                shared = BLOCK_TOKENS
            else:
                child, shared = _closest(children, tokens[start : start + BLOCK_BYTES])
            if shared == 0:
                break
            nodes.append(child)
            start += shared * TOKEN_BYTES
            if shared < BLOCK_TOKENS:
                break
            node = child
        return nodes, start // TOKEN_BYTES

    def identities(self, prefix: Prefix) -> list[bytes]:
        """Every block that computing a prefix could use, in path order, in the tree or not.

        The whole blocks of the path, and a known block that shares only its first rows. Hashes
        what the tree does not know, under a microsecond per block.
        """
        return self.path(prefix)[0]

    def path(self, prefix: Prefix) -> tuple[list[bytes], BlockPath]:
        """`identities` of a prefix, and its path, which has its whole blocks alone."""
        match = self.match(prefix)
        whole = match.tokens // BLOCK_TOKENS
        ids = [node.block_id for node in match.nodes[:whole]]
        parent = ids[-1] if ids else root_id(self.fingerprint, prefix.namespace)
        ids += block_ids(self.fingerprint, parent, prefix.tokens[whole * BLOCK_BYTES :])
        path = BlockPath(prefix, ids)
        if len(match.nodes) == whole:
            return ids, path
        return [*ids[:whole], match.nodes[whole].block_id, *ids[whole:]], path

    def insert(self, parent: BlockNode, tokens: bytes, identity: bytes | None = None) -> Insertion:
        """Add the block `tokens` (packed, 1 to BLOCK_TOKENS of them) below a full block or root.
        identity: the block's, where the caller knows it; it is not worked out again.

        The caller owns the slots: it gives the new node its slot, or keeps its own when nothing was
        created, and takes back the slot of a superseded tail.
        """
        if not 0 < len(tokens) <= BLOCK_BYTES or len(tokens) % TOKEN_BYTES:
            raise ValueError(f"a block holds 1 to {BLOCK_TOKENS} tokens, got {len(tokens)} bytes")
        if len(parent.tokens) % BLOCK_BYTES:  # neither a root nor full
            raise ValueError("only full blocks have children")
        siblings = parent.children
        if siblings is None:
            siblings = parent.children = []
        place, superseded = bisect_left(siblings, tokens, key=_tokens_of), None
        if place < len(siblings) and siblings[place].tokens.startswith(tokens):
            return Insertion(siblings[place], False, None)
        # Siblings are an antichain, so a proper prefix sorts directly before its continuations.
        if place and tokens.startswith(siblings[place - 1].tokens):
            place -= 1
            superseded = siblings.pop(place)
            self.num_blocks -= 1
        if identity is None:
            identity = block_id(self.fingerprint, parent.block_id, tokens)
        node = BlockNode(parent, tokens, identity, parent.namespace)
        siblings.insert(place, node)
        self.num_blocks += 1
        return Insertion(node, True, superseded)

    def remove(self, node: BlockNode) -> None:
        """Take a leaf out of the tree. Raises ValueError for an inner block or a root."""
        parent = node.parent
        if parent is None or node.children:
            raise ValueError("only leaves can be removed")
        siblings = parent.children
        assert siblings is not None
        del siblings[bisect_left(siblings, node.tokens, key=_tokens_of)]
        self.num_blocks -= 1
        if not siblings and parent.is_root:
            self._roots.pop(parent.namespace, None)

    def clear(self) -> None:
        """Forget every path of every namespace."""
        self._roots.clear()
        self.num_blocks = 0

    def nodes(self, names: Callable[[str | None], bool] | None = None) -> Iterator[BlockNode]:
        """Every block, parents before children. names: only of namespaces for which it is true."""
        roots = [root for name, root in self._roots.items() if names is None or names(name)]
        stack = [child for root in roots for child in root.children or ()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children or ())

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant of the structure does not hold. O(blocks)."""
        count = 0
        for node in self.nodes():
            count += 1
            parent = node.parent
            assert parent is not None and (parent.is_root or parent.is_full)
            assert node.namespace == parent.namespace
            assert node.block_id == block_id(self.fingerprint, parent.block_id, node.tokens)
            assert node.is_full or not node.children
            siblings = parent.children or []
            assert siblings[bisect_left(siblings, node.tokens, key=_tokens_of)] is node
        for root in self._roots.values():
            for parent in [root, *(n for n in self.nodes() if n.namespace == root.namespace)]:
                tokens = [child.tokens for child in parent.children or ()]
                assert all(not b.startswith(a) and a < b for a, b in pairwise(tokens))
        assert count == self.num_blocks, f"{count} blocks reachable, {self.num_blocks} counted"


def _closest(siblings: list[BlockNode], piece: bytes) -> tuple[BlockNode, int]:
    """Sibling that shares most leading tokens with `piece`: a neighbour in sorted order."""
    if len(siblings) == 1:
        return siblings[0], common_tokens(siblings[0].tokens, piece)
    index = bisect_left(siblings, piece, key=_tokens_of)
    best, shared = siblings[0], 0
    for candidate in siblings[max(index - 1, 0) : index + 1]:
        length = common_tokens(candidate.tokens, piece)
        if length > shared:
            best, shared = candidate, length
    return best, shared
