"""Look-ups with notes find what a look-up from the root finds, whatever came and went."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from benchmark.hooks.parts import cache_over
from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.srt.engine import guard
from sglang_hc.srt.requests import namespaces
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.host import keep
from support.tiers import build

SLOTS = 6
COUNT = 4 * BLOCK_TOKENS
"""Length of a prompt. Prompts agree up to their first different letter."""

prompts = st.sampled_from(["aaaa", "aaab", "abbb"])
lengths = st.integers(1, COUNT) | st.sampled_from(range(BLOCK_TOKENS, COUNT + 1, BLOCK_TOKENS))
salts = st.sampled_from([None, "s"])
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["device", "host", "scatters"]), prompts, lengths, salts),
        st.tuples(st.sampled_from(["look", "admit"]), prompts, lengths, salts),
        st.tuples(st.sampled_from(["device_evicts", "host_evicts"]), st.integers(1, 3)),
        st.just(("host_clears",)),
    ),
    max_size=30,
)


def tokens_of(word: str, length: int) -> array[int]:
    return array("q", [ord(letter) for letter in word for _ in range(BLOCK_TOKENS)][:length])


class Subject:
    """A device tree over a host tier, without a model."""

    def __init__(self) -> None:
        self.tiers, _, _ = build(LayerPlan(0, 0, 1), slots=SLOTS, device_slots=4)
        self.host = self.tiers.host
        self.cache = cache_over(self.tiers)
        allocator: Any = SimpleNamespace(free_segment=lambda *_, **__: None)
        self.cache.token_to_kv_pool_allocator = allocator

    def device(self, word: str, length: int, salt: str | None) -> None:
        key = RadixKey(tokens_of(word, length), salt)
        self.cache.insert(InsertParams(key=key, value=torch.arange(length)))

    def keep(self, word: str, length: int, salt: str | None, ready: bool) -> None:
        """The host tier takes a path, as far as there is room; new blocks may not be filled yet."""
        keep(self.host, pack_tokens(tokens_of(word, length)), salt, ready=ready)

    def look(self, word: str, length: int, salt: str | None) -> tuple[Any, int]:
        """Match a request; returns it and the tokens that the host tier can serve, 0 if the device
        has them all."""
        tokens = tokens_of(word, length)
        usable = self.tiers.host.tree.match(Prefix(salt, pack_tokens(tokens))).ready.tokens
        req: Any = SimpleNamespace(
            rid="r", extra_key=salt, full_untruncated_fill_ids=tokens, session=None
        )
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, salt), req=req))
        assert found.host_hit_length == max(usable - found.device_prefix_len, 0)
        return req, usable if found.host_hit_length else 0

    def admit(self, word: str, length: int, salt: str | None) -> None:
        """Match a request and ask for its blocks, and again when the last has made room."""
        req, usable = self.look(word, length, salt)
        if not usable:
            return  # SGLang asks for a host hit only
        tokens = pack_tokens(req.full_untruncated_fill_ids[:usable])
        blocks = self.cache.host_match.blocks(req, usable)
        assert blocks is not None and len(blocks) == -(-usable // BLOCK_TOKENS)
        assert b"".join(block.tokens for block in blocks)[: len(tokens)] == tokens
        assert all(block.ready for block in blocks)
        if blocks[-1].is_leaf:
            self.host.drop(blocks[-1])
            assert self.cache.host_match.blocks(req, usable) is None


NOTED: list[tuple[Any, ...]] = [
    ("device", "aaaa", 64, None),
    ("host", "aaaa", 192, None),
    ("look", "aaaa", COUNT, None),
]
"""The device node of 64 tokens bears a note."""


@settings(deadline=None)
@example([*NOTED, ("host_evicts", 3), ("host", "aaaa", 192, None), ("look", "aaaa", COUNT, None)])
@example([("device", "aaaa", 1, None), ("host", "aaaa", 1, None), ("admit", "aaaa", 1, None)])
@example([*NOTED, ("host_clears",), ("host", "aaaa", 128, None), ("look", "aaaa", COUNT, None)])
@given(steps)
def test_notes_change_no_answer(script: list[tuple[Any, ...]]) -> None:
    subject = Subject()
    for step, *args in script:
        if step == "device":
            subject.device(*args)
        elif step == "device_evicts":
            subject.cache.evict(EvictParams(num_tokens=args[0] * BLOCK_TOKENS))
        elif step == "host_evicts":
            subject.host.evict(args[0], 0.0)
        elif step == "host_clears":
            subject.host.clear()
        elif step == "look":
            subject.look(*args)
        elif step == "admit":
            subject.admit(*args)
        else:
            subject.keep(*args, ready=step == "host")


def test_an_image_gets_what_the_device_has_and_no_more() -> None:
    """Its ids have 62 bits. Looking for them was an error at each such request, which several ranks
    do not survive; and what is kept for the text before it may not be its state."""
    subject = Subject()
    subject.keep("aaaa", 192, None, ready=True)
    tokens = tokens_of("aaaa", 192)
    req: Any = SimpleNamespace(
        rid="r", extra_key=None, full_untruncated_fill_ids=tokens, session=None
    )
    params = MatchPrefixParams(key=RadixKey(tokens), req=req)
    assert subject.cache.match_prefix(params).host_hit_length == 192
    seen = array("q", [*tokens, 1 << 61])
    shown: Any = SimpleNamespace(**vars(req) | {"full_untruncated_fill_ids": seen})
    vars(shown).pop(namespaces._KEPT)
    shown.multimodal_inputs = object()
    before = guard.counters["guarded_errors"]
    found = subject.cache.match_prefix(MatchPrefixParams(key=RadixKey(seen), req=shown))
    assert found.host_hit_length == 0 and guard.counters["guarded_errors"] == before
