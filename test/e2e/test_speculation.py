"""Speculative decoding with the tiers: the same tokens and as many accepted ones as without them.

SGLang's NGRAM worker runs with torch in place of its kernels (`support/speculation.py`). Its
reference is the same worker without the tiers, on a device that never evicts, and the tokens are
also those of plain decoding.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from support.core import MODELS, Core, run_in_child
from support.speculation import NGRAM, ROWS, SpeculativeCore

pytestmark = pytest.mark.long

MODEL = "llama-gqa"
TURNS = 3
POOL = 640
ROOMY = ("--max-total-tokens", "4096", "--dtype", "float32", "--hc-disable")
TIGHT = ("--max-total-tokens", str(POOL), "--dtype", "float32", "--hc-host-size-gb", "0.2")


class Told(NamedTuple):
    """A conversation. verified: per turn the verify passes, and how many of them accepted so many
    proposals."""

    history: list[int]
    tokens: list[list[int]]
    cached: list[tuple[int, int]]
    verified: list[tuple[int, dict[int, int]]]
    stats: dict[str, Any]


def converse(core: Core, evict: bool) -> Told:
    rng = random.Random(7)
    history: list[int] = []
    tokens, cached, verified = [], [], []
    for turn in range(TURNS):
        history += [rng.randrange(3, 900) for _ in range(70 + 13 * turn)]
        if turn and evict:
            core.settle()
            core.evict()
            core.flood(random.Random(turn), 2 * POOL)  # other state lies in its slots then
        rid = core.submit(history, 40)
        core.run()
        reply = core.reply(rid)
        tokens.append(reply.tokens)
        cached.append((reply.device, reply.host))
        if isinstance(core, SpeculativeCore):
            verified.append(core.verified(rid))
        history += reply.tokens
    if evict:
        core.settle()
    return Told(history, tokens, cached, verified, core.tree.stats() if evict else {})


def plainly() -> Told:
    return converse(Core(*ROOMY, model=MODEL), evict=False)


def speculatively(taught: list[int]) -> Told:
    return converse(SpeculativeCore(NGRAM, *ROOMY, taught=[taught], model=MODEL), evict=False)


def evicted(taught: list[int], overlap: bool, *flags: str) -> Told:
    core = SpeculativeCore(NGRAM, *TIGHT, *flags, taught=[taught], overlap=overlap, model=MODEL)
    assert core.scheduler.enable_overlap == overlap
    return converse(core, evict=True)


@pytest.fixture(scope="module")
def plain(models: None) -> Told:
    return run_in_child(plainly)


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
    assert found.verified == kept.verified
    # All that the roomy device kept comes back, and nothing else does.
    assert [host for _, host in found.cached] == [device for device, _ in kept.cached]
    assert not any(device for device, _ in found.cached)
    for reason in ("gap", "hole", "tap_overflow", "backpressure", "not_staged_tokens"):
        assert not found.stats.get(reason), reason


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


PROMPTS = [random.Random(i).choices(range(3, 900), k=60 + 7 * i) for i in range(5)]


def all_at_once(core: Core) -> list[list[int]]:
    """Five conversations of two turns, each turn's requests together."""
    told = [list(prompt) for prompt in PROMPTS]
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


