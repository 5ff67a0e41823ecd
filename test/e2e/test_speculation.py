"""Speculative decoding with the tiers: the same tokens and as many accepted ones as without them.

SGLang's NGRAM worker runs with torch in place of its kernels (`support/speculation.py`). Its
reference is the same worker without the tiers, on a device that never evicts, and the tokens are
also those of plain decoding.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from support.core import Core, run_in_child
from support.prompts import prompt
from support.speculation import NGRAM, ROWS, SpeculativeCore, throw_known_coins
from support.speculative_talks import (
    MODEL,
    POOL,
    ROOMY,
    TIGHT,
    Told,
    check_same,
    converse,
    draft_model,
    first_turn,
    later_turns,
)

pytestmark = pytest.mark.long


def speculatively(taught: list[int]) -> Told:
    return converse(SpeculativeCore(*NGRAM, *ROOMY, taught=[taught], model=MODEL), evict=False)


def evicted(taught: list[int], overlap: bool, *flags: str) -> Told:
    core = SpeculativeCore(*NGRAM, *TIGHT, *flags, taught=[taught], overlap=overlap, model=MODEL)
    assert core.scheduler.enable_overlap == overlap
    return converse(core, evict=True)


@pytest.fixture(scope="module")
def kept(plain: Told) -> Told:
    return run_in_child(speculatively, plain.history)


def test_the_reference_speculates(plain: Told, kept: Told) -> None:
    """Whole trees are accepted, and parts of them, and none."""
    assert kept.tokens == plain.tokens
    accepted: Counter[int] = Counter()
    for passes, counts in kept.verified:
        assert sum(counts.values()) == passes
        accepted += Counter(counts)
    assert set(accepted) == set(range(ROWS))


MIXED = ("--hc-forms", "recompute:1,hidden:2,kv:1", "--chunked-prefill-size", "64")


@pytest.mark.parametrize(
    ("flags", "overlap"),
    [
        (("--hc-forms", "kv:4"), True),
        (("--hc-forms", "hidden:4"), True),
        (MIXED, False),
        pytest.param(("--hc-forms", "kv:4"), False, marks=pytest.mark.slow),
        pytest.param(("--hc-forms", "hidden:4"), False, marks=pytest.mark.slow),
        pytest.param(MIXED, True, marks=pytest.mark.slow),
    ],
)
def test_tokens_and_acceptance_are_those_without_the_tiers(
    plain: Told, kept: Told, flags: tuple[str, ...], overlap: bool
) -> None:
    found = run_in_child(evicted, plain.history, overlap, *flags)
    assert found.stats["layer_plan"] == flags[1]
    assert found.tokens == plain.tokens
    check_same(found, kept)


def rows_as_they_lie(taught: list[int]) -> Told:
    """The control: rejected rows are taken for accepted ones."""
    import torch

    from sglang_hc.capture.verified import VerifiedRows

    hold = VerifiedRows.hold

    def blind(self: VerifiedRows, path: torch.Tensor, rows: int) -> None:
        first = torch.arange(path.shape[0], dtype=path.dtype)[:, None] * rows
        hold(self, first + torch.arange(path.shape[1], dtype=path.dtype), rows)

    with mock.patch.object(VerifiedRows, "hold", blind):
        return evicted(taught, False, "--hc-forms", "hidden")


def test_rejected_rows_would_be_noticed(plain: Told) -> None:
    found = run_in_child(rows_as_they_lie, plain.history)
    assert found.tokens[0] == plain.tokens[0]
    assert found.tokens[1:] != plain.tokens[1:]


def test_a_new_process_goes_on_from_disk(plain: Told, kept: Told, tmp_path: Path) -> None:
    server = (NGRAM, "hidden:4", str(tmp_path / "d"), plain.history)
    begun = run_in_child(first_turn, *server)
    told, _ = run_in_child(later_turns, begun.history, *server)
    assert begun.tokens + told.tokens == plain.tokens
    assert begun.verified + told.verified == kept.verified
    assert told.cached[0] == (0, 0, (len(begun.history) - 1) // 64 * 64)


PROMPTS = [prompt(i, 60 + 7 * i) for i in range(5)]


def all_at_once(core: Core) -> list[list[int]]:
    """Five conversations of two turns, each turn's requests together."""
    told = [list(said) for said in PROMPTS]
    for turn in range(2):
        rids = [core.submit([*known, turn + 3], 24 + i) for i, known in enumerate(told)]
        core.run()
        told = [
            [*known, turn + 3, *core.reply(rid).tokens]
            for known, rid in zip(told, rids, strict=True)
        ]
    return told


def all_plainly() -> list[list[int]]:
    return all_at_once(Core(*ROOMY, model=MODEL))


def all_retracted(
    speculation: tuple[str, ...], taught: list[list[int]], form: str
) -> tuple[list[list[int]], dict[str, Any]]:
    """Every fourth pass retracts requests; then everything leaves the device and comes back."""
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, 4
    core = SpeculativeCore(
        *speculation, *TIGHT, "--hc-forms", form, "--max-running-requests", "4", taught=taught,
        model=MODEL,
    )  # fmt: skip
    found = all_at_once(core)
    retracted = sum(req.retraction_count for req in core.requests.values())
    core.settle()
    core.evict()
    core.settle()
    hit = core.ask([*found[0], 7], 4)
    core.settle()
    stats = core.tree.stats() | {"retracted": retracted, "hit": hit.host}
    return found, stats


@pytest.fixture(scope="module")
def all_plain(models: None) -> list[list[int]]:
    return run_in_child(all_plainly)


