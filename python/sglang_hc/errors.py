"""The error of a user's mistake, and JSON that people write."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


class ConfigError(ValueError):
    """A bad option or file. The message names it and the remedy."""


def decode_json(text: str | bytes, kind: type[T], where: str) -> T:
    """A value of `kind` from a JSON text.

    Raises ConfigError, which begins with `where` (the file or the option), when the text is not
    JSON, and with the path of the field that is missing or has a wrong value.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if isinstance(error.__cause__, ConfigError):  # a check of ours, called by msgspec
            raise error.__cause__ from None
        what = "" if isinstance(error, msgspec.ValidationError) else "not valid JSON: "
        raise ConfigError(f"{where}: {what}{error}") from None
