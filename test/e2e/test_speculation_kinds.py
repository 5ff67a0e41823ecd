"""Speculative decoding of models whose layers do not all have full attention, with the tiers: what
was evicted comes back up to an end, and goes on word for word, with the same proposals and as many
accepted ones as on a device that never evicts.

SGLang's workers run with torch in place of its kernels (`support/speculation.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support import speculative_kinds as kinds
from support import window_core, window_model
from support.core import Once, run_in_child
from support.prompts import on_disk
from support.speculation import CHAIN, NGRAM, ROWS
from support.speculative_kinds import ROOMY, Kept, Start
from support.speculative_talks import draft_model

PAGES = "--page-size", "64"
CHUNKS = "--chunked-prefill-size", "64"

slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def windows(models: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("windows")
    window_model.make(made, "gpt-oss-96", "gemma4")
    return made


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[str, ...]]:
    """Flags of an algorithm with a draft model for all models here. Of its name, and the shape of
    what it proposes."""
    folder = tmp_path_factory.mktemp("drafts")
    return lambda algorithm, shape: draft_model(folder / algorithm / shape, algorithm, shape)


def ends_of(told: Kept, flags: tuple[str, ...], lag: int) -> list[int]:
    """Up to where each turn can go on behind the end of the one before. lag: tokens that SGLang's
    tree compares behind a position."""
    page, found, length = 64 if PAGES[1] in flags else 1, [0], 0
    for said, reply in zip(kinds.SAID[:-1], told.tokens, strict=False):
        length += len(said) + len(reply)
        found.append((length // 64 * 64 - lag) // page * page)
    return found


def check(found: Kept, kept: Kept, plain: Kept, ends: list[int]) -> None:
    """found: with tiers, evicted between the turns. kept: without. plain: without speculation."""
    assert kept.tokens == plain.tokens
    assert len(set(kept.accepted)) > 2, "nothing was accepted, or rejected"
    assert found.tokens == plain.tokens
    assert found.proposed == kept.proposed and found.accepted == kept.accepted
    assert [host for _, host, _ in found.cached] == ends
    assert not any(device for device, _, _ in found.cached)
    assert "guarded_errors" not in found.stats and "ends_without_rows" not in found.stats


# -- sliding windows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flags", "overlap"),
    [
        ("gpt-oss-96", NGRAM, True),
        slow("gpt-oss-96", NGRAM, False),
        slow("gpt-oss-96", (*CHAIN, *PAGES), True),
        slow("gpt-oss-96", (*NGRAM, *CHUNKS), True),
        slow("gemma4", NGRAM, True),
    ],
)
def test_windows_with_proposals_of_a_corpus(
    windows: Path, once: Once, name: str, flags: tuple[str, ...], overlap: bool
) -> None:
    model, start = str(windows / name), kinds.with_windows
    plain = once(kinds.plainly, window_core.engine, model)
    common = start, model, plain.history
    kept = run_in_child(kinds.speculating, *common, False, overlap, *ROOMY, *flags)
    found = run_in_child(kinds.speculating, *common, True, overlap, *flags)
    assert set(kept.accepted) == set(range(1, ROWS + 1))
    check(found, kept, plain, ends_of(plain, flags, 0))
