"""Draft models with the tiers: they propose the chains and trees that they would have proposed,
because their own KV comes back with the model's.

The reference is the same engine without the tiers, on a device that never evicts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from support.core import MODELS, run_in_child
from support.disk_store import block_files, spoil_pages
from support.speculation import SpeculativeCore
from support.speculative_kinds import without_draft_rows
from support.speculative_talks import (
    MODEL,
    ROOMY,
    SHAPES,
    TIGHT,
    TURNS,
    Drafted,
    Told,
    check_same,
    converse,
    draft_model,
    drafted,
    first_turn,
    later_turns,
    scattered,
)

pytestmark = pytest.mark.long


Drafts = Callable[[str, str], tuple[tuple[str, ...], Drafted]]
"""Of an algorithm and the shape of its proposals: its flags, and what it does on a device that
never evicts."""


@pytest.fixture(scope="module")
def drafts(models: None, tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    @cache
    def of(algorithm: str, shape: str) -> tuple[tuple[str, ...], Drafted]:
        flags = draft_model(tmp_path_factory.mktemp("draft"), algorithm, shape)
        return flags, run_in_child(drafted, flags, False, *ROOMY)

    return of


CHUNKS = ("--chunked-prefill-size", "64")


@pytest.mark.parametrize(
    ("algorithm", "shape", "form", "flags"),
    [
        ("STANDALONE", "tree", "hidden:4", ()),
        ("EAGLE", "chain", "kv:4", ()),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("STANDALONE", "chain", "hidden:4", ()),
                ("STANDALONE", "chain", "kv:4", ()),
                ("STANDALONE", "tree", "kv:4", CHUNKS),
                ("EAGLE", "chain", "hidden:2,kv:2", ()),
                ("EAGLE", "tree", "kv:4", ()),
                ("EAGLE", "tree", "hidden:2,kv:2", CHUNKS),
                ("EAGLE3", "chain", "kv:4", ()),
                ("EAGLE3", "tree", "hidden:2,kv:2", ()),
            )
        ),
    ],
)
def test_draft_models_propose_what_they_would_have(
    plain: Told,
    drafts: Drafts,
    algorithm: str,
    shape: str,
    form: str,
    flags: tuple[str, ...],
) -> None:
    """The same proposals in every verify pass, and so the same acceptance."""
    speculation, kept = drafts(algorithm, shape)
    found = run_in_child(drafted, speculation, True, *TIGHT, "--hc-forms", form, *flags)
    assert kept.told.tokens == plain.tokens
    check_same(found.told, kept.told)
    assert found.proposed == kept.proposed
    assert found.accepted == kept.accepted
    if algorithm == "STANDALONE":
        accepted = [drafts for _, counts in kept.told.verified for drafts in counts]
        assert {0, 1, 2} <= set(accepted)
        assert (scattered(kept.accepted) > 0) == (shape == "tree")
    exact = form == "kv:4" or algorithm == "STANDALONE"  # an EAGLE head reads the model's states
    if exact and not flags:
        for wanted, restored in zip(kept.draft_kv, found.draft_kv, strict=True):
            assert len(wanted) == len(restored) > 0
            for a, b in zip(wanted, restored, strict=True):
                assert np.array_equal(a, b)


def without_draft_kv(speculation: tuple[str, ...]) -> Drafted:
    """The control."""
    without_draft_rows()
    return drafted(speculation, True, *TIGHT, "--hc-forms", "kv")


def test_a_draft_model_without_its_state_would_be_noticed(plain: Told, drafts: Drafts) -> None:
    """Wrong state of a draft model changes no token, but what it proposes."""
    speculation, kept = drafts("STANDALONE", "chain")
    found = run_in_child(without_draft_kv, speculation)
    assert found.told.tokens == plain.tokens
    assert found.told.verified[0] == kept.told.verified[0]
    assert found.told.verified[1:] != kept.told.verified[1:]


def smaller(evict: bool, *flags: str) -> Drafted:
    """A draft model whose KV rows are narrower than the model's."""
    draft = ("--speculative-draft-model-path", str(MODELS / MODEL))
    speculation = ("--speculative-algorithm", "STANDALONE", *draft, *SHAPES["chain"])
    return drafted(speculation, evict, *flags, model="llama-mha")


@pytest.mark.slow
def test_a_draft_model_may_be_smaller(models: None) -> None:
    kept = run_in_child(smaller, False, *ROOMY)
    found = run_in_child(smaller, True, *TIGHT, "--hc-forms", "hidden:2,kv:2")
    check_same(found.told, kept.told)
    assert found.proposed == kept.proposed
    for wanted, restored in zip(kept.draft_kv, found.draft_kv, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(wanted, restored, strict=True))


def larger() -> str:
    from sglang_hc.errors import ConfigError

    draft = ("--speculative-draft-model-path", str(MODELS / "llama-mha"))
    speculation = ("--speculative-algorithm", "STANDALONE", *draft, *SHAPES["chain"])
    try:
        SpeculativeCore(*speculation, *TIGHT, model=MODEL)
    except ConfigError as error:
        return str(error)
    return "served"


def test_a_draft_model_must_not_be_larger(models: None) -> None:
    said = run_in_child(larger)
    assert "--speculative-draft-model-path" in said and "--hc-disable" in said


# -- disk ----------------------------------------------------------------------------------------


def anew(speculation: tuple[str, ...], history: list[int]) -> tuple[Told, list[list[int]]]:
    core = SpeculativeCore(*speculation, *ROOMY, model=MODEL)
    return converse(core, False, history, range(1, TURNS)), core.proposed


@pytest.mark.parametrize(
    ("algorithm", "shape", "form", "spoil"),
    [
        ("EAGLE", "tree", "kv:4", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("STANDALONE", "tree", "hidden:4", False),
                ("EAGLE3", "chain", "hidden:2,kv:2", False),
                ("EAGLE", "tree", "kv:4", True),
                ("STANDALONE", "chain", "hidden:4", True),
            )
        ),
    ],
)
def test_a_new_process_goes_on_from_disk(
    plain: Told,
    drafts: Drafts,
    tmp_path: Path,
    algorithm: str,
    shape: str,
    form: str,
    spoil: bool,
) -> None:
    """What is damaged is recomputed, by the model and by its draft model. A server without tiers
    that computes the history anew proposes the same. One that went on would not with STANDALONE:
    SGLang keeps the draft model's row of a turn's last token, which it computed with the token that
    the model would have said next."""
    speculation, kept = drafts(algorithm, shape)
    folder = tmp_path / "d"
    server = (speculation, form, str(folder), [])
    begun = run_in_child(first_turn, *server)
    assert begun.tokens == plain.tokens[:1] and begun.verified == kept.told.verified[:1]
    if spoil:
        for path in block_files(folder):
            spoil_pages(path)
    told, proposed = run_in_child(later_turns, begun.history, *server)
    new, wanted = run_in_child(anew, speculation, begun.history)
    assert told.tokens == new.tokens == plain.tokens[1:]
    assert told.verified == new.verified
    assert proposed == wanted
    lag = int(algorithm != "STANDALONE")  # SGLang compares a token more
    whole_blocks = (len(begun.history) - 1) // 64 * 64 - lag
    assert told.cached[0] == (0, 0, 0 if spoil else whole_blocks)
    assert (told.stats.get("disk_read_damaged", 0) > 0) == spoil
