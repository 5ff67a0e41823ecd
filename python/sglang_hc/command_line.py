"""The `--hc-*` flags of a parser: one for each option of `HcConfig`."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from sglang_hc.config import FLAGS, HcConfig, flag_of


def _size_or_word(text: str) -> float | str:
    """A number; whether a word may stand in its place is checked with the value."""
    try:
        return float(text)
    except ValueError:
        return text


_PARSERS: dict[Any, Any] = {
    float: float, float | None: float, int: int, float | str: _size_or_word,
}  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the `--hc-*` flags. The parser knows types and choices; `config_from` checks values."""
    group = parser.add_argument_group("sglang-hc", "the tiers below the GPU's radix cache")
    for field in msgspec.structs.fields(HcConfig):
        flag = FLAGS[field.name]
        option: dict[str, Any] = {"help": flag.help.replace("%", "%%")}
        if field.type is bool:
            option["action"] = "store_true"
        else:
            option |= {"metavar": flag.metavar, "choices": flag.choices}
            option["type"] = _PARSERS.get(field.type, str)
            if field.default == ():
                option |= {"action": _Several, "nargs": "+"}
            elif field.default is not None:
                option["help"] += f" (default: {field.default})"
        group.add_argument(flag_of(field.name), default=None, **option)


def given_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Values of the `--hc-*` flags that were given, by field."""
    values = {name: getattr(args, f"hc_{name}") for name in FLAGS}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }


def config_from(args: argparse.Namespace) -> HcConfig:
    """The options of parsed flags. One that needs another is refused without it even where it says
    the default. Raises ConfigError."""
    given = given_flags(args)
    config = HcConfig(**given)
    config.check_needs(given)
    return config


class _Several(argparse._StoreAction):
    """A flag that may be repeated, and be a list in a file of SGLang's `--config`, which takes no
    other actions than this one's parent."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or ()), *values])