def all_retracted(taught: list[list[int]], form: str) -> tuple[list[list[int]], dict[str, Any]]:
    """Every fourth pass retracts requests; then everything leaves the device and comes back."""
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, 4
    core = SpeculativeCore(
        NGRAM, *TIGHT, "--hc-forms", form, "--max-running-requests", "4", taught=taught,
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


@pytest.mark.parametrize("form", ["kv", "hidden"])
def test_retraction_loses_nothing(models: None, form: str) -> None:
    """Device slots and host slots add up after each step of it (`Core.settle`)."""
    wanted = run_in_child(all_plainly)
    found, stats = run_in_child(all_retracted, wanted, form)
    assert found == wanted
    assert stats["retracted"] > 5
    assert stats["hit"] >= len(wanted[0]) - 1
    assert stats["host_staged_slots"] == 0


# -- draft models --------------------------------------------------------------------------------

STEPS = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1")


def eagle_head(
    algorithm: str, weights: dict[str, Any], config: dict[str, Any], generator: Any
) -> dict[str, Any]:
    """A head of one layer, the model's first one with random inputs. Changes `config`."""
    import torch

    width, of_target = config["hidden_size"], 3 if algorithm == "EAGLE3" else 2
    config |= {"num_hidden_layers": 1, "architectures": [f"LlamaForCausalLM{algorithm.title()}"]}

    def drawn(rows: int, columns: int) -> Any:
        return torch.randn((rows, columns), generator=generator) / columns**0.5

    first = "model.layers.0."
    head = {n.removeprefix("model."): w for n, w in weights.items() if n.startswith(first)}
    head["fc.weight"] = drawn(width, of_target * width)
    if algorithm == "EAGLE":
        del head["layers.0.input_layernorm.weight"]
        return head | {"fc.bias": torch.zeros(width)}
    config["draft_vocab_size"] = None  # it shares the model's last projection
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    for part in "qkv":  # the token's embedding beside the state of the model
        name = f"layers.0.self_attn.{part}_proj.weight"
        head[name] = torch.cat([head[name], drawn(*head[name].shape)], dim=1)
    ones = torch.ones(width)
    return head | {"layers.0.hidden_norm.weight": ones, "norm.weight": ones.clone()}


def draft_model(folder: Path, algorithm: str) -> tuple[str, ...]:
    """Flags of an algorithm with a draft model for MODEL, written to `folder`: for STANDALONE the
    model itself with weights that are a little off, for the others a head with random weights."""
    import torch
    from safetensors.torch import load_file, save_file

    source = MODELS / MODEL
    shutil.copytree(source, folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    if algorithm == "STANDALONE":
        for name, weight in weights.items():
            noise = torch.randn(weight.shape, generator=generator)
            weights[name] = weight + 0.05 * weight.float().std() * noise.to(weight.dtype)
    else:
        weights = eagle_head(algorithm, weights, config, generator)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return (
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(folder)),
        *STEPS,
    )


class Drafted(NamedTuple):
    told: Told
    proposed: list[list[int]]
    draft_kv: list[list[Any]]


def drafted(speculation: tuple[str, ...], evict: bool, *flags: str, model: str = MODEL) -> Drafted:
    core = SpeculativeCore(speculation, *flags, model=model)
    told = converse(core, evict)
    ends = [told.history[: -len(told.tokens[-1])], told.history]
    return Drafted(told, core.proposed, [core.draft_kv(tokens) for tokens in ends])


Drafts = Callable[[str], tuple[tuple[str, ...], Drafted]]
"""Of an algorithm: its flags, and what it does on a device that never evicts."""


@pytest.fixture(scope="module")
def drafts(models: None, tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    @cache
    def of(algorithm: str) -> tuple[tuple[str, ...], Drafted]:
        flags = draft_model(tmp_path_factory.mktemp("draft"), algorithm)
        return flags, run_in_child(drafted, flags, False, *ROOMY)

    return of


@pytest.mark.parametrize(
    ("algorithm", "form"),
    [
        ("STANDALONE", "hidden:4"),
        ("EAGLE", "kv:4"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("STANDALONE", "kv:4"), ("EAGLE", "hidden:2,kv:2"), ("EAGLE3", "kv:4"))
        ),
    ],
)
def test_draft_models_propose_what_they_would_have(
    plain: Told, drafts: Drafts, algorithm: str, form: str
) -> None:
    """The same proposals in every verify pass, and so the same acceptance."""
    speculation, kept = drafts(algorithm)
    found = run_in_child(drafted, speculation, True, *TIGHT, "--hc-forms", form)
    assert kept.told.tokens == plain.tokens
    assert found.told.tokens == plain.tokens
    assert found.told.verified == kept.told.verified
    assert found.proposed == kept.proposed
    assert [host for _, host in found.told.cached] == [d for d, _ in kept.told.cached]
    if algorithm == "STANDALONE":
        accepted = [drafts for _, counts in kept.told.verified for drafts in counts]
        assert {0, 1, 2} <= set(accepted)
    if form == "kv:4" or algorithm == "STANDALONE":  # an EAGLE head reads the model's own states
        for wanted, restored in zip(kept.draft_kv, found.draft_kv, strict=True):
            assert len(wanted) == len(restored) > 0
            for a, b in zip(wanted, restored, strict=True):
                assert np.array_equal(a, b)


def without_draft_kv(speculation: tuple[str, ...]) -> Drafted:
    """The control: the draft model's layers do not come back."""
    from sglang_hc.srt.kv_pool import KvPoolRows

    write = KvPoolRows.write_kv

    def partly(self: KvPoolRows, layer: int, *rest: Any) -> None:
        if layer < self.num_layers:
            write(self, layer, *rest)

    with mock.patch.object(KvPoolRows, "write_kv", partly):
        return drafted(speculation, True, *TIGHT, "--hc-forms", "kv")


def test_a_draft_model_without_its_state_would_be_noticed(plain: Told, drafts: Drafts) -> None:
    """Wrong state of a draft model changes no token, but what it proposes."""
    speculation, kept = drafts("STANDALONE")
    found = run_in_child(without_draft_kv, speculation)
    assert found.told.tokens == plain.tokens
    assert found.told.verified[0] == kept.told.verified[0]
    assert found.told.verified[1:] != kept.told.verified[1:]


def smaller(evict: bool, *flags: str) -> Drafted:
    """A draft model whose KV rows are narrower than the model's."""
    draft = ("--speculative-draft-model-path", str(MODELS / MODEL))
    speculation = ("--speculative-algorithm", "STANDALONE", *draft, *STEPS)
    return drafted(speculation, evict, *flags, model="llama-mha")


def test_a_draft_model_may_be_smaller(models: None) -> None:
    kept = run_in_child(smaller, False, *ROOMY)
    found = run_in_child(smaller, True, *TIGHT, "--hc-forms", "hidden:2,kv:2")
    assert found.told.tokens == kept.told.tokens
    assert found.proposed == kept.proposed
    assert [host for _, host in found.told.cached] == [d for d, _ in kept.told.cached]
    for wanted, restored in zip(kept.draft_kv, found.draft_kv, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(wanted, restored, strict=True))


def larger() -> str:
    from sglang_hc.errors import ConfigError

    draft = ("--speculative-draft-model-path", str(MODELS / "llama-mha"))
    speculation = ("--speculative-algorithm", "STANDALONE", *draft, *STEPS)
    try:
        SpeculativeCore(speculation, *TIGHT, model=MODEL)
    except ConfigError as error:
        return str(error)
    return "served"


def test_a_draft_model_must_not_be_larger(models: None) -> None:
    said = run_in_child(larger)
    assert "--speculative-draft-model-path" in said and "--hc-disable" in said
