"""Reading numbers out of JSON objects that people write, with errors that name the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


class Fields:
    """One JSON object whose every missing or nonsense field raises `error` with its full path.

    where: what the reader should look at, e.g. "GPU profile my.json".
    error: exception class to raise; the message is for users.
    """

    def __init__(self, data: object, where: str, error: type[ValueError], prefix: str = "") -> None:
        self._where = where
        self._error = error
        self._prefix = prefix
        if not isinstance(data, Mapping):
            what = prefix.rstrip(".") or "the file"
            raise error(f"{where}: {what} must be a JSON object, not {type(data).__name__}")
        self._data: Mapping[str, Any] = data

    @classmethod
    def parse(cls, text: str, where: str, error: type[ValueError]) -> Fields:
        """Fields of a JSON text. Raises `error` when it is not JSON or not an object."""
        try:
            data = json.loads(text)
        except ValueError as cause:
            raise error(f"{where}: not valid JSON ({cause})") from cause
        return cls(data, where, error)

    def names(self) -> list[str]:
        return list(self._data)

    def is_null(self, name: str) -> bool:
        """True for a field that is there and says null, which is not the same as missing."""
        return self._require(name) is None

    def text(self, name: str) -> str:
        value = self._require(name)
        if not isinstance(value, str) or not value:
            raise self.bad(name, "must be a non-empty string", value)
        return value

    def flag(self, name: str) -> bool:
        value = self._require(name)
        if not isinstance(value, bool):
            raise self.bad(name, "must be true or false", value)
        return value

    def child(self, name: str) -> Fields:
        return Fields(self._require(name), self._where, self._error, f"{self._prefix}{name}.")

    def number(self, name: str, *, low: float = 0.0, high: float = math.inf) -> float:
        """A finite number in [low, high]."""
        value = self._require(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.bad(name, "must be a number", value)
        if not math.isfinite(value) or not low <= value <= high:
            bound = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise self.bad(name, f"must be {bound}", value)
        return float(value)

    def bad(self, name: str, rule: str, value: object) -> ValueError:
        """The error for a field whose value breaks `rule`."""
        return self._error(f"{self._where}: field {self._prefix}{name} {rule}, got {value!r}")

    def _require(self, name: str) -> Any:
        if name not in self._data:
            raise self._error(f"{self._where}: field {self._prefix}{name} is missing")
        return self._data[name]
