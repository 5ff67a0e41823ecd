"""The tree of blocks against a naive model: a set of token paths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tree.block_tree import BlockNode, BlockTree, common_tokens
from sglang_hc.tree.identity import BLOCK_BYTES, Prefix, pack_tokens
from support.host import FINGERPRINT

NAMESPACES = st.sampled_from([None, "", "a"])
# Runs of equal tokens make shared prefixes and differences inside a block likely.
PATHS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 70)), min_size=1, max_size=4).map(
    lambda runs: [token for token, length in runs for _ in range(length)]
)
INSERTIONS = st.lists(st.tuples(NAMESPACES, PATHS), max_size=8)


def insert_path(tree: BlockTree, namespace: str | None, tokens: list[int]) -> BlockNode:
    """All blocks of a path, tail included, as a commit does."""
    packed = pack_tokens(tokens)
    node = tree.root(namespace)
    for start in range(0, len(packed), BLOCK_BYTES):
        node = tree.insert(node, packed[start : start + BLOCK_BYTES]).node
    return node


def shared(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@settings(max_examples=150, deadline=None)
@given(INSERTIONS, NAMESPACES, PATHS)
def test_matching_finds_the_longest_prefix_of_any_path_in_its_namespace(
    inserted: list[tuple[str | None, list[int]]], namespace: str | None, asked: list[int]
) -> None:
    tree = BlockTree(FINGERPRINT)
    for name, path in inserted:
        insert_path(tree, name, path)
        tree.check_integrity()
    blocks = {id(node) for node in tree.nodes()}
    for name, path in inserted:
        insert_path(tree, name, path)
        assert tree.match(Prefix(name, pack_tokens(path))).tokens == len(path)
    assert {id(node) for node in tree.nodes()} == blocks and tree.num_blocks == len(blocks)
    match = tree.match(Prefix(namespace, pack_tokens(asked)))
    own = [path for name, path in inserted if name == namespace]
    assert match.tokens == max((shared(path, asked) for path in own), default=0)
    assert len(match.nodes) == -(-match.tokens // BLOCK_TOKENS)
    covered = b"".join(node.tokens for node in match.nodes)
    assert common_tokens(covered, pack_tokens(asked)) == match.tokens
    assert all(node.namespace == namespace for node in match.nodes)


@settings(max_examples=60, deadline=None)
@given(INSERTIONS, st.randoms(use_true_random=False))
def test_leaves_can_leave_in_any_order_until_nothing_is_left(inserted, rng) -> None:  # type: ignore[no-untyped-def]
    tree = BlockTree(FINGERPRINT)
    for name, path in inserted:
        insert_path(tree, name, path)
    roots = {name: tree.root(name) for name, _ in inserted}
    while leaves := [node for node in tree.nodes() if node.is_leaf]:
        tree.remove(rng.choice(leaves))
        tree.check_integrity()
    assert tree.num_blocks == 0
    assert all(tree.root(name) is not root for name, root in roots.items()), "no empty namespaces"


FEW = st.lists(st.integers(0, 1), max_size=70)


@given(FEW, FEW)
def test_common_tokens_counts_one_by_one(a: list[int], b: list[int]) -> None:
    assert common_tokens(pack_tokens(a), pack_tokens(b)) == shared(a, b)


def test_a_longer_tail_replaces_the_shorter_and_a_shorter_is_answered_by_the_longer() -> None:
    tree = BlockTree(FINGERPRINT)
    root = tree.root(None)
    short = tree.insert(root, pack_tokens([1, 2])).node
    grown = tree.insert(root, pack_tokens([1, 2, 3]))
    assert grown.created and grown.superseded is short
    again = tree.insert(root, pack_tokens([1]))
    assert not again.created and again.node is grown.node and again.superseded is None
    assert tree.num_blocks == 1


@pytest.mark.parametrize("tokens", [[], [1] * (BLOCK_TOKENS + 1)])
def test_a_block_of_no_or_too_many_tokens_is_refused(tokens: list[int]) -> None:
    tree = BlockTree(FINGERPRINT)
    with pytest.raises(ValueError, match="1 to 64 tokens"):
        tree.insert(tree.root(None), pack_tokens(tokens))


def test_a_tail_has_no_children_and_inner_blocks_and_roots_stay() -> None:
    tree = BlockTree(FINGERPRINT)
    tail = insert_path(tree, None, [1] * 70)
    with pytest.raises(ValueError, match="only full blocks"):
        tree.insert(tail, pack_tokens([2]))
    for node in (tail.parent, tree.root(None)):
        assert node is not None
        with pytest.raises(ValueError, match="only leaves"):
            tree.remove(node)
    assert [node.num_tokens for node in tail.path()] == [64, 6]


def test_damage_is_noticed() -> None:
    tree = BlockTree(FINGERPRINT)
    node = insert_path(tree, None, [1] * 70)
    node.block_id = bytes(16)
    with pytest.raises(AssertionError):
        tree.check_integrity()
