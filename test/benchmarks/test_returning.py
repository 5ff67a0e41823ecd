"""Conversations that left the device, beside ones that stayed: what counts as the same, and the
table; nightly with models of each kind, and as a GPU would be told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark import ROOT
from benchmark.ends import returning
from benchmark.ends.small import KINDS, NARROW, WIDE, family
from support import dry_run
from support.core import run_in_child

ROW = {
    "kind": "windows", "layers": "2 of 4", "restored_tokens": 1088, "history": 1048,
    "same_replies": True, "tie": None, "host_tokens_of_the_second_turn": 1024,
    "seconds": {"restored": 0.05, "computed": 0.2},
}  # fmt: skip


def reply(tokens: list[int], *top: dict[int, float]) -> SimpleNamespace:
    return SimpleNamespace(tokens=tokens, top=list(top))


def same(stayed: list[int], left: list[int], dtype: str) -> tuple[bool, float | None]:
    """Of second replies, in which token 5 was as likely as 6, but for 0.05."""
    tops = [{5: -1.0, 6: -1.05} for _ in stayed]
    pairs = [reply([1]), reply(stayed, *tops)], [reply([1]), reply(left)]
    return returning._same(*pairs, dtype)


def test_where_replies_part_two_tokens_must_be_as_close_as_rounding_goes() -> None:
    assert same([5, 5], [5, 5], "float32") == (True, None)
    assert same([5, 5], [5, 6], "bfloat16") == (True, pytest.approx(0.05))
    assert same([5, 5], [5, 6], "float32") == (False, pytest.approx(0.05))
    assert same([5, 5], [5, 7], "bfloat16") == (False, float("inf"))
    first = [reply([1]), reply([2], {2: 0.0})], [reply([3]), reply([2])]
    assert returning._same(*first, "bfloat16") == (False, None)


def test_a_row_says_what_it_is_worth() -> None:
    assert returning.good(ROW)
    assert not returning.good(ROW | {"same_replies": False})
    assert not returning.good(ROW | {"host_tokens_of_the_second_turn": 0}), "nothing came back"
    cells = ["windows", "2 of 4", "1,088 of 1,112", "50", "200", "4.00", "equal"]
    assert returning.cells_of(ROW) == cells
    assert len(cells) == len(returning.COLUMNS)


@pytest.mark.parametrize("kind", KINDS)
def test_models_have_layers_of_their_kind(kind: str) -> None:
    for size in (NARROW, WIDE):
        arguments = family(kind, *size, on_cpu=True).arguments
        types = arguments.get("layer_types", [])
        assert arguments["num_hidden_layers"] == size[0] and len(types) in (0, size[0])
        others = {"windows": size[0] // 2, "states": size[0] * 3 // 4}
        assert size[0] - types.count("full_attention") == others.get(kind, size[0])
        assert ("index_topk" in arguments) == (kind == "index")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_rehearsal_of_each_kind(kind: str, tmp_path: Path) -> None:
    words = ["--rehearse", "--kinds", kind, "--models", str(tmp_path)]
    words += ["--cells", str(tmp_path / "cells.jsonl"), "--out", str(tmp_path / "result.json")]
    command = [sys.executable, "-m", "benchmark.ends.returning", *words]
    for _ in range(2):  # the second one finds what the first has measured
        done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
        assert not done.returncode, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "result.json").read_text())["kinds"]
    assert row["kind"] == kind and row["tie"] is None
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 1


def as_on_a_gpu(folder: str) -> list[str]:
    """What the campaign types, up to where weights would be loaded."""
    dry_run.pretend_gpu()
    words = ["--kinds", "windows,states", "--models", folder]
    words.append("--server-args=--attention-backend triton --sampling-backend pytorch")
    return dry_run.run_script("benchmark.ends.returning", words)


@pytest.mark.slow
def test_a_gpu_understands_the_flags(tmp_path: Path) -> None:
    said: Any = run_in_child(as_on_a_gpu, str(tmp_path))
    engines = [line for line in said if line.startswith("engine ")]
    assert len(engines) == 2 and not [line for line in said if line.startswith("!")], said
