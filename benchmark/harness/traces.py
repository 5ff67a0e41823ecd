"""Replayed traces: the public formats as requests with token ids, vLLM's input, documents.

Every reader returns a Trace and raises UsageError with the file, the place in it and what was
expected there. Reading stops after `limit` sessions.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.harness import documents
from benchmark.harness.tokens import Tokenizer
from benchmark.harness.workload import (
    Distribution,
    Session,
    Trace,
    Turn,
    Vocabulary,
    from_zero,
)
from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.workloads.traces import (
    READERS,
    HashedPrompt,
    TraceError,
    TraceSession,
    TraceTurn,
)

NAMES = {
    "sharegpt": "ShareGPT",
    "mooncake": "Mooncake",
    "bailian": "Bailian",
    "burstgpt": "BurstGPT",
    "vllm": "vLLM multi-turn",
    "documents": "conversations about documents",
}
"""`FORMAT` of `--dataset FORMAT:PATH`, and what a report calls it."""


class TraceReader:
    """Reads one file. tokenizer: for the formats with text (sharegpt, vllm, documents)."""

    def __init__(
        self,
        path: Path,
        vocabulary: Vocabulary,
        tokenizer: Callable[[], Tokenizer],
        seed: int,
        limit: int,
    ) -> None:
        self._path = path
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._seed = seed
        self._limit = limit
        self._own = {"vllm": self._vllm, "documents": self._documents}

    def read(self, kind: str) -> Trace:
        """`kind` is a key of NAMES."""
        try:
            trace = self._own[kind]() if kind in self._own else self._public(kind)
        except OSError as error:
            raise UsageError(f"--dataset {kind}:{self._path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"--dataset {kind}:{self._path}: not a UTF-8 text file") from None
        except TraceError as error:
            raise UsageError(f"--dataset {kind}:{error}") from None
        if not trace.sessions:
            raise UsageError(f"--dataset {kind}:{self._path}: holds no usable conversation")
        return from_zero(trace)

    def _public(self, kind: str) -> Trace:
        usable = (s for found in READERS[kind](self._path) if (s := self._session(found)).turns)
        sessions = tuple(itertools.islice(usable, self._limit))
        return Trace(f"{NAMES[kind]} {self._path.name}", sessions)

    def _session(self, found: TraceSession) -> Session:
        """A replayed session. Requests without an answer failed, and are left out."""
        turns: list[Turn] = []
        so_far = 0
        for turn in found.turns:
            asked, answered = turn.asked, turn.answered
            if isinstance(answered, str):
                if "".join(texts_of(turn)) and answered:
                    turns.append(self._text_turn("\n".join(texts_of(turn)), answered))
            elif isinstance(asked, HashedPrompt):
                turns.append(self._hashed_turn(asked, answered, turn.at))
            elif isinstance(asked, int) and answered:
                # A prompt that covers the session so far contains it; any other is new in whole.
                new = asked - so_far if asked > so_far else asked
                rng = np.random.default_rng([self._seed, *found.name.encode(), len(turns)])
                turns.append(Turn(self._vocabulary.sample(rng, new), answered, at_s=turn.at))
                so_far += new + answered
        arrival = turns[0].at_s if turns else None
        return Session(found.name, tuple(turns), arrival_s=arrival or 0.0)

    def _text_turn(self, question: str, answer: str) -> Turn:
        tokenizer = self._tokenizer()
        output = max(1, len(tokenizer.encode(answer)))
        return Turn(tuple(tokenizer.encode(question)), output, text=question)

    def _hashed_turn(self, prompt: HashedPrompt, answered: int, at: float | None) -> Turn:
        ids: list[int] = []
        for value in prompt.ids:
            rng = np.random.default_rng([self._seed, value])
            ids += self._vocabulary.sample(rng, prompt.tokens_per_id)
        return Turn(tuple(ids[: max(1, prompt.tokens)]), max(1, answered), at_s=at, whole=True)

    def _documents(self) -> Trace:
        sessions = documents.read(self._path, self._tokenizer(), self._limit)
        return Trace(f"{NAMES['documents']} {self._path.name}", sessions)

    def _vllm(self) -> Trace:
        """A list of conversations in OpenAI roles, or a generator file."""
        try:
            value = json.loads(self._path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise UsageError(f"--dataset vllm:{self._path}: not JSON ({error})") from None
        if isinstance(value, dict):
            return self._vllm_generated(value)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise UsageError(f"--dataset vllm:{self._path}: expected a JSON list of objects")
        sessions = []
        for number, item in enumerate(value[: self._limit]):
            talk = _get(item, "messages", list, f"item {number}", self._path)
            system = "".join(str(m.get("content", "")) for m in talk if m.get("role") == "system")
            turns = tuple(self._text_turn(*pair) for pair in _pairs(talk))
            if turns:
                ids = tuple(self._tokenizer().encode(system))
                name = str(item.get("id", number))
                sessions.append(Session(name, turns, system_ids=ids, system_text=system))
        return Trace(f"{NAMES['vllm']} {self._path.name}", tuple(sessions))

    def _vllm_generated(self, value: dict[str, Any]) -> Trace:
        if value.get("filetype") != "generate_conversations":
            raise UsageError(
                f'--dataset vllm:{self._path}: "filetype" is {value.get("filetype")!r}; expected '
                '"generate_conversations", or a list of conversations'
            )
        asked = _get(value, "prompt_input", dict, "top level", self._path)
        answered = _get(value, "prompt_output", dict, "top level", self._path)
        rng = np.random.default_rng(self._seed)
        num_turns = self._vllm_distribution(asked, "num_turns")
        prefix = self._vllm_distribution(asked, "prefix_num_tokens")
        new = self._vllm_distribution(asked, "num_tokens")
        output = self._vllm_distribution(answered, "num_tokens")
        sessions = []
        for number in range(self._limit):
            # vLLM counts both roles: a turn of ours is a question with its answer.
            count = max(1, num_turns.draw_count(rng) // 2)
            turns = tuple(
                Turn(
                    self._vocabulary.sample(rng, new.draw_count(rng)),
                    output.draw_count(rng),
                )
                for _ in range(count)
            )
            system = self._vocabulary.sample(rng, prefix.draw_count(rng, least=0))
            sessions.append(Session(f"s{number}", turns, system_ids=system))
        return Trace(f"vLLM generator {self._path.name}", tuple(sessions))

    def _vllm_distribution(self, section: dict[str, Any], key: str) -> Distribution:
        where = f"--dataset vllm:{self._path}: {key}"
        words = _get(section, key, dict, "its section", self._path)
        kind = str(words.get("distribution"))
        names = {
            "constant": ("value",),
            "uniform": ("min", "max"),
            "zipf": ("alpha", "max"),
            "poisson": ("alpha", "max"),
            "lognormal": ("average", "median_ratio", "max"),
        }.get(kind)
        if names is None:
            raise UsageError(f"{where}: unknown distribution {kind!r}")
        try:
            values = {name: float(words[name]) for name in names if name in words}
            if kind == "lognormal" and "average" in values:
                ratio = values.pop("median_ratio", 0.85)
                sigma = float(np.sqrt(-2 * np.log(ratio)))
                limit = [values["max"]] if "max" in values else []
                params = [values["average"], sigma, *limit]
            elif kind == "lognormal":
                mean, sigma = float(words["mean"]), float(words["sigma"])
                params = [float(np.exp(mean + sigma**2 / 2)), sigma]
            else:
                params = [values[name] for name in names if name in values]
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{where}: {kind} needs {', '.join(names)} ({error})") from None
        return Distribution.parse(":".join([kind, *(repr(value) for value in params)]), where)


def texts_of(turn: TraceTurn) -> Sequence[str]:
    """The messages of a turn; none where the file gives lengths or hashes."""
    asked = turn.asked
    return asked if isinstance(asked, tuple) and not isinstance(asked, HashedPrompt) else ()


def parse_dataset(text: str) -> tuple[str, Path]:
    """(format, path) of `FORMAT:PATH`. Raises UsageError."""
    kind, colon, path = text.partition(":")
    if kind not in NAMES or not colon or not path:
        raise UsageError(
            f"--dataset {text!r}: give FORMAT:PATH with FORMAT one of {', '.join(NAMES)}"
        )
    return kind, Path(path)


def _get(row: Any, key: str, kind: Any, where: str, path: Path) -> Any:
    value = row.get(key) if isinstance(row, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise UsageError(f'--dataset {path}: {where}: "{key}" is missing or not {names}')
    return value


def _pairs(talk: list[Any]) -> list[tuple[str, str]]:
    """(question, answer) of neighbouring messages of user and assistant, empty ones left out."""
    pairs = []
    for first, second in itertools.pairwise(talk):
        if not (isinstance(first, dict) and isinstance(second, dict)):
            continue
        question, reply = first.get("content"), second.get("content")
        roles = (first.get("role"), second.get("role"))
        if roles == ("user", "assistant") and question and reply:
            pairs.append((str(question), str(reply)))
    return pairs
