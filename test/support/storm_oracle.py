"""What the requests of a storm must be answered: by an engine without tiers, which never evicts.

Answers are computed once per weights, adapter and prompt, and kept in a file.
"""

from __future__ import annotations

import itertools
import pickle
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from support import storm_models
from support.adapters import adapter_flags, adapter_ids, write_adapter
from support.core import MODELS, Core, Reply, run_in_child
from support.storm_actions import ADAPTED_MODEL, Ask

LONGEST_REPLY = 24
"""Tokens of each answer; of greedy replies a shorter one is its beginning."""
VERSIONS = 2
"""Of the weights, and of the files of each adapter."""
ADAPTERS = ("a", "b")
FAMILIES = 3
"""Talks of one family begin alike."""
TURNS = 3
_ENOUGH = 40_000
"""Tokens in the oracle's pool; when they are not enough, it computes a prompt again."""
_AT_ONCE = 16


class Answer(NamedTuple):
    """prompt, tokens: ids. likely: log probability of each token. gaps: how much less likely the
    second choice was."""

    prompt: list[int]
    tokens: list[int]
    likely: list[float]
    gaps: list[float]


def turn_tokens(talk: int, turn: int, edit: int) -> list[int]:
    """What the client says in one turn. Edits of it begin alike."""
    rng = random.Random(f"talk {talk} turn {turn}")
    said = _tokens(rng, rng.randrange(10, 110))
    if turn == 0:
        family = talk % FAMILIES
        said = _tokens(random.Random(f"family {family}"), 60 + 45 * family) + said
    if edit:
        rng = random.Random(f"talk {talk} turn {turn} edit {edit}")
        kept = rng.randrange(len(said) // 2, len(said))
        said = said[:kept] + _tokens(rng, rng.randrange(5, 60))
    return said


def heard(talk: int, turn: int) -> int:
    """Tokens of the reply that the client has when it goes on."""
    return 1 + (7 * talk + 11 * turn) % LONGEST_REPLY


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 900) for _ in range(count)]


class Oracle:
    """Answers, and the files of all weights and adapters, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "answers.pickle"
        self._answers: dict[Ask, Answer] = {}
        if self._file.exists():
            self._answers = pickle.loads(self._file.read_bytes())

    def __getitem__(self, ask: Ask) -> Answer:
        return self._answers[ask]

    def learn(self, asks: Iterable[Ask]) -> None:
        """Have an answer to each of these."""
        missing: set[Ask] = set()
        for ask in asks:
            step: Ask | None = ask
            while step is not None and step not in self._answers:
                missing.add(step)
                step = step.before()
        for model in sorted({ask.model for ask in missing}):
            asked = sorted((ask for ask in missing if ask.model == model), key=_order)
            self._answers |= run_in_child(_answer, self, model, asked)
        if missing:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file.write_bytes(pickle.dumps(self._answers))

    def prompt(self, ask: Ask) -> list[int]:
        """Its tokens; the reply before it is known."""
        said = turn_tokens(ask.talk, ask.turn, ask.edit)
        before = ask.before()
        if before is None:
            return said
        known = self._answers[before]
        return [*known.prompt, *known.tokens[: heard(ask.talk, before.turn)], *said]

    def weights(self, model: str, version: int) -> str:
        """A folder with this version of a model's weights."""
        first = MODELS / model
        kind = storm_models.KINDS.get(model)
        if kind is not None:
            first = self.folder / model
            if not first.exists():
                kind.make(self.folder)
        if not version:
            return str(first)
        folder = self.folder / f"{model}-{version}"
        if not folder.exists():
            change_weights(first, folder, version)
        return str(folder)

    def adapter(self, adapter: str) -> str:
        """A folder with this version of an adapter."""
        folder = self.folder / f"adapter-{adapter}"
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.parent.mkdir(parents=True, exist_ok=True)
            write_adapter(part, int.from_bytes(adapter.encode(), "big"), ADAPTED_MODEL)
            part.rename(folder)
        return str(folder)


def _order(ask: Ask) -> tuple[Any, ...]:
    return ask.turn, ask.weights, ask


def _answer(oracle: Oracle, model: str, asks: list[Ask]) -> dict[Ask, Answer]:
    flags = ["--max-total-tokens", str(_ENOUGH), "--dtype", "float32", "--hc-disable"]
    if model == ADAPTED_MODEL:
        names = [f"{name}{version}" for name in ADAPTERS for version in range(VERSIONS)]
        flags += adapter_flags({name: oracle.adapter(name) for name in names}, 3)
    path = oracle.weights(model, 0)
    core, loaded, found = Core(*storm_models.prepared(model, path), *flags, model=path), 0, {}
    ids = {"": None, **(adapter_ids(core) if model == ADAPTED_MODEL else {})}
    for (_, weights), level in itertools.groupby(asks, key=lambda ask: (ask.turn, ask.weights)):
        if weights != loaded:
            load_weights(core, oracle.weights(model, weights))
            loaded = weights
        while batch := list(itertools.islice(level, _AT_ONCE)):
            prompts = [oracle.prompt(ask) for ask in batch]
            rids = [
                core.submit(prompt, LONGEST_REPLY, top=2, lora=ids[ask.adapter])
                for ask, prompt in zip(batch, prompts, strict=True)
            ]
            core.run()
            for ask, prompt, rid in zip(batch, prompts, rids, strict=True):
                oracle._answers[ask] = found[ask] = _answer_of(prompt, core.reply(rid))
    return found


def _answer_of(prompt: list[int], reply: Reply) -> Answer:
    likely = [top[token] for top, token in zip(reply.top, reply.tokens, strict=True)]
    gaps = [max(top.values()) - min(top.values()) for top in reply.top]
    return Answer(prompt, reply.tokens, likely, gaps)


def load_weights(core: Core, folder: str) -> None:
    """As `/update_weights_from_disk` does, when nothing runs."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(model_path=folder, load_format="auto", flush_cache=True)
    output = core.scheduler.weight_updater.update_weights_from_disk(request)
    assert output.success, output.message


def change_weights(source: Path, folder: Path, version: int) -> None:
    """Every matrix of attention differs by a few percent."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(version)
    weights = load_file(source / "model.safetensors")
    for name, tensor in sorted(weights.items()):
        if "_proj" in name:
            noise = torch.randn(tensor.shape, generator=generator)
            weights[name] = (tensor + 0.1 * tensor.float().std() * noise).to(tensor.dtype)
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    save_file(weights, part / "model.safetensors", {"format": "pt"})
    part.rename(folder)
