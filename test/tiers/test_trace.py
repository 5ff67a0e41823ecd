"""Pseudonyms of a trace: the shape of the radix tree stays, the ids do not."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tiers.trace import TOKEN_LIMIT, Pseudonyms, TraceWriter
from sglang_hc.tree.block_tree import common_tokens
from sglang_hc.tree.identity import BLOCK_BYTES, pack_tokens


def disguise(names: Pseudonyms, tokens: list[int], namespace: str | None = None) -> bytes:
    state, out, packed = names.start(namespace), b"", pack_tokens(tokens)
    for start in range(0, len(packed), BLOCK_BYTES):
        piece, state = names.block(state, packed[start : start + BLOCK_BYTES])
        out += piece
    return out


sequences = st.lists(st.integers(0, 2), max_size=3 * BLOCK_TOKENS)


@given(st.lists(sequences, min_size=2, max_size=6))
def test_shared_prefixes_and_order_survive(many: list[list[int]]) -> None:
    names = Pseudonyms()
    ordered = sorted(pack_tokens(tokens) for tokens in many)
    plain = {packed: disguise(names, [*_unpack(packed)]) for packed in ordered}
    for a, b in pairwise(ordered):
        assert len(plain[a]) == len(a)
        assert common_tokens(plain[a], plain[b]) == common_tokens(a, b)
        assert (plain[a] <= plain[b]) == (a <= b)


def _unpack(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[i : i + 4], "big") for i in range(0, len(packed), 4)]


def test_ids_look_different_everywhere() -> None:
    names = Pseudonyms()
    out = _unpack(disguise(names, [7] * 500))
    assert len(set(out)) == 500 and all(0 <= token < 1 << 31 for token in out)
    assert _unpack(disguise(names, [7] * 500, "other"))[:10] != out[:10]
    assert _unpack(disguise(Pseudonyms(), [7] * 500))[:10] != out[:10]


def test_an_id_too_large_is_refused() -> None:
    with pytest.raises(OverflowError, match="cannot be recorded"):
        Pseudonyms().block(1, pack_tokens([TOKEN_LIMIT]))


def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TraceWriter(tmp_path / "trace", {}, bytes(16))
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), writer._file.fileno())
    writer.queue.append(("end", {"t": 1.0}))
    writer.close()
    assert writer.failed and "writing the trace failed" in caplog.text
    assert (tmp_path / "trace").read_bytes().count(b"\n") == 1
