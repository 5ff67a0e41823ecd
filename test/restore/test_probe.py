"""The probe with a clock that only the measured parts move: what comes out is what they cost."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmark.harness.throttled import ThrottledCopyStream
from sglang_hc.device.copy_stream import CopyStream, HostCopyStream
from sglang_hc.forms import StateShape
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.restore.probe import BUDGET_S, LAYERS, ROUNDS, ROWS, Subject, probe
from sglang_hc.restore.probe_disk import BLOCKS
from sglang_hc.restore.staging import StagingRing
from sglang_hc.srt.ranks.start_group import StartGroup
from sglang_hc.store.disk import DiskStore
from sglang_hc.store.outcome import Outcome
from support.clock import Clock
from support.start_groups import on_ranks

CPU = torch.device("cpu")
SHAPE = StateShape(6, 8, (16, 16), "uint8")
FRAMES = (3, 1 << 17)
BYTE_S = 1e-7
PROJECT_S = 3e-6
TOKEN_S, PAIR_S = 2e-5, 1e-9


class SlowCopyStream(HostCopyStream):
    """Copies on the calling thread, at one speed."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(target, source)
        self.clock.now += source.numel() * BYTE_S


def throttled(clock: Clock) -> ThrottledCopyStream:
    """Copies at the same speed, but beside the compute."""
    return ThrottledCopyStream(1 / BYTE_S, clock, clock.pass_time)


