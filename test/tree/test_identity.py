"""Block identity: one hash per model, plan, namespace and token path."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.tree.identity import (
    BLOCK_BYTES,
    FEW,
    TOKEN_BYTES,
    Prefix,
    block_id,
    block_ids,
    pack_tokens,
    root_id,
)

KEY = bytes(range(16))
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(TOKENS, TOKENS)
def test_packed_bytes_sort_as_tokens_do(a: list[int], b: list[int]) -> None:
    assert (pack_tokens(a) < pack_tokens(b)) == (a < b)
    assert len(pack_tokens(a)) == TOKEN_BYTES * len(a)


@given(TOKENS)
def test_packing_is_the_same_for_every_container(tokens: list[int]) -> None:
    wide = np.array(tokens, dtype=np.int64)
    assert pack_tokens(tokens) == pack_tokens(wide) == pack_tokens(memoryview(wide))
    assert np.frombuffer(pack_tokens(tokens), ">i4").tolist() == tokens


@pytest.mark.parametrize("count", [1, FEW, FEW + 1])
@pytest.mark.parametrize("token", [-1, 2**31, 2**32, -(2**31), -(2**63), 2**63 - 1])
def test_an_id_that_does_not_fit_is_refused(token: int, count: int) -> None:
    with pytest.raises(OverflowError, match="token ids"):
        pack_tokens([1] * (count - 1) + [token])


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), st.integers(0, 3))
def test_many_tokens_are_packed_as_few_are(tokens: list[int], more: int) -> None:
    many = tokens * (FEW // len(tokens) + more)
    pieces = [pack_tokens(many[i : i + 100]) for i in range(0, len(many), 100)]
    assert pack_tokens(many) == b"".join(pieces)


@given(st.integers(0, 5 * BLOCK_BYTES))
def test_a_chain_is_its_blocks_one_below_the_other(length: int) -> None:
    tokens = bytes(number % 251 for number in range(length))
    parent = root_id(KEY, None)
    chain = block_ids(KEY, parent, tokens)
    assert len(chain) == length // BLOCK_BYTES
    for index, identity in enumerate(chain):
        piece = tokens[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
        assert identity == block_id(KEY, parent, piece)
        parent = identity


def test_identities_stay_what_disks_hold() -> None:
    """They name blocks on disk, so they never change: keyed BLAKE2b over parent and tokens."""
    plain = hashlib.blake2b(KEY + b"tokens", digest_size=16, key=KEY).digest()
    assert block_id(KEY, KEY, b"tokens") == plain


def test_identity_depends_on_every_field() -> None:
    other = bytes(16)
    names = [
        block_id(KEY, root_id(KEY, None), b"\0\0\0\1"),
        block_id(other, root_id(KEY, None), b"\0\0\0\1"),
        block_id(other, root_id(other, None), b"\0\0\0\1"),
        block_id(KEY, root_id(KEY, ""), b"\0\0\0\1"),
        block_id(KEY, root_id(KEY, "a"), b"\0\0\0\1"),
        block_id(KEY, root_id(KEY, None), b"\0\0\0\2"),
        block_id(KEY, root_id(KEY, None), b"\0\0\0\1\0\0\0\1"),
    ]
    # The same two tokens as one block and as a chain of two.
    names.append(block_id(KEY, names[0], b"\0\0\0\1"))
    assert len(set(names)) == len(names)


NAMES = st.sampled_from([None, "", "none", "None", "\ud800"]) | st.text(max_size=5)


@given(NAMES, NAMES)
def test_namespaces_have_different_roots(a: str | None, b: str | None) -> None:
    assert (root_id(KEY, a) == root_id(KEY, b)) == (a == b)


@given(st.integers(0, 200))
def test_a_prefix_is_its_blocks(length: int) -> None:
    prefix = Prefix("tenant", pack_tokens(range(length)))
    count = -(-length * TOKEN_BYTES // BLOCK_BYTES)
    assert prefix.num_tokens == length
    assert b"".join(prefix.block(index) for index in range(count)) == prefix.tokens
    assert prefix.block(count) == b""
    assert prefix.up_to(count) == prefix and prefix.up_to(0).tokens == b""
    assert prefix.up_to(1).tokens == prefix.block(0)
