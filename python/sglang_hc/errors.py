"""The error of a user's mistake, and JSON that people write."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


class ConfigError(ValueError):
    """A bad option or file. The message names it and the remedy."""


def read_text(path: Path, where: str) -> str:
    """The text of a user's file. Raises ConfigError that begins with `where`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"{where}: cannot be read ({cause})") from cause


def decode_json(text: str | bytes, kind: type[T], where: str) -> T:
    """A value of `kind` from a JSON text. Raises ConfigError that begins with `where` (the file or
    the option) for a text that is not JSON, and as `convert` does."""
    try:
        values = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {str(error)[:200]}") from None
    return convert(values, kind, where)


def convert(values: object, kind: type[T], where: str) -> T:
    """A value of `kind` from plain JSON types. Raises ConfigError that begins with `where` and
    names the field that is missing or has a wrong value."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        own = error.__cause__ if isinstance(error.__cause__, ConfigError) else error
        raise ConfigError(f"{where}: {own}") from None  # `own`: of a check that msgspec called