class Sink:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.parts = [torch.zeros((ROWS, part), dtype=torch.uint8) for part in SHAPE.kv_parts]
        self.written: dict[str, list[int]] = {"kv": [], "hidden": []}

    def write_kv(self, layer: int, parts: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        self.written["kv"].append(layer)
        for target, rows in zip(self.parts, parts, strict=True):
            target.index_copy_(0, slots, rows)

    def write_hidden(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        assert hidden.shape == (len(slots), SHAPE.hidden_bytes)
        self.written["hidden"].append(layer)
        self.clock.now += len(slots) * PROJECT_S


def subject(
    clock: Clock, copy_stream: CopyStream, hidden: bool = True, slow: float = 1.0
) -> Subject:
    def prefill(new: int, context: int) -> None:
        clock.now += slow * new * (TOKEN_S + PAIR_S * (context + new / 2))

    staging = StagingRing(*FRAMES, CPU, copy_stream)
    return Subject(SHAPE, staging, Sink(clock), prefill, ROWS, hidden)


@pytest.mark.parametrize("kind", [SlowCopyStream, throttled])
def test_the_costs_are_those_of_the_parts(kind: Callable[[Clock], CopyStream]) -> None:
    clock = Clock()
    cost = probe(subject(clock, kind(clock)), "here", clock=clock)
    host = cost.copies[SourceTier.HOST]
    assert host.hidden is not None and cost.project is not None
    assert host.hidden.per_token == pytest.approx(8 * BYTE_S)
    assert host.kv.per_token == pytest.approx(32 * BYTE_S)
    assert cost.project.per_token == pytest.approx(PROJECT_S)
    assert cost.prefill.per_token == pytest.approx(TOKEN_S)
    assert cost.prefill.per_pair == pytest.approx(PAIR_S)
    assert cost.overlap == (kind is throttled)
    assert cost.ahead == pytest.approx(FRAMES[0] * FRAMES[1] * BYTE_S)
    assert (cost.fingerprint, cost.origin, cost.learned) == ("here", "measured", {})


def test_layers_are_written_in_turn_as_in_a_pass() -> None:
    """The rows of a single layer stay in the caches, and copies into it look cheaper than they
    are in a pass."""
    clock = Clock()
    measured = subject(clock, SlowCopyStream(clock))
    probe(measured, "here", clock=clock)
    for layers in measured.sink.written.values():  # type: ignore[attr-defined]
        assert len(layers) > LAYERS and layers == [n % LAYERS for n in range(len(layers))]


def test_a_model_without_hidden_form_has_no_costs_for_it() -> None:
    clock = Clock()
    cost = probe(subject(clock, SlowCopyStream(clock), hidden=False), "here", clock=clock)
    assert cost.project is None and cost.copies[SourceTier.HOST].hidden is None


@pytest.mark.parametrize("rows", [ROWS, ROWS - 1, 1088, 600, 64, 16])
def test_a_short_window_is_measured_too(rows: int) -> None:
    """With 600 tokens two prefills were timed, nothing was fitted, and all that was stored was
    restored, whatever it cost."""
    clock = Clock()
    asked: list[tuple[int, int]] = []
    short = subject(clock, SlowCopyStream(clock))

    def prefill(new: int, context: int) -> None:
        asked.append((new, context))
        short.prefill(new, context)

    cost = probe(replace(short, prefill=prefill, rows=rows), "here", clock=clock)
    assert all(new > 0 and new + context <= rows for new, context in asked)
    assert max(new + context for new, context in asked) == rows
    assert cost.prefill.per_token == pytest.approx(TOKEN_S, rel=1e-3)
    assert cost.prefill.per_pair == pytest.approx(PAIR_S, rel=1e-3)


@pytest.mark.parametrize(("slow", "rounds"), [(1.0, ROUNDS), (300.0, 1)])
def test_a_slow_machine_is_measured_once(slow: float, rounds: int) -> None:
    clock = Clock()
    asked: list[int] = []
    machine = subject(clock, SlowCopyStream(clock), slow=slow)

    def prefill(new: int, context: int) -> None:
        asked.append(new)
        machine.prefill(new, context)

    cost = probe(replace(machine, prefill=prefill), "here", clock=clock)
    assert len(asked) == 4 * (1 + rounds), "the first time is not counted"
    assert cost.prefill.per_token == pytest.approx(slow * TOKEN_S, rel=0.01)


def test_a_sample_is_the_fastest_of_its_rounds() -> None:
    clock = Clock()
    machine = subject(clock, SlowCopyStream(clock))
    calls: Counter[tuple[int, int]] = Counter()

    def prefill(new: int, context: int) -> None:
        calls[new, context] += 1
        clock.now += 99.0 if calls[new, context] != ROUNDS else 0.0
        machine.prefill(new, context)

    generous = replace(machine, prefill=prefill, most=lambda seconds: min(seconds, BUDGET_S))
    cost = probe(generous, "here", clock=clock)
    assert cost.prefill.per_token == pytest.approx(TOKEN_S)


def test_ranks_run_equally_often_and_have_the_times_of_the_slowest() -> None:
    """One has ten times as slow a device, and a clock of its own: a rank that ran a prefill more
    than the other would wait in its collective for ever, so this meeting would break."""
    runs: list[list[tuple[int, int]]] = [[], []]

    def on_rank(group: StartGroup) -> CostModel:
        clock = Clock()
        clock.now = 1000.0 * group.rank
        mine = subject(clock, SlowCopyStream(clock), slow=(30.0, 300.0)[group.rank])
        alone = mine.prefill

        def prefill(new: int, context: int) -> None:
            group.each((new, context))  # stands for the layer's all-reduce
            runs[group.rank].append((new, context))
            alone(new, context)

        return probe(replace(mine, prefill=prefill, most=group.most), "here", clock=clock)

    fast, slow = on_ranks(2, on_rank)
    assert runs[0] == runs[1] and len(runs[0]) == 8
    assert fast.prefill == slow.prefill
    assert fast.prefill.per_token == pytest.approx(300 * TOKEN_S, rel=0.01)


def test_disk_is_read_through_the_store_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both directories are read, whole blocks of six layers; the cost is that of the reads."""
    clock = Clock()
    read: list[bytes] = []
    original, counting = DiskStore.read, threading.Lock()

    def slow_read(self: DiskStore, block_id: bytes, into: memoryview) -> Outcome:
        with counting:
            read.append(block_id)
            clock.now += 1e-3
        return original(self, block_id, into)

    monkeypatch.setattr(DiskStore, "read", slow_read)
    monkeypatch.setattr("sglang_hc.restore.probe_disk.READ_THREADS", 1)
    disks = (f"{tmp_path / 'a'}:1", str(tmp_path / "b"))
    cost = probe(subject(clock, SlowCopyStream(clock)), "here", disks, clock)
    assert len(set(read)) == BLOCKS
    for tokens, blocks in ((64, 1), (1024, 16)):
        seconds = cost.copy_kv(SourceTier.DISK, tokens)
        assert seconds == pytest.approx(blocks * 1e-3 / 6, rel=1e-3)
    # A hidden state has a quarter of the bytes, and a read costs nothing else here.
    hidden = cost.copy_hidden(SourceTier.DISK, 1024)
    assert hidden == pytest.approx(cost.copy_kv(SourceTier.DISK, 1024) / 4, rel=1e-2)
    assert list((tmp_path / "a").iterdir()) == list((tmp_path / "b").iterdir()) == []


def test_nothing_of_a_measurement_is_left_when_it_is_over() -> None:
    """On a GPU it is 0.8 GB of frames and scratch rows; without a run of the garbage collector."""
    clock = Clock()
    measured = subject(clock, SlowCopyStream(clock))
    left: list[weakref.ref[object]] = [weakref.ref(frame) for frame in measured.staging.free]
    left += [weakref.ref(measured.sink), weakref.ref(measured.sink.parts[0])]  # type: ignore[attr-defined]
    gc.disable()
    try:
        probe(measured, "here", clock=clock)
        del measured
        assert len(left) == FRAMES[0] + 2
        assert [ref() for ref in left] == [None] * len(left)
    finally:
        gc.enable()
