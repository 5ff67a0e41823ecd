"""Speculative decoding of models whose layers do not all have full attention, with the tiers: what
was evicted comes back up to an end, and goes on word for word, with the same proposals and as many
accepted ones as on a device that never evicts.

SGLang's workers run with torch in place of its kernels (`support/speculation.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from support import (
    retractions,
    sparse_core,
    sparse_model,
    state_core,
    state_model,
    window_core,
    window_model,
)
from support import speculative_kinds as kinds
from support.core import Once, run_in_child
from support.prompts import on_disk
from support.speculation import CHAIN, NGRAM, ROWS
from support.speculative_kinds import DEEPSEEK, QWEN, ROOMY, Kept, with_a_layer
from support.speculative_talks import SHAPES, draft_model
from support.starts import refusal

PAGES = "--page-size", "64", "--swa-full-tokens-ratio", "1"
"""With as many rows of windows as of full attention: an end takes a page more of them where
SGLang's tree compares a token more."""
CHUNKS = "--chunked-prefill-size", "64"

pytestmark = pytest.mark.slow


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
    page, found, length = 64 if PAGES[0] in flags else 1, [0], 0
    for said, reply in zip(kinds.SAID[:-1], told.tokens, strict=False):
        length += len(said) + len(reply)
        found.append((length // 64 * 64 - lag) // page * page)
    return found


def check(
    found: Kept, kept: Kept, plain: Kept, ends: list[int], accepts: bool = True, same: bool = True
) -> None:
    """found: with tiers, evicted between the turns. kept: without. plain: without speculation.
    accepts: whether some of what is proposed is accepted. same: whether all of that is the same,
    although `found` computes again what lies behind an end."""
    assert kept.tokens == plain.tokens
    assert len(set(kept.accepted)) > 2 or not accepts
    assert found.tokens == plain.tokens
    if same:
        assert found.proposed == kept.proposed and found.accepted == kept.accepted
    for wanted, rows in zip(kept.draft_kv, found.draft_kv, strict=True):
        assert np.array_equal(wanted[: ends[1]], rows[: ends[1]])
    assert [host for _, host, _ in found.cached] == ends
    assert not any(device for device, _, _ in found.cached)
    assert "guarded_errors" not in found.stats and "ends_without_rows" not in found.stats


# -- sliding windows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flags", "overlap"),
    [
        ("gpt-oss-96", NGRAM, True),
        ("gpt-oss-96", NGRAM, False),
        ("gpt-oss-96", (*CHAIN, *PAGES), True),
        ("gpt-oss-96", (*NGRAM, *CHUNKS), True),
        ("gemma4", NGRAM, True),
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


Drafts = Callable[[str, str], tuple[str, ...]]


@pytest.mark.parametrize(
    ("algorithm", "shape", "flags", "overlap"),
    [
        ("EAGLE3", "chain", (), True),
        ("EAGLE3", "chain", PAGES, False),
        ("EAGLE3", "chain", CHUNKS, False),
        ("EAGLE3", "tree", (), False),
        ("STANDALONE", "chain", (), True),
    ],
)
def test_windows_with_a_draft_model(
    windows: Path, once: Once, drafts: Drafts, algorithm: str, shape: str,
    flags: tuple[str, ...], overlap: bool,
) -> None:  # fmt: skip
    """Its rows come back with those of the layers with full attention."""
    model, start = str(windows / "gpt-oss-96"), kinds.with_windows
    plain = once(kinds.plainly, window_core.engine, model)
    common, flags = (start, model, plain.history), (*drafts(algorithm, shape), *flags)
    kept = run_in_child(kinds.speculating, *common, False, overlap, *ROOMY, *flags)
    found = run_in_child(kinds.speculating, *common, True, overlap, *flags)
    lag = int(algorithm != "STANDALONE")
    # What SGLang keeps of a full draft model of a turn's last token is that of the next one, which
    # the model has not said; here it is computed again. See `test_speculation_drafts.py`.
    ends, same = ends_of(plain, flags, lag), algorithm != "STANDALONE"
    check(found, kept, plain, ends, accepts=shape == "chain", same=same)


@pytest.mark.parametrize("flags", [(), PAGES])
@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3"])
def test_the_next_server_goes_on_with_windows(
    windows: Path, once: Once, drafts: Drafts, tmp_path: Path, algorithm: str,
    flags: tuple[str, ...],
) -> None:  # fmt: skip
    model, start = str(windows / "gpt-oss-96"), kinds.with_windows
    plain = once(kinds.plainly, window_core.engine, model)
    proposals = CHAIN if algorithm == "NGRAM" else drafts(algorithm, "chain")
    flags, taught = (*proposals, *flags), plain.history
    kept = run_in_child(kinds.speculating, start, model, taught, False, False, *ROOMY, *flags)
    below = *flags, *on_disk(tmp_path / "d")
    begun = run_in_child(kinds.first_turn, start, model, taught, *below)
    later = run_in_child(kinds.later_turns, start, model, taught, begun.history, *below)
    assert begun.tokens + later.tokens == plain.tokens
    assert begun.accepted + later.accepted == kept.accepted
    assert begun.proposed + later.proposed == kept.proposed
    ends = ends_of(plain, flags, int(algorithm != "NGRAM"))
    assert [host + disk for _, host, disk in later.cached] == ends[1:]
    assert later.cached[0][2] == ends[1]


def test_a_rejected_row_in_a_window_is_noticed(windows: Path, once: Once) -> None:
    """The control."""
    model, start = str(windows / "gpt-oss-96"), kinds.with_windows
    plain = once(kinds.plainly, window_core.engine, model)
    planted = partial(kinds.speculating, plant=kinds.with_a_rejected_row)
    found = run_in_child(planted, start, model, plain.history, True, False, *NGRAM)
    assert found.tokens[0] == plain.tokens[0] and found.tokens != plain.tokens


def test_a_draft_model_without_its_rows_is_noticed(
    windows: Path, once: Once, drafts: Drafts
) -> None:
    """The control: the tokens are the same, and what is proposed is not."""
    model, start = str(windows / "gpt-oss-96"), kinds.with_windows
    plain = once(kinds.plainly, window_core.engine, model)
    flags = drafts("EAGLE3", "tree")
    common = start, model, plain.history
    kept = run_in_child(kinds.speculating, *common, False, False, *ROOMY, *flags)
    planted = partial(kinds.speculating, plant=kinds.without_draft_rows)
    found = run_in_child(planted, *common, True, False, *flags)
    assert found.tokens == kept.tokens and found.proposed != kept.proposed


def test_a_draft_model_with_windows_of_its_own_is_refused(windows: Path) -> None:
    model = str(windows / "gpt-oss-96")
    flags = "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", model
    why = refusal(kinds.with_windows, model, *flags, *SHAPES["chain"])
    assert "--speculative-draft-model-path" in why and "use another one" in why


# -- a sparse-attention index ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def sparse(models: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sparse")
    sparse_model.make(made)
    return made


@pytest.mark.parametrize(
    ("flags", "overlap"), [(CHAIN, False), (CHAIN, True), ((*CHAIN, *CHUNKS), False)]
)
def test_an_index_with_proposals_of_a_corpus(
    sparse: Path, once: Once, flags: tuple[str, ...], overlap: bool
) -> None:
    model, start = str(sparse / "deepseek-v3.2"), kinds.with_index
    plain = once(kinds.plainly, sparse_core.engine, model)
    common = start, model, plain.history
    kept = run_in_child(kinds.speculating, *common, False, overlap, *ROOMY, *flags)
    found = run_in_child(kinds.speculating, *common, True, overlap, *flags)
    check(found, kept, plain, [device for device, _, _ in kept.cached])


@pytest.mark.parametrize("overlap", [False, True])
def test_an_index_with_a_layer_that_proposes(
    sparse: Path, once: Once, tmp_path: Path, overlap: bool
) -> None:
    """The layer has an index of its own, which comes back with it; in pages, of which the tokens of
    whole ones are kept."""
    base, start = sparse / "deepseek-v3.2", kinds.with_index
    plain = once(kinds.plainly, sparse_core.engine, str(base))
    flags = with_a_layer(base, tmp_path / "drafts", DEEPSEEK)
    common = start, flags[-1], plain.history
    kept = run_in_child(kinds.speculating, *common, False, overlap, *ROOMY, *flags)
    found = run_in_child(kinds.speculating, *common, True, overlap, *flags)
    check(found, kept, plain, ends_of(plain, PAGES, 1))


# -- recurrent layers -----------------------------------------------------------------------------

STEPS = "--mamba-track-interval", "64"


@pytest.fixture(scope="module")
def states(models: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("states")
    state_model.make(made)
    return made


@pytest.mark.parametrize(
    ("name", "flags", "overlap"),
    [
        ("qwen3-next", CHAIN, False),
        ("qwen3-next", NGRAM, True),
        ("qwen3-next", (*NGRAM, *CHUNKS), False),
        ("qwen3.5", NGRAM, False),
        ("granite-4", NGRAM, True),
        ("granite-4", (*CHAIN, *CHUNKS), False),
        ("nemotron-h", NGRAM, False),
        ("kimi-linear", NGRAM, True),
        ("kimi-linear", (*CHAIN, *CHUNKS), False),
    ],
)
def test_states_with_proposals_of_a_corpus(
    states: Path, once: Once, name: str, flags: tuple[str, ...], overlap: bool
) -> None:
    model, start = str(states / name), kinds.with_states
    plain = once(kinds.plainly, state_core.engine, model, *STEPS)
    common = start, model, plain.history
    kept = run_in_child(kinds.speculating, *common, False, overlap, *ROOMY, *STEPS, *flags)
    found = run_in_child(kinds.speculating, *common, True, overlap, *flags)
    check(found, kept, plain, [device for device, _, _ in kept.cached])


@pytest.mark.parametrize("overlap", [False, True])
def test_states_with_a_layer_that_proposes(
    states: Path, once: Once, tmp_path: Path, overlap: bool
) -> None:
    base, start = states / "qwen3-next", kinds.with_states
    plain = once(kinds.plainly, state_core.engine, str(base), *STEPS)
    flags = with_a_layer(base, tmp_path / "drafts", QWEN)
    common = start, flags[-1], plain.history
    kept = run_in_child(kinds.speculating, *common, False, overlap, *ROOMY, *STEPS, *flags)
    found = run_in_child(kinds.speculating, *common, True, overlap, *flags)
    check(found, kept, plain, [device for device, _, _ in kept.cached])


# -- controls, and others beside ------------------------------------------------------------------


def test_a_state_of_a_rejected_row_is_noticed(states: Path, once: Once) -> None:
    """The control."""
    model, start = str(states / "qwen3-next"), kinds.with_states
    plain = once(kinds.plainly, state_core.engine, model, *STEPS)
    planted = partial(kinds.speculating, plant=kinds.with_a_rejected_state)
    found = run_in_child(planted, start, model, plain.history, True, False, *NGRAM)
    assert found.tokens[0] == plain.tokens[0] and found.tokens != plain.tokens


@pytest.mark.parametrize("kind", ["windows", "states"])
def test_what_was_retracted_between_two_verify_passes_comes_back(
    windows: Path, states: Path, kind: str
) -> None:
    """Several requests at once, each with its own accepted length."""
    model, plainly, start = {
        "windows": (windows / "gpt-oss-96", window_core.engine, kinds.with_windows),
        "states": (states / "qwen3-next", state_core.engine, kinds.with_states),
    }[kind]
    calm = run_in_child(kinds.retracted, plainly, str(model), [], False)
    taught = [
        [*said, *reply] for said, reply in zip(retractions.PROMPTS, calm["replies"], strict=True)
    ]
    found = run_in_child(kinds.retracted, start, str(model), taught, True, *NGRAM)
    assert found["replies"] == calm["replies"] and found["retractions"] > 0
    assert found["stats"]["retracted_restored_tokens"] > 0
    assert "guarded_errors" not in found["stats"]


@pytest.mark.parametrize("kind", ["index", "states"])
def test_the_next_server_goes_on_with_an_index_and_with_states(
    sparse: Path, states: Path, once: Once, tmp_path: Path, kind: str
) -> None:
    model, plainly, start, layer, more = {
        "index": (sparse / "deepseek-v3.2", sparse_core.engine, kinds.with_index, DEEPSEEK, ()),
        "states": (states / "qwen3-next", state_core.engine, kinds.with_states, QWEN, STEPS),
    }[kind]
    plain = once(kinds.plainly, plainly, str(model), *more)
    flags = with_a_layer(model, tmp_path / "drafts", layer)
    server = start, flags[-1], plain.history
    below = *flags, *on_disk(tmp_path / "d")
    begun = run_in_child(kinds.first_turn, *server, *below)
    later = run_in_child(kinds.later_turns, *server, begun.history, *below)
    assert begun.tokens + later.tokens == plain.tokens
    ends = ends_of(plain, PAGES if kind == "index" else (), int(kind == "index"))
    assert [host + disk for _, host, disk in later.cached] == ends[1:]
    assert later.cached[0][2] == ends[1]
