"""A record that agrees with the simulator is found to agree, and one that does not is not."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import convert, structs, to_builtins

from sglang_hc.config import FLAGS
from sglang_hc.forms import BlockLayout, LayerPlan, StateShape
from sglang_hc.policy.cost_model import CostModel, SourceTier, TierCopy
from sglang_hc.policy.fit import Fit, StepFit
from sglang_hc.profile_file import encode
from sglang_hc.queue.requests import Serial
from sglang_hc.tiers.trace import Recorder, Served
from sglang_hc.tools.cli.main import main
from sglang_hc.tools.simulator.calibration import ALL, compared
from sglang_hc.tools.simulator.costs import MeasuredMachine
from sglang_hc.tools.simulator.replay import replay
from sglang_hc.tools.workloads.recorded import Record, Request
from sglang_hc.tools.workloads.sessions import Ids
from sglang_hc.tree.identity import TOKEN_BYTES, Prefix, pack_tokens
from support.examples import examples

MACHINE = "LlamaForCausalLM 12, float32, KV auto, Some CPU, 1 threads of 2"
LAYERS = 4
STATE = StateShape(LAYERS, 1024, (1024, 1024), "torch.float32")
COST = CostModel(
    fingerprint=f"{MACHINE}, KV only, sglang-hc 1",
    origin="measured",
    copies={SourceTier.HOST: TierCopy(Fit(1e-5, 1e-6)), SourceTier.DISK: TierCopy(Fit(1e-4, 1e-5))},
    prefill=Fit(1e-3, 5e-4, 1e-8),
    overlap=False,
    step=StepFit(Fit(5e-3, 1e-3), 1e-7),
    passes=Fit(2e-3, 5e-4, 1e-8),
    shape=STATE,
)
SERVED = Served(
    model=MACHINE,
    context=4096,
    kv_tokens=2048,
    page_size=1,
    running=4,
    chunk=1024,
    mixed=False,
    host_slots=40,
    disk_slots=200,
    slot_bytes=BlockLayout(LayerPlan.parse("kv", LAYERS), STATE).slot_bytes,
    layer_plan="kv:4",
    eviction="queue",
    prefetch="queue",
)
WITHOUT = Served(
    model=MACHINE, context=4096, kv_tokens=2048, page_size=1, running=4, chunk=0, mixed=True
)


def said(rng: random.Random, tokens: int) -> bytes:
    return pack_tokens(rng.choices(range(1, 1000), k=tokens))


def load(rows: Sequence[tuple[float, list[int]]], pause: float = 20.0) -> list[Request]:
    """Conversations as (arrival, new tokens of each turn), a turn every `pause` seconds."""
    rng = random.Random(1)
    requests = []
    for at, lengths in rows:
        history = b""
        for turn, tokens in enumerate(lengths):
            history, answer, now = history + said(rng, tokens), said(rng, 5), at + pause * turn
            requests.append(Request(now, now + 0.1, now + 0.2, (Ids(history),), answer))
            history += answer
    return sorted(requests, key=lambda request: request.arrived)


APART = load([(100.0 * talk, [300, 40]) for talk in range(12)])
"""One request at a time."""


def as_simulated(
    served: Served, factor: float = 1.0, turn_2: float = 1.0, busy: float = 1.0
) -> list[Request]:
    """APART, measured so many times longer than it is simulated."""
    replayed = replay(APART, served, MeasuredMachine(COST, "profile.json"))
    of_ttft = replayed.simulated_busy / sum(one.simulated for one in replayed.times)
    found = []
    for one in replayed.times:
        request, longer = one.request, factor
        longer *= turn_2 if len(request.tokens) > 300 * TOKEN_BYTES else 1.0
        first = request.arrived + longer * one.simulated
        ended = request.arrived + factor * busy * of_ttft * one.simulated
        found.append(request._replace(first=first, ended=ended))
    return found


def write(path: Path, served: Served, requests: Sequence[Request], lost: int = 0) -> list[str]:
    """The record as a server writes it; returns the words of the command."""
    now = 0.0
    recorder = Recorder(path, to_builtins(served), bytes(16), clock=lambda: now)
    events = []
    for number, request in enumerate(requests):
        prompt = Prefix(None, request.tokens)
        whole = Prefix(None, request.tokens + request.answer)
        assert request.first is not None
        events.append((request.arrived, 0, recorder.arrived, (Serial(number), prompt)))
        events.append((request.first, 1, recorder.answered, (Serial(number),)))
        events.append(
            (max(request.ended, request.first), 2, recorder.finished, (Serial(number), whole))
        )
    for at, _, note, told in sorted(events, key=lambda event: event[:2]):
        now = at  # what the recorder's clock says
        note(*told)
    recorder.close()
    if lost:
        path.write_text(path.read_text() + json.dumps({"op": "lost", "events": lost}) + "\n")
    profile = path.with_name("profile.json")
    profile.write_text(encode(COST))
    return ["calibrate", "--record", str(path), "--profile", str(profile)]


@pytest.mark.parametrize("served", [SERVED, WITHOUT], ids=["tiers", "stock"])
@pytest.mark.parametrize(
    ("changes", "outside"),
    [
        ({}, []),
        ({"factor": 0.84}, []),
        ({"factor": 1.19}, []),
        ({"factor": 0.79}, ["throughput", "turn 1", "turn 2"]),
        ({"factor": 1.27}, ["throughput", "turn 1", "turn 2"]),
        ({"turn_2": 1.27}, ["turn 2"]),
        ({"busy": 1.27}, ["throughput"]),
    ],
)
def test_what_is_outside_is_named_and_ends_with_status_1(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    served: Served,
    changes: dict[str, float],
    outside: list[str],
) -> None:
    words = write(tmp_path / "t.jsonl", served, as_simulated(served, **changes))
    status = main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    named = {re.sub("TTFT p.., ", "", name) for name in found["outside"]}
    assert sorted(named) == outside and status == bool(outside)
    assert [row["turns"] for row in found["ttft"]] == [ALL, "turn 1", "turn 2"]
    assert [row["requests"] for row in found["ttft"]] == [24, 12, 12]
    if not changes:
        ratios = [ratio for row in found["ttft"] for ratio in row["ratio"].values()]
        assert [*ratios, found["throughput"]["ratio"]] == pytest.approx([1.0] * 7, rel=0.01)
    assert main([*words, "--tolerance", "0.5"]) == 0
    assert "within 0.5" in capsys.readouterr().out


rows = st.lists(
    st.tuples(st.floats(0, 9), st.lists(st.integers(1, 400), min_size=1, max_size=3)),
    min_size=1,
    max_size=9,
)


@settings(deadline=None, max_examples=examples(40))
@given(
    talks=rows, served=st.sampled_from([structs.replace(SERVED, disk_slots=0), WITHOUT]),
    pause=st.floats(0, 1e3),
)  # fmt: skip
def test_a_busy_period_begins_with_an_idle_server(
    talks: list[tuple[float, list[int]]], served: Served, pause: float
) -> None:
    """However slow the simulated server is, requests find it as busy as their record says."""
    machine = MeasuredMachine(COST, "profile.json")
    requests = load(talks)
    found = replay(requests, served, machine)
    assert {id(one.request) for one in found.times} == {id(request) for request in requests}
    assert found.simulated_busy + 1e-6 >= max(one.simulated for one in found.times)
    split = next((n for n, r in enumerate(requests) if r.arrived >= 15.0), len(requests))
    later = [
        r._replace(arrived=r.arrived + pause, first=r.arrived + pause + 0.1, ended=r.ended + pause)
        for r in requests[split:]
    ]
    again = replay([*requests[:split], *later], served, machine)
    assert [one.simulated for one in again.times] == pytest.approx(
        [one.simulated for one in found.times], rel=1e-6
    )


def test_the_last_turns_are_one_where_they_are_few() -> None:
    machine = MeasuredMachine(COST, "profile.json")

    def turns(*lengths: int) -> list[tuple[str, int]]:
        talks = [(50.0 * n, [64] * length) for n, length in enumerate(lengths)]
        found = compared(Record(WITHOUT, load(talks), 0), machine)
        return [(row.turns, row.requests) for row in found.rows[1:]]

    assert turns(*[2] * 10) == [("turn 1", 10), ("turn 2", 10)]
    assert turns(*[1] * 9, 2, 2) == [("turn 1 and later", 13)]
    assert turns(*[4] * 5, *[1] * 5) == [("turn 1", 10), ("turn 2 and later", 15)]


@pytest.mark.parametrize(
    ("served", "profile", "says"),
    [
        ({"model": MACHINE.replace("Some CPU", "Other CPU")}, {}, "a server with Other CPU; meas"),
        ({}, {"fingerprint": MACHINE.replace("12", "13")}, "a server with LlamaForCausalLM 12"),
        ({}, {"step": None}, "without passes of an engine"),
        ({}, {"passes": None}, "without passes of an engine; write a new one"),
        ({}, {"copies": {SourceTier.HOST: TierCopy(Fit(0, 1))}}, "has no costs for disk"),
        ({"layer_plan": "hidden:4"}, {}, "has no costs for hidden states"),
        ({"layer_plan": "kv:3"}, {}, "layer plan 'kv:3'"),
        ({"slot_bytes": 64}, {}, "and the server of the record 64"),
        ({"restore": "always"}, {}, "--hc-restore always, which is not simulated"),
        ({"remote": True}, {}, "--hc-remote, which is not simulated"),
        ({"write": "some"}, {}, "must be all, second-use, or bytes a day"),
        ({"kv_tokens": 0}, {}, "kv_tokens"),
        ({"eviction": "fifo"}, {}, "'fifo' - at `$.eviction`"),
    ],
)
def test_files_that_do_not_fit_together_are_one_sentence(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    served: dict[str, object],
    profile: dict[str, object],
    says: str,
) -> None:
    words = write(tmp_path / "t.jsonl", structs.replace(SERVED, **served), APART)
    Path(words[-1]).write_text(encode(replace(COST, **profile)))
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert says in error and "\n" not in error and error.startswith("sglang-hc calibrate: --re")


@pytest.mark.parametrize("name", ["eviction", "prefetch", "schedule", "restore"])
def test_a_record_may_say_each_choice_of_an_option(name: str) -> None:
    for choice in FLAGS[name].choices or ():
        values = to_builtins(structs.replace(SERVED, **{name: choice}))
        assert to_builtins(convert(values, Served)) == values


def test_records_that_say_too_little_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refused(words: Sequence[str]) -> str:
        assert main(words) == 2
        return capsys.readouterr().err

    assert "record at least 10" in refused(write(tmp_path / "few", SERVED, APART[:9]))
    assert "3 events are missing" in refused(write(tmp_path / "gaps", SERVED, APART, lost=3))
    path = tmp_path / "old"
    words = write(path, SERVED, APART)
    path.write_text(path.read_text().replace('"version":3', '"version":2', 1))
    assert "has no times of first tokens; record anew" in refused(words)
    path.write_text(path.read_text().replace('"version":2', '"version":9', 1))
    assert "this release reads versions 2 and 3" in refused(words)
    path.write_text("[1]\n")
    assert "old:1" in refused(words)
    for other in ("", '{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [1]}\n'):
        path.write_text(other)
        assert "not what a server's --hc-trace writes" in refused(words)
    assert "no such file" in refused(["calibrate", "--record", "/nowhere", "--profile", words[-1]])
    assert "--tolerance" in refused([*words, "--tolerance", "-1"])


def test_a_record_in_which_no_time_passes_is_outside(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    still = [request._replace(arrived=0.0, first=0.0, ended=0.0) for request in APART]
    assert main(write(tmp_path / "t.jsonl", SERVED, still)) == 1
    assert "outside of 0.2: throughput" in capsys.readouterr().out


def test_what_the_server_did_not_write_is_computed_again() -> None:
    """`--hc-write second-use` writes nothing before something was used again: turns that left host
    memory find nothing on disk."""
    talks = load([(20.0 * talk, [300, 40]) for talk in range(12)], pause=300.0)

    def second_turns(write: str) -> float:
        served = structs.replace(SERVED, host_slots=6, write=write)
        times = replay(talks, served, MeasuredMachine(COST, "profile.json")).times
        return sum(one.simulated for one in times if one.request.arrived >= 300.0)

    assert second_turns("second-use") > 2 * second_turns("all")


def test_on_a_cpu_a_first_token_is_told_behind_the_next_pass() -> None:
    """As SGLang's overlap scheduling does, whose results are looked at when the next pass runs: a
    decode step, or a prompt that came meanwhile. Behind a lone answer of one token is none."""
    alone = load([(50.0 * talk, [300]) for talk in range(3)])
    alone[1] = alone[1]._replace(answer=b"")
    crowded = load([(0.0, [300]), (0.1, [200])])

    def ttft(requests: Sequence[Request], overlap: bool, cost: CostModel = COST) -> list[float]:
        served = structs.replace(WITHOUT, overlap=overlap)
        return [one.simulated for one in replay(requests, served, MeasuredMachine(cost, "")).times]

    assert COST.step is not None and COST.passes is not None
    step = LAYERS * COST.step.seconds(1, 303)
    second = LAYERS * COST.passes.seconds(200)
    early = ttft(alone, False)
    late = [now - before for now, before in zip(ttft(alone, True), early, strict=True)]
    assert late == pytest.approx([step, 0.0, step], rel=0.01, abs=1e-9)
    behind = ttft(crowded, True)[0] - ttft(crowded, False)[0]
    assert behind == pytest.approx(second, rel=0.01)
    on_gpu = replace(COST, overlap=True)
    assert ttft(alone, True, on_gpu) == ttft(alone, False, on_gpu)
