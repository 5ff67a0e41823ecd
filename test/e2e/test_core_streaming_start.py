"""Starts with `--hc-throughput auto` under SGLang's real scheduler: refused where SGLang alone is
modelled as fast, served where state has to leave the device; and what such a server says."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from sglang_hc.policy.cost_model import CostModel
from sglang_hc.profile_file import encode
from support.core import Core, run_in_child
from support.profiles import cost_model
from support.prompts import prompt
from support.streaming import FLAGS

COSTS = cost_model(host=1e-7, project=5e-8, prefill=1e-6)
"""In seconds for a token and layer: hidden states are projected as fast as they cross."""


def start(profile: str, device: int | None) -> Core:
    """device: bytes that are left of it; None for what a CPU has."""
    from sglang_hc.srt.model import throughput_plan

    with contextlib.ExitStack() as patches:
        if device is not None:
            patches.enter_context(
                mock.patch.object(throughput_plan, "device_room", lambda runner: device)
            )
        return Core(
            *("--hc-offload-gb", "1", "--hc-throughput", "auto", "--dtype", "float32", *FLAGS),
            profile=profile,
        )


def served(profile: str, device: int | None) -> tuple[list[int], dict[str, Any], str]:
    """A reply, what /server_info says, and the log."""
    said = io.StringIO()
    logging.getLogger("sglang_hc").addHandler(logging.StreamHandler(said))
    logging.getLogger("sglang_hc").setLevel(logging.INFO)
    core = start(profile, device)
    tokens = core.ask(prompt(3, 150), 8).tokens
    asked = SimpleNamespace(internal_state=None)
    state = core.scheduler.get_internal_state(asked).internal_state
    return tokens, state["hc"], said.getvalue()


def alone() -> list[int]:
    core = Core("--hc-disable", "--dtype", "float32", *FLAGS, profile=None)
    return core.ask(prompt(3, 150), 8).tokens


@pytest.fixture
def profile(tmp_path: Path) -> str:
    file = tmp_path / "profile.json"
    costs: CostModel = COSTS
    file.write_text(encode(costs))
    return str(file)


def test_a_model_that_fits_is_refused(models: None, profile: str) -> None:
    with pytest.raises(
        AssertionError,
        match=r"--hc-throughput auto: the weights fit .*; SGLang alone is modelled at .*leave the",
    ):
        run_in_child(start, profile, None)


def test_a_model_that_does_not_fit_is_served_as_planned(models: None, profile: str) -> None:
    tokens, state, log = run_in_child(served, profile, 1_500_000)
    assert tokens == run_in_child(alone)
    found = json.loads(json.dumps(state))
    assert found.keys() == {"throughput"}
    stats = found["throughput"]
    assert stats["tokens"] == 640 and stats["rows"] >= 200
    assert stats["passes"] >= 10 and stats["rounds"] >= stats["passes"]
    assert stats["pass_seconds"] > 0 and stats["link_seconds"] > 0
    assert stats["bytes"]["weights_in"] > 0
    assert stats["bytes"]["kv_in"] + stats["bytes"]["act_in"] > 0
    assert stats["bound"] in ("link", "compute", "balanced")
    assert "SGLang's own" in log and "fastest without the CPU: " in log
    assert "as it is served, a pass of" in log
