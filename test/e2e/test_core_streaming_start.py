"""Starts with `--hc-throughput auto` under SGLang's real scheduler: refused where SGLang alone is
modelled as fast, served where state has to leave the device; and what such a server says."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from sglang_hc.policy.cost_model import CostModel
from sglang_hc.profile_file import encode
from support.core import Core, run_in_child
from support.profiles import cost_model
from support.prompts import prompt
from support.streaming import CONTEXT, FLAGS

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


class Said(NamedTuple):
    """A reply, and the log probabilities of a prompt that takes several chunks."""

    tokens: list[int]
    scores: list[float]


def asked(core: Core) -> Said:
    return Said(core.ask(prompt(3, 150), 8).tokens, core.score(prompt(4, 150), 10))


def tune(core: Core) -> None:
    """As SGLang does on some GPUs before it serves: a pass over nobody's slot."""
    runner = core.scheduler.tp_worker.model_runner.eager_runner
    runner._dummy_run(3, buffers=runner._alloc_dummy_decode_buffers(3))


def longest(core: Core) -> list[Any]:
    """How requests end whose prompts are as long as can be, and longer by one token."""
    rids = [core.submit(prompt(5, CONTEXT - 7 + more), 50) for more in (0, 1)]
    core.run()
    return [core.requests[rid].finished_reason.to_json() for rid in rids]


def served(profile: str, device: int | None) -> tuple[Said, list[Any], dict[str, Any], str]:
    """What it says, how the longest requests end, what /server_info says, and the log."""
    said = io.StringIO()
    logging.getLogger("sglang_hc").addHandler(logging.StreamHandler(said))
    logging.getLogger("sglang_hc").setLevel(logging.INFO)
    core = start(profile, device)
    with torch.inference_mode():
        tune(core)
    found, ends = asked(core), longest(core)
    state = core.scheduler.get_internal_state(SimpleNamespace(internal_state=None)).internal_state
    return found, ends, state["hc"], said.getvalue()


def alone() -> Said:
    return asked(Core("--hc-disable", "--dtype", "float32", *FLAGS, profile=None))


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
    said, ends, state, log = run_in_child(served, profile, 1_500_000)
    wanted = run_in_child(alone)
    assert said.tokens == wanted.tokens
    assert said.scores == pytest.approx(wanted.scores, abs=1e-4)
    assert ends[0]["type"] == "length", "a place holds the longest request"
    assert ends[1]["type"] == "abort" and ends[1]["status_code"] == 400
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
