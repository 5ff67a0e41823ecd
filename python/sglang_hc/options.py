"""How a dataclass field becomes an option: a flag, a JSON value and one check for both.

A field made by `number`, `text`, `switch` or `texts` carries its help, choices and check.
`add_flags`, `read_args` and `read_mapping` work from the fields alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, NoReturn


class ConfigError(ValueError):
    """A bad option. The message names the option and the remedy."""


Check = Callable[[Any], None]
"""Raises ConfigError for a value that cannot be used; says nothing of the option's name."""


@dataclass(frozen=True)
class _Option:
    kind: str
    help: str
    metavar: str | None
    choices: Sequence[str] | None
    check: Check


def _any(value: object) -> None:
    return None


def number(default: float | None, help: str, metavar: str, check: Check = _any) -> Any:
    """A float; None, where it is the default, means "not given"."""
    return _field(default, _Option("number", help, metavar, None, check))


def text(
    default: str | None,
    help: str,
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    check: Check = _any,
) -> Any:
    """A string, one of `choices` where they are given."""
    return _field(default, _Option("text", help, metavar, choices, check))


def texts(help: str, metavar: str, check: Check = _any) -> Any:
    """A flag that may be repeated; `check` sees each value."""
    return _field((), _Option("list", help, metavar, None, check))


def switch(help: str) -> Any:
    """Off unless the flag is there."""
    return _field(False, _Option("switch", help, None, None, _any))


def check_values(config: Any) -> None:
    """Check every value of a config dataclass. Raises ConfigError that names field and flag."""
    for item in _option_fields(config):
        option, value = _option(item), getattr(config, item.name)
        if value is None and item.default is None:
            continue
        try:
            for one in value if option.kind == "list" else (value,):
                _check_choice(option, one)
                option.check(one)
        except ConfigError as error:
            raise ConfigError(f"{item.name} ({flag_of(item.name)}): {error}") from None


def read_mapping(cls: type, values: Mapping[str, object], where: str) -> dict[str, Any]:
    """Constructor arguments from plain JSON values. Raises ConfigError that names `where`."""
    known = {item.name: item for item in _option_fields(cls)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(
            f"{where}: unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )
    return {name: _plain_value(known[name], value, where) for name, value in values.items()}


def add_flags(cls: type, group: argparse._ArgumentGroup) -> None:
    """One flag per option field."""
    for item in _option_fields(cls):
        option, flag = _option(item), flag_of(item.name)
        described: dict[str, Any] = {"help": option.help.replace("%", "%%")}
        if option.kind == "switch":
            group.add_argument(flag, action="store_true", **described)
        elif option.kind == "list":
            group.add_argument(
                flag, action="append", default=[], metavar=option.metavar,
                type=_argument(option), **described,
            )  # fmt: skip
        else:
            group.add_argument(
                flag, default=item.default, metavar=option.metavar, choices=option.choices,
                type=_argument(option), **described,
            )  # fmt: skip


def read_args(cls: type, args: argparse.Namespace) -> dict[str, Any]:
    """Constructor arguments from parsed flags."""
    values = {item.name: getattr(args, _destination(item.name)) for item in _option_fields(cls)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--hc-{name.replace('_', '-')}"


def _destination(name: str) -> str:
    return f"hc_{name}"


def _field(default: object, option: _Option) -> Any:
    return field(default=default, metadata={"option": option})


def _option_fields(config: Any) -> list[Field[Any]]:
    return [item for item in fields(config) if "option" in item.metadata]


def _option(item: Field[Any]) -> _Option:
    option: _Option = item.metadata["option"]
    return option


def _check_choice(option: _Option, value: object) -> None:
    if option.choices is not None and value not in option.choices:
        raise ConfigError(f"{value!r} is not one of {', '.join(option.choices)}")


def _plain_value(item: Field[Any], value: object, where: str) -> Any:
    """A JSON value as the field's type."""

    def refuse(wanted: str) -> NoReturn:
        raise ConfigError(f"{where}: {item.name} must be {wanted}, got {value!r}")

    option = _option(item)
    if value is None and item.default is None:
        return None
    if option.kind == "number":
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            refuse("a number")
        return float(value)
    if option.kind == "switch":
        return value if isinstance(value, bool) else refuse("true or false")
    if option.kind == "list":
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            refuse(f"a list of {option.metavar}")
        return tuple(value)
    return value if isinstance(value, str) else refuse("text")


def _argument(option: _Option) -> Callable[[str], Any]:
    """An argparse type that reports a failed check in argparse's own way."""

    def read(text: str) -> Any:
        value: Any = text
        if option.kind == "number":
            try:
                value = float(text)
            except ValueError:
                raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
        try:
            option.check(value)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return read
