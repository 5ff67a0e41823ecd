"""Conversations that are decoded speculatively, and draft models to propose with."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.core import MODELS, Core
from support.prompts import on_disk
from support.speculation import SpeculativeCore

MODEL = "llama-gqa"
TURNS = 3
POOL = 640
ROOMY = ("--max-total-tokens", "4096", "--dtype", "float32", "--hc-disable")
TIGHT = ("--max-total-tokens", str(POOL), "--dtype", "float32", "--hc-host-size-gb", "0.2")

_rng = random.Random(7)
SAID = [[_rng.randrange(3, 900) for _ in range(70 + 13 * turn)] for turn in range(TURNS)]
"""What the user says in each turn."""


class Told(NamedTuple):
    """A conversation. cached: per turn tokens from device, host and disk. verified: per turn the
    verify passes, and how many of them accepted so many proposals."""

    history: list[int]
    tokens: list[list[int]]
    cached: list[tuple[int, int, int]]
    verified: list[tuple[int, dict[int, int]]]
    stats: dict[str, Any]


def converse(
    core: Core, evict: bool, told: Sequence[int] = (), turns: range = range(TURNS), **sampling: Any
) -> Told:
    """told: before these turns. evict: state of other requests lies in the slots of the
    conversation between two turns."""
    history = list(told)
    tokens, cached, verified = [], [], []
    for turn in turns:
        history += SAID[turn]
        if turn > turns[0] and evict:
            core.settle()
            core.evict()
            core.flood(random.Random(turn), 2 * POOL)
        rid = core.submit(history, 40, **sampling)
        core.run()
        reply = core.reply(rid)
        tokens.append(reply.tokens)
        cached.append((reply.device, reply.host, reply.storage))
        if isinstance(core, SpeculativeCore):
            verified.append(core.verified(rid))
        history += reply.tokens
    if evict:
        core.settle()
    return Told(history, tokens, cached, verified, core.tree.stats() if evict else {})


def plainly() -> Told:
    """Without speculation and tiers, on a device that never evicts."""
    return converse(Core(*ROOMY, model=MODEL), evict=False)


def check_same(found: Told, kept: Told) -> None:
    """found: of a conversation whose state left the device between its turns. It has the tokens and
    the acceptance of one that stayed, all that came before came back, and nothing was lost."""
    assert found.tokens == kept.tokens
    assert found.verified == kept.verified
    assert [host for _, host, _ in found.cached] == [device for device, _, _ in kept.cached]
    assert not any(device for device, _, _ in found.cached)
    for reason in ("gap", "hole", "tap_overflow", "backpressure", "not_staged_tokens"):
        assert not found.stats.get(reason), reason


# -- two servers, one after the other -------------------------------------------------------------


def beside_disk(
    speculation: Sequence[str], form: str, folder: str, taught: list[int]
) -> SpeculativeCore:
    flags = (*TIGHT, "--hc-forms", form, *on_disk(folder))
    return SpeculativeCore(*speculation, *flags, taught=[taught], model=MODEL)


def first_turn(*server: Any) -> Told:
    """server: see `beside_disk`."""
    core = beside_disk(*server)
    told = converse(core, evict=False, turns=range(1))
    core.settle()
    return told


def later_turns(told: list[int], *server: Any) -> tuple[Told, list[list[int]]]:
    """Those behind `told`, and all proposals in them."""
    core = beside_disk(*server)
    return converse(core, True, told, range(1, TURNS)), core.proposed


# -- draft models --------------------------------------------------------------------------------

SHAPES = {
    "chain": ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    "tree": (
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "4"),
        *("--speculative-num-draft-tokens", "8"),
    ),
}
"""Flags for what a draft model proposes."""


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


def draft_model(folder: Path, algorithm: str, shape: str) -> tuple[str, ...]:
    """Flags of an algorithm with a draft model for MODEL, written to `folder`: for STANDALONE the
    model itself with weights that are a little off, for the others a head with random weights.
    shape: of `SHAPES`."""
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
        *SHAPES[shape],
    )


class Drafted(NamedTuple):
    """What a draft model did in a conversation. proposed, accepted: see `SpeculativeCore`.
    draft_kv: of the history before the last reply, and of all of it."""

    told: Told
    proposed: list[list[int]]
    accepted: list[list[list[int]]]
    draft_kv: list[list[Any]]


def drafted(
    speculation: Sequence[str], evict: bool, *flags: str, model: str = MODEL, **sampling: Any
) -> Drafted:
    core = SpeculativeCore(*speculation, *flags, model=model)
    told = converse(core, evict, **sampling)
    ends = [told.history[: -len(told.tokens[-1])], told.history]
    draft_kv = [core.draft_kv(tokens) for tokens in ends]
    return Drafted(told, core.proposed, core.accepted, draft_kv)


def scattered(accepted: list[list[list[int]]]) -> int:
    """Accepted paths whose rows do not lie one behind the other."""
    paths = [[row for row in path if row >= 0] for batch in accepted for path in batch]
    return sum(path != list(range(path[0], path[0] + len(path))) for path in paths)
