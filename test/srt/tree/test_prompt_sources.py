"""The sources of a prompt add up, whatever SGLang counted and wherever its blocks lay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.srt.tree.prompt_sources import PromptSources

TIERS = st.sampled_from(SourceTier)
BELOW = st.sampled_from([SourceTier.DISK, SourceTier.REMOTE])


def request(prompt: int, device: int, host: int, stored: int, committed: int) -> Any:
    return SimpleNamespace(
        rid="r", origin_input_ids=[0] * prompt, retracted_stain=False,
        cached_tokens_device=device, cached_tokens_host=host, cached_tokens_storage=stored,
        kv=SimpleNamespace(kv_committed_len=committed, req_pool_idx=None),
    )  # fmt: skip


def blocks(tiers: list[SourceTier]) -> list[Any]:
    return [SimpleNamespace(source=tier) for tier in tiers]


@given(
    tiers=st.lists(TIERS, min_size=1, max_size=6), begin=st.integers(0, 200), data=st.data(),
    below=BELOW,
)  # fmt: skip
def test_sources_add_up_to_the_prompt(
    tiers: list[SourceTier], begin: int, data: st.DataObject, below: SourceTier
) -> None:
    """The tokens that count as stored are the last ones restored, each from its block's tier; one
    of a block that was computed here is put down to the tier that there is."""
    end = data.draw(st.integers(1, BLOCK_TOKENS * len(tiers)))
    start = min(begin, end - 1)
    stored = data.draw(st.integers(0, end - start))
    prompt = end + data.draw(st.integers(1, 100))
    committed = data.draw(st.integers(end, prompt + 20))
    req = request(prompt, start, end - start - stored, stored, committed)
    sources = PromptSources(below)
    sources.restored(req, blocks(tiers), start, end)

    of_token = [tiers[position // BLOCK_TOKENS] for position in range(end - stored, end)]
    known = [below if tier is SourceTier.HOST else tier for tier in of_token]
    wanted = {tier: known.count(tier) for tier in (SourceTier.DISK, SourceTier.REMOTE)}
    assert sources.below(req) == wanted
    sources.over(req)
    counts = sources.counts
    assert sum(counts.values()) == prompt and min(counts.values()) >= 0
    assert counts["prompt_tokens_aborted"] == max(0, prompt - committed)
    assert counts["prompt_tokens_remote"] == wanted[SourceTier.REMOTE]


@given(parts=st.lists(st.tuples(BELOW, st.integers(1, 3)), min_size=1, max_size=4))
def test_what_comes_between_two_chunks_is_added(parts: list[tuple[SourceTier, int]]) -> None:
    """A history that is met comes in several parts, each behind the one before."""
    path = blocks([tier for tier, count in parts for _ in range(count)])
    total = BLOCK_TOKENS * len(path)
    req, at = request(total + 1, 0, 0, total, total + 1), 0
    sources = PromptSources(SourceTier.DISK)
    for index, (_, count) in enumerate(parts):
        req.kv.req_pool_idx = None if index == 0 else 7
        sources.restored(req, path, at, at + count * BLOCK_TOKENS)
        at += count * BLOCK_TOKENS
    wanted = sum(count for tier, count in parts if tier is SourceTier.REMOTE)
    assert sources.below(req)[SourceTier.REMOTE] == BLOCK_TOKENS * wanted


def test_a_restoration_that_was_not_used_is_forgotten() -> None:
    """The request was admitted later, with other blocks."""
    sources = PromptSources(SourceTier.DISK)
    req = request(200, 0, 0, 128, 200)
    sources.restored(req, blocks([SourceTier.REMOTE] * 2), 0, 128)
    sources.restored(req, blocks([SourceTier.DISK] * 2), 0, 128)
    assert sources.below(req) == {SourceTier.DISK: 128, SourceTier.REMOTE: 0}


def test_probes_of_sglang_count_for_nobody() -> None:
    sources = PromptSources(None)
    req = request(1, 0, 0, 0, 1)
    req.rid = "HEALTH_CHECK_1"
    sources.over(req)
    assert not sum(sources.counts.values())
