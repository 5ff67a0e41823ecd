"""Speculative decoding on two tensor-parallel ranks: what both of them propose, accept and keep.

The reference is the same engine without the tiers, on two ranks whose device never evicts.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from support.ranked_core import RankedCore, run_ranks
from support.ranked_turns import decisions
from support.speculation import NGRAM, SpeculativeCore
from support.speculative_talks import (
    MODEL,
    ROOMY,
    TIGHT,
    Told,
    check_same,
    converse,
    draft_model,
)

pytestmark = pytest.mark.long


class RankedSpeculativeCore(RankedCore, SpeculativeCore):
    """One of two ranks that decode speculatively."""


class Spoken(NamedTuple):
    told: Told
    proposed: list[list[int]]
    accepted: list[list[list[int]]]


def speak(rank: int, port: int, taught: list[int], evict: bool, warm: bool, *flags: str) -> Spoken:
    core = RankedSpeculativeCore(rank, port, *flags, taught=[taught], model=MODEL)
    sampling = {"temperature": 0.9} if warm else {}
    told = converse(core, evict, **sampling)
    if evict:
        core.tree.release_host_resources()
    return Spoken(told, core.proposed, core.accepted)


@pytest.mark.parametrize(
    ("algorithm", "shape", "form", "warm"),
    [
        ("NGRAM", "tree", "hidden:2,kv:2", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("NGRAM", "tree", "hidden:4", True),
                ("NGRAM", "tree", "recompute:1,hidden:2,kv:1", False),
                ("STANDALONE", "tree", "hidden:4", False),
                ("STANDALONE", "tree", "kv:4", True),
                ("EAGLE", "chain", "kv:4", False),
                ("EAGLE", "tree", "hidden:2,kv:2", False),
                ("EAGLE3", "chain", "hidden:2,kv:2", False),
            )
        ),
    ],
)
def test_two_ranks_propose_and_keep_alike(
    plain: Told,
    tmp_path: Path,
    algorithm: str,
    shape: str,
    form: str,
    warm: bool,
) -> None:
    ngram = algorithm == "NGRAM"
    flags = NGRAM if ngram else draft_model(tmp_path / "draft", algorithm, shape)
    kept = run_ranks(speak, plain.history, False, warm, *flags, *ROOMY)
    own = ("--hc-forms", form, "--hc-disk", f"{tmp_path}/d:1", "--hc-trace", f"{tmp_path}/t.jsonl")
    found = run_ranks(speak, plain.history, True, warm, *flags, *TIGHT, *own)
    assert kept[0] == kept[1]
    for of_rank, wanted in zip(found, kept, strict=True):
        check_same(of_rank.told, wanted.told)
        assert of_rank.proposed == wanted.proposed
        assert of_rank.accepted == wanted.accepted
    trace, other = (decisions(tmp_path / f"t.jsonl.tp{rank}") for rank in (0, 1))
    assert trace == other and len(trace) > 30
    if ngram and not warm:
        assert len({count for _, counts in kept[0].told.verified for count in counts}) > 3
