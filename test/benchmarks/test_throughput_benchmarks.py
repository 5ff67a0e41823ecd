"""Passes behind a slow link, as far as that goes without a model; nightly with one."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark import ROOT
from benchmark.harness.throttled import ThrottledCopyStream
from benchmark.throughput import link, shares
from benchmark.throughput.paper import paper_model
from sglang_hc.policy.hybrid import best_split
from sglang_hc.policy.streamed_pass import Load
from support.clock import Clock

FOUND = {
    "link": 0.5,
    "compute": [[0.4, 0.6], [0.4, 0.4]],
    "ahead": [[0.5, 0.6], [0.55, 0.5]],
    "in line": [[0.9, 1.2], [0.9, 0.9]],
}


def test_a_pass_is_set_against_the_slower_of_its_turn() -> None:
    assert link.over_the_slower(FOUND, "ahead") == pytest.approx(1.0)
    assert link.over_the_slower(FOUND, "in line") == pytest.approx(1.8)
    (row,) = link.passes_table({"the balance": FOUND}).rows
    assert row == ("the balance", "500", "400", "525", "900", "1.00", "1.80")


def test_what_comes_and_what_goes_do_not_share_the_bucket() -> None:
    clock = Clock(0.0)
    inward = ThrottledCopyStream(10.0, clock, clock.pass_time)
    assert inward.opposite().opposite() is inward
    row = torch.zeros(20, dtype=torch.uint8)
    for stream in (inward, inward.opposite()):
        stream.copy(row, row)
    inward.before_compute(inward.record())
    assert clock() == pytest.approx(2.0)
    inward.opposite().record().wait()
    assert clock() == pytest.approx(2.0)


def test_the_planned_share_is_compared_with_the_best_of_the_others() -> None:
    model, load = paper_model("30B"), Load(64, 64 * 1024, 64)
    share = shares.planned_share(model, load)
    split = best_split(model, load, 1, most_resident=0, most_on_device=0)
    assert split is not None and share == pytest.approx(split.act / load.tokens, abs=1e-3)
    assert 0.1 < share < 0.9
    found: dict[str, dict[str, Any]] = {
        "0": {"pass_s": 2.0}, "1": {"pass_s": 1.6}, shares.OFFLOAD: {"pass_s": 9.0},
        shares.PLANNED: {"pass_s": 1.2, "model": dataclasses.asdict(model)},
    }  # fmt: skip
    rows = shares.table_of(found, load, share).rows
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("0", "2000", "1.25"), ("1", "1600", "1.00"), (f"{share:.3f}, planned", "1200", "0.75"),
    ]  # fmt: skip
    modelled = [int(row[2]) for row in rows]
    assert min(modelled) == modelled[2]


@pytest.mark.slow
@pytest.mark.usefixtures("models")
def test_both_run_with_a_tiny_model(tmp_path: Path) -> None:
    def run(module: str, *words: str) -> None:
        command = [sys.executable, "-m", f"benchmark.throughput.{module}", *words]
        subprocess.run(command, check=True, cwd=ROOT)

    out = tmp_path / "out.json"
    words = ("--model", "llama-gqa", "--chunk", "64", "--history", "128", "--rounds", "1")
    run("link", *words, "--json", str(out))
    rows = json.loads(out.read_text())["tables"]["returning"]["rows"]
    assert [row[3] for row in rows] == ["1", "3"], "passes, restored and recomputed"
    run("shares", "--rehearse", "--json", str(out), "--cells", str(tmp_path / "cells"))
    assert len(json.loads(out.read_text())["tables"]["shares"]["rows"]) == 2
