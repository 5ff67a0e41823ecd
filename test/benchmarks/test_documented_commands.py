"""Every command that a page or the campaign tells people to type, up to where weights are loaded.

benchmark.restore.run once asked for 17,408 positions of a model that has 16,384, and nobody
knew until somebody had a GPU: with the flags for a CPU it was right.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmark.gpu.install import TRITON_FLAGS
from benchmark.gpu.steps import STEPS
from support import dry_run
from support.core import run_in_child

ROOT = dry_run.ROOT
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmark/**/*.md"),
     *ROOT.glob("sgl-kernel-ext/*.md")]
)  # fmt: skip
ENGINE_SCRIPTS = (
    *(f"benchmark.restore.{name}" for name in ("run", "drift", "capture")),
    *(f"benchmark.gpu.{name}" for name in ("cliff", "multi_turn", "overhead", "smoke")),
    "benchmark.__main__",
)
COMMAND = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?"
    r"(?P<what>python -m (?:sglang_hc\.launch_server|benchmark(?:\.\w+)*)|sglang-hc|"
    r"python (?:benchmark|scripts|sgl-kernel-ext)/\S+\.py)(?P<words>.*)$"
)
PLACES = {
    "MODEL": "models/llama-mha", "M": "models/llama-mha", "FOLDER": "models/llama-mha",
    "FOLDER_OR_CONFIG": "models/llama-mha", "SIZE": "1", "SHAPE": "llama-2-7b", "PART": "capacity",
}  # fmt: skip


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(program, words) of every command in a code block or in a table."""
    for line in page.read_text().replace("\\\n", " ").splitlines():
        block, row = line.startswith("    "), line.startswith("|")
        # In running text, and without flags, a name is no command to type.
        cells = [word for word in re.findall(r"`([^`]+)`", line) if row and "--" in word]
        for command in [line.strip()] if block else cells:
            match = COMMAND.match(command.split(" #")[0].strip())
            # `[...]` and `...` describe commands, they are not typed.
            if match and not re.search(r"\.\.\.|\[", command):
                yield match["what"], shlex.split(match["words"])


def typed(words: list[str], folder: str) -> list[str]:
    """Words with something in the place of what the page leaves to the reader."""

    def place(word: str) -> str:
        left_open = re.fullmatch(r"[A-Z][A-Z0-9]+", word)
        return PLACES.get(word, f"{folder}/{word.lower()}" if left_open else word)

    return [place(word) for word in words]


def try_command(what: str, words: list[str]) -> list[str]:
    """What became of it; lines that begin with `!` are faults."""
    if what.endswith("launch_server"):
        return dry_run.try_server(words)
    if what == "sglang-hc":
        return dry_run.parse_only(None, words)
    script = what.removeprefix("python ").removeprefix("-m ")
    script = "benchmark.__main__" if script == "benchmark" else script
    if script in ENGINE_SCRIPTS:
        return dry_run.run_script(script, words)
    return dry_run.parse_only(script, words)


def try_all(found: list[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Faults by command. In a child, because it pretends to have a GPU."""
    dry_run.pretend_gpu()
    said = {}
    for what, words in found:
        lines = try_command(what, words)
        faults = [line for line in lines if line.startswith("!")]
        if faults or not lines:
            said[f"{what} {shlex.join(words)}"] = faults or ["nothing ran"]
    return said


def faults(*found: tuple[str, list[str]]) -> dict[str, list[str]]:
    said: dict[str, list[str]] = run_in_child(try_all, list(found))
    return said


DOCUMENTED = {page: found for page in PAGES if (found := list(commands(page)))}


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("page", DOCUMENTED, ids=[str(p.relative_to(ROOT)) for p in DOCUMENTED])
def test_the_commands_of_a_page_are_understood(page: Path, tmp_path: Path) -> None:
    assert not faults(*((what, typed(words, str(tmp_path))) for what, words in DOCUMENTED[page]))


def test_the_pages_have_commands_of_every_kind() -> None:
    found = [what for commands in DOCUMENTED.values() for what, _ in commands]
    server = "python -m sglang_hc.launch_server"
    assert {"sglang-hc", server, "python -m benchmark.gpu.campaign"} < set(found)
    assert len(found) >= 30  # pages may become shorter, but the commands must be found


@pytest.mark.usefixtures("models")
def test_the_steps_of_the_campaign_are_understood(tmp_path: Path) -> None:
    found = []
    for step in STEPS:
        words = [word.replace("{scratch}", str(tmp_path)) for word in step.command[1:]]
        words += ["--cells", str(tmp_path / "cells.jsonl")]
        if step.takes_server_args:
            words.append(f"--server-args={TRITON_FLAGS}")
        found.append((f"python -m {step.command[0]}", words))
    assert not faults(*found)


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("shape", ["llama-2-7b", "llama-2-13b", "llama-3.1-8b"])
def test_the_longest_history_fits_the_positions_of_the_model(shape: str) -> None:
    """It has as many tokens as the model has positions; one more is refused."""
    run = "python -m benchmark.restore.run"
    assert not faults((run, ["--shape", shape]))
    (said,) = faults((run, ["--shape", shape, "--histories", "16385"])).values()
    assert "16385" in said[0]
