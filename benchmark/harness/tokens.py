"""Vocabulary and tokenizer of the model under test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from benchmark.harness.workload import Vocabulary
from sglang_hc.errors import ConfigError
from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.model_config import read_model_config


class Tokenizer(Protocol):
    """What the benchmarks need of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Text of a chat by the model's template, up to where the next reply begins.

        Raises ValueError when there is no template.
        """

    @property
    def end(self) -> tuple[int, str] | None:
        """Id and text of the token that ends a reply, if there is one."""


class _Pretrained:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return str(
            self._inner.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        )

    @property
    def end(self) -> tuple[int, str] | None:
        text = self._inner.eos_token
        return None if text is None else (int(self._inner.eos_token_id), str(text))


def load_tokenizer(path: str) -> Tokenizer:
    """Tokenizer of a local folder or a hub name. Raises UsageError when there is none."""
    from transformers import AutoTokenizer

    try:
        return _Pretrained(AutoTokenizer.from_pretrained(path))
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"--tokenizer {path}: no tokenizer could be loaded ({reason}); "
            "give a folder with tokenizer files or a model name"
        ) from None


def load_vocabulary(model: str) -> Vocabulary:
    """Vocabulary size and special ids from the model folder's config.json.

    Raises UsageError when `model` is not a folder with a usable config.json.
    """
    try:
        config, path = read_model_config(model)
    except ConfigError as error:
        raise UsageError(
            f"--model {model}: {error}, or --vocab-size when the model is only on the server"
        ) from None
    inner = config.get("text_config") or config
    size = inner.get("vocab_size")
    if not isinstance(size, int) or size < 2:
        raise UsageError(f"--model {model}: {path} has no vocab_size; give --vocab-size")
    special: set[int] = set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = inner.get(key)
        special.update(value if isinstance(value, list) else [value] if value is not None else [])
    return Vocabulary(size, frozenset(special))
