"""Readers of the field's public trace formats.

Every reader returns a Trace and raises UsageError with the file, the place in it and what was
expected there. Reading stops after `limit` sessions.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hc.bench.tokens import Tokenizer
from sglang_hc.bench.workload import (
    Distribution,
    Session,
    Trace,
    Turn,
    Vocabulary,
    from_zero,
)
from sglang_hc.cli.main import UsageError

MOONCAKE_BLOCK = 512
BAILIAN_BLOCK = 16
"""Tokens that one hash id of these traces stands for."""


class TraceReader:
    """Reads one file. tokenizer is needed by the formats that hold text (sharegpt, vllm)."""

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

    def read(self, kind: str) -> Trace:
        """`kind` is a key of FORMATS."""
        try:
            trace = FORMATS[kind](self)
        except OSError as error:
            raise UsageError(f"--dataset {kind}:{self._path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"--dataset {kind}:{self._path}: not a UTF-8 text file") from None
        if not trace.sessions:
            raise UsageError(f"--dataset {kind}:{self._path}: holds no usable conversation")
        return from_zero(trace)

    def sharegpt(self) -> Trace:
        """List of {"conversations": [{"from": "human"|"gpt", "value": str}, ...]}."""
        sessions = []
        for number, item in enumerate(self._json_list()):
            talk = _get(item, "conversations", list, f"item {number}", self._path)
            pairs = _pairs(talk, "from", "value", ("human", "user"), ("gpt", "assistant"))
            if pairs:
                sessions.append(self._text_session(str(item.get("id", number)), pairs))
            if len(sessions) == self._limit:
                break
        return Trace(f"ShareGPT {self._path.name}", tuple(sessions))

    def vllm(self) -> Trace:
        """vLLM's multi-turn input: a list of conversations in OpenAI roles, or a generator file."""
        value = self._json()
        if isinstance(value, dict):
            return self._vllm_generated(value)
        sessions = []
        for number, item in enumerate(self._json_list()[: self._limit]):
            talk = _get(item, "messages", list, f"item {number}", self._path)
            system = "".join(str(m.get("content", "")) for m in talk if m.get("role") == "system")
            pairs = _pairs(talk, "role", "content", ("user",), ("assistant",))
            if pairs:
                sessions.append(self._text_session(str(item.get("id", number)), pairs, system))
        return Trace(f"vLLM multi-turn {self._path.name}", tuple(sessions))

    def mooncake(self) -> Trace:
        """JSONL {"timestamp": ms, "input_length", "output_length", "hash_ids"}, 512 tokens an id.

        Every line is a session of one request: the trace has no links between turns, prefixes
        are shared through equal hash ids.
        """
        sessions = []
        for where, row in self._json_lines():
            at = _get(row, "timestamp", (int, float), where, self._path) / 1000.0
            turn = self._hashed_turn(row, where, MOONCAKE_BLOCK, at)
            sessions.append(Session(where, (turn,), arrival_s=at))
            if len(sessions) == self._limit:
                break
        return Trace(f"Mooncake {self._path.name}", tuple(sessions))

    def bailian(self) -> Trace:
        """JSONL with chat_id, parent_chat_id (-1 for a root), timestamp (s) and hash_ids of 16.

        A session is a root and all its descendants, by time; a turn waits for the one before it.
        """
        root_of: dict[Any, Any] = {}
        turns: dict[Any, list[Turn]] = {}
        for where, row in self._json_lines():
            chat = _get(row, "chat_id", (int, str), where, self._path)
            parent = _get(row, "parent_chat_id", (int, str), where, self._path)
            root = chat if parent in (-1, "-1") else root_of.get(parent, parent)
            root_of[chat] = root
            if root not in turns and len(turns) == self._limit:
                continue
            at = float(_get(row, "timestamp", (int, float), where, self._path))
            turns.setdefault(root, []).append(self._hashed_turn(row, where, BAILIAN_BLOCK, at))
        sessions = []
        for root, talk in turns.items():
            talk.sort(key=lambda turn: turn.at_s or 0.0)
            sessions.append(Session(str(root), tuple(talk), arrival_s=talk[0].at_s or 0.0))
        return Trace(f"Bailian {self._path.name}", tuple(sessions))

    def burstgpt(self) -> Trace:
        """CSV of BurstGPT; sessions need the Session ID column of version 1.2 and later.

        A row's request tokens are taken as the whole prompt when they cover the session so far,
        and as new tokens otherwise. Rows without a response (failures) are left out.
        """
        rows: dict[str, list[tuple[float, int, int]]] = {}
        with open(self._path, newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            needed = ("Timestamp", "Request tokens", "Response tokens")
            missing = [name for name in needed if name not in (table.fieldnames or ())]
            if missing:
                raise UsageError(
                    f"--dataset burstgpt:{self._path}: no column {', '.join(missing)} "
                    f"in the header; expected {', '.join(needed)} and Session ID"
                )
            for number, row in enumerate(table, 2):
                name = row.get("Session ID") or f"line {number}"
                if name not in rows and len(rows) == self._limit:
                    continue
                try:
                    entry = (
                        float(row["Timestamp"]),
                        int(float(row["Request tokens"])),
                        int(float(row["Response tokens"])),
                    )
                except (TypeError, ValueError):
                    raise UsageError(
                        f"--dataset burstgpt:{self._path}: line {number} holds no numbers in "
                        f"{', '.join(needed)}"
                    ) from None
                if entry[1] > 0 and entry[2] > 0:
                    rows.setdefault(name, []).append(entry)
        sessions = [self._burst_session(name, talk) for name, talk in rows.items()]
        return Trace(f"BurstGPT {self._path.name}", tuple(sessions))

    def _burst_session(self, name: str, talk: list[tuple[float, int, int]]) -> Session:
        talk.sort()
        rng = np.random.default_rng([self._seed, *name.encode()])
        turns, so_far = [], 0
        for at, asked, answered in talk:
            new = asked - so_far if asked > so_far else asked
            turns.append(Turn(self._vocabulary.sample(rng, new), answered, at_s=at))
            so_far += new + answered
        return Session(name, tuple(turns), arrival_s=talk[0][0])

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

    def _text_session(self, name: str, pairs: list[tuple[str, str]], system: str = "") -> Session:
        tokenizer = self._tokenizer()
        turns = tuple(
            Turn(
                tuple(tokenizer.encode(question)),
                max(1, len(tokenizer.encode(answer))),
                text=question,
            )
            for question, answer in pairs
        )
        return Session(name, turns, system_ids=tuple(tokenizer.encode(system)), system_text=system)

    def _hashed_turn(self, row: dict[str, Any], where: str, block: int, at: float) -> Turn:
        length = _get(row, "input_length", int, where, self._path)
        output = _get(row, "output_length", int, where, self._path)
        hashes = _get(row, "hash_ids", list, where, self._path)
        if length > len(hashes) * block:
            raise UsageError(
                f"--dataset {self._path}: {where}: input_length {length} exceeds "
                f"{len(hashes)} hash_ids of {block} tokens"
            )
        ids: list[int] = []
        for value in hashes:
            rng = np.random.default_rng([self._seed, abs(int(value))])
            ids += self._vocabulary.sample(rng, block)
        return Turn(tuple(ids[: max(1, length)]), max(1, output), at_s=at, whole=True)

    def _json(self) -> Any:
        try:
            return json.loads(self._path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise UsageError(f"--dataset {self._path}: not JSON ({error})") from None

    def _json_list(self) -> list[dict[str, Any]]:
        value = self._json()
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise UsageError(f"--dataset {self._path}: expected a JSON list of objects")
        return value

    def _json_lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        with open(self._path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise UsageError(
                        f"--dataset {self._path}: {where} is not JSON ({error})"
                    ) from None
                if not isinstance(row, dict):
                    raise UsageError(f"--dataset {self._path}: {where} is not a JSON object")
                yield where, row


FORMATS: dict[str, Callable[[TraceReader], Trace]] = {
    "sharegpt": TraceReader.sharegpt,
    "vllm": TraceReader.vllm,
    "mooncake": TraceReader.mooncake,
    "bailian": TraceReader.bailian,
    "burstgpt": TraceReader.burstgpt,
}


def parse_dataset(text: str) -> tuple[str, Path]:
    """(format, path) of `FORMAT:PATH`. Raises UsageError."""
    kind, colon, path = text.partition(":")
    if kind not in FORMATS or not colon or not path:
        raise UsageError(
            f"--dataset {text!r}: give FORMAT:PATH with FORMAT one of {', '.join(FORMATS)}"
        )
    return kind, Path(path)


def _get(row: Any, key: str, kind: Any, where: str, path: Path) -> Any:
    value = row.get(key) if isinstance(row, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise UsageError(f'--dataset {path}: {where}: "{key}" is missing or not {names}')
    return value


def _pairs(
    talk: list[Any], role: str, content: str, ask: tuple[str, ...], answer: tuple[str, ...]
) -> list[tuple[str, str]]:
    """(question, answer) of neighbouring messages with the right roles, empty ones left out."""
    pairs = []
    for first, second in itertools.pairwise(talk):
        if not (isinstance(first, dict) and isinstance(second, dict)):
            continue
        question, reply = first.get(content), second.get(content)
        if first.get(role) in ask and second.get(role) in answer and question and reply:
            pairs.append((str(question), str(reply)))
    return pairs
