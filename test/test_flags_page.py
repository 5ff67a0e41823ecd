"""docs/flags.md is the one page of the command line: nothing is missing, nothing is left over."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

import msgspec
import pytest

from sglang_hc.config import FLAGS, HcConfig, flag_of
from sglang_hc.tools.cli.main import COMMANDS

PAGE = (Path(__file__).parents[1] / "docs" / "flags.md").read_text()
SERVER, TOOLS = re.sub(r"\]\(#[^)]*\)", "]", PAGE).split("\n## Tools\n")
ROWS = {
    match["flag"]: match
    for match in re.finditer(
        r"^\| `(?P<flag>--hc-[a-z-]+)(?: (?P<value>[^`]*))?` \| (?P<default>[^|]*) \|", SERVER, re.M
    )
}
OF_SGLANG = {
    "--model-path", "--dp-size", "--radix-eviction-policy", "--enable-priority-scheduling",
    "--tokenizer-worker-num", "--enable-deterministic-inference", "--config", "--max-total-tokens",
    "--chunked-prefill-size",
}  # fmt: skip


def options_of(command: str) -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module(COMMANDS[command][0]).configure(parser)
    return {word for action in parser._actions for word in action.option_strings} - {"-h", "--help"}


def test_the_table_has_every_flag_of_the_server_and_no_other() -> None:
    assert set(ROWS) == {flag_of(name) for name in FLAGS}
    assert set(re.findall(r"--[a-z][a-z-]+", SERVER)) <= {*ROWS, *OF_SGLANG, "--hc-help"}


@pytest.mark.parametrize("field", msgspec.structs.fields(HcConfig), ids=lambda field: field.name)
def test_a_row_says_the_default_and_the_choices(field: msgspec.structs.FieldInfo) -> None:
    row, flag = ROWS[flag_of(field.name)], FLAGS[field.name]
    if isinstance(field.default, str | int | float) and not isinstance(field.default, bool):
        default = field.default if isinstance(field.default, str) else f"{field.default:g}"
        assert row["default"].startswith(default)
    for choice in flag.choices or ():
        assert f"`{choice}`" in SERVER or choice in row["value"].split("\\|")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_tool_has_a_row_with_its_options(command: str) -> None:
    row = re.search(rf"^\| `sglang-hc {command}\b[^|]*\| (.*) \|$", TOOLS, re.M)
    assert row is not None, f"no row for {command}"
    named = set(re.findall(r"`(--[a-z][a-z0-9-]+)`", row[1]))
    if "as above" in row[1]:
        shared = re.search(r"`sglang-hc simulate\b[^|]*\| (load:.*?);[^;]*$", TOOLS, re.M)
        assert shared is not None
        named |= set(re.findall(r"`(--[a-z][a-z0-9-]+)`", shared[1]))
    assert named == options_of(command)