@pytest.mark.parametrize(
    ("algorithm", "form"),
    [
        ("NGRAM", "kv"),
        ("NGRAM", "hidden"),
        pytest.param("STANDALONE", "hidden", marks=pytest.mark.slow),
    ],
)
def test_retraction_loses_nothing(
    all_plain: list[list[int]], tmp_path: Path, algorithm: str, form: str
) -> None:
    """Device slots and host slots add up after each step of it (`Core.settle`)."""
    speculation = NGRAM if algorithm == "NGRAM" else draft_model(tmp_path, algorithm, "tree")
    found, stats = run_in_child(all_retracted, speculation, all_plain, form)
    assert found == all_plain
    assert stats["retracted"] > 5
    assert stats["hit"] >= len(all_plain[0]) - 1
    assert stats["host_staged_slots"] == 0


def all_aborted(
    speculation: tuple[str, ...], taught: list[list[int]], form: str, overlap: bool
) -> tuple[list[list[int]], list[int]]:
    """One of two requests is aborted while it decodes, earlier and later, and nothing is lost by
    it. Then both are asked again, when all of it has left the device. Returns the replies, and how
    many tokens the aborted ones had."""
    flags = (*TIGHT, "--hc-forms", form)
    core = SpeculativeCore(*speculation, *flags, taught=taught, overlap=overlap, model=MODEL)
    aborted = []
    for passes in (2, 3, 4, 5):
        rids = [core.submit([*said, 3], 24 + i) for i, said in enumerate(PROMPTS[:2])]

        def abort(number: int, rid: str = rids[0], due: int = passes + 1) -> None:
            if number == due:
                core.abort(rid)

        core.run(each_pass=abort)
        core.settle()
        aborted.append(len(core.requests[rids[0]].output_ids))
        core.evict()
        core.flood(random.Random(passes), 2 * POOL)
    found = [core.ask([*said, 3], 24 + i).tokens for i, said in enumerate(PROMPTS[:2])]
    core.settle()
    return found, aborted


@pytest.mark.parametrize(
    ("algorithm", "form", "overlap"),
    [
        ("NGRAM", "hidden", True),
        pytest.param("NGRAM", "kv", False, marks=pytest.mark.slow),
        pytest.param("STANDALONE", "hidden", True, marks=pytest.mark.slow),
    ],
)
def test_an_abort_between_verify_passes_loses_nothing(
    all_plain: list[list[int]], tmp_path: Path, algorithm: str, form: str, overlap: bool
) -> None:
    speculation = NGRAM if algorithm == "NGRAM" else draft_model(tmp_path, algorithm, "tree")
    found, aborted = run_in_child(all_aborted, speculation, all_plain, form, overlap)
    starts = [len(said) + 1 for said in PROMPTS[:2]]
    assert found == [
        told[start : start + 24 + i]
        for i, (told, start) in enumerate(zip(all_plain, starts, strict=False))
    ]
    assert len(set(aborted)) > 2 and max(aborted) < 24, aborted


# -- sampling and grammars -----------------------------------------------------------------------

WARM = {"temperature": 0.9}
WORDS = {"regex": "[a-z]{2,6}( [a-z]{2,6})*"}
"""A grammar that never ends."""

GRAMMAR = ("--grammar-backend", "llguidance")
"""SGLang's other backends cannot take a token back, or mask the model's choice on a GPU only."""


def plainly_with(sampling: dict[str, Any]) -> Told:
    throw_known_coins()
    return converse(Core(*ROOMY, *GRAMMAR, model=MODEL), evict=False, **sampling)


@pytest.fixture(scope="module", params=[WARM, WORDS], ids=["temperature", "grammar"])
def sampled(request: pytest.FixtureRequest, plain: Told) -> tuple[dict[str, Any], Told]:
    """Options of sampling, and what is said with them without speculation."""
    found = run_in_child(plainly_with, request.param)
    assert all(a != b for a, b in zip(found.tokens, plain.tokens, strict=True))
    return request.param, found


def speculatively_with(
    speculation: tuple[str, ...], overlap: bool, sampling: dict[str, Any], taught: list[int],
    evict: bool, *flags: str,
) -> Told:  # fmt: skip
    core = SpeculativeCore(
        *speculation, *GRAMMAR, *flags, taught=[taught], overlap=overlap, model=MODEL
    )
    return converse(core, evict, **sampling)


@pytest.mark.parametrize(
    ("algorithm", "form", "overlap"),
    [
        ("NGRAM", "hidden:4", True),
        pytest.param("NGRAM", "kv:4", False, marks=pytest.mark.slow),
        pytest.param("STANDALONE", "hidden:2,kv:2", False, marks=pytest.mark.slow),
        pytest.param("EAGLE", "kv:4", True, marks=pytest.mark.slow),
    ],
)
def test_sampling_and_grammars(
    sampled: tuple[dict[str, Any], Told],
    tmp_path: Path,
    algorithm: str,
    form: str,
    overlap: bool,
) -> None:
    """With the same coins the tokens are those without speculation, and as many proposals are
    accepted as without the tiers."""
    sampling, plain = sampled
    speculation = NGRAM if algorithm == "NGRAM" else draft_model(tmp_path, algorithm, "tree")
    given = (speculation, overlap, sampling, plain.history)
    kept = run_in_child(speculatively_with, *given, False, *ROOMY)
    found = run_in_child(speculatively_with, *given, True, *TIGHT, "--hc-forms", form)
    assert kept.tokens == plain.tokens
    check_same(found, kept)
    if algorithm == "NGRAM":
        assert len({count for _, counts in kept.verified for count in counts}) >= ROWS - 1
