"""Measuring with a clock that only the measured parts move: what comes out is what they cost."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmark.harness.throttled import ThrottledCopyStream
from sglang_hc.device.copy_stream import CopyStream, HostCopyStream
from sglang_hc.forms import BlockLayout, Form, LayerPlan, StateShape
from sglang_hc.policy.cost_model import NOISY, CostModel, Samples, SourceTier
from sglang_hc.policy.layer_plan import auto_plan
from sglang_hc.restore.measure import (
    ATTEMPTS,
    BUDGET_S,
    LAYERS,
    PREFILLS,
    ROUNDS,
    Sampled,
    Subject,
    measure,
    quietest,
    sample_sizes,
)
from sglang_hc.restore.measure_disk import disk_samples
from sglang_hc.restore.staging import StagingRing
from sglang_hc.srt.ranks.start_group import StartGroup
from sglang_hc.store.disk import DiskStore
from sglang_hc.store.disk.reader import Read
from sglang_hc.store.outcome import Outcome
from support.clock import Clock
from support.start_groups import on_ranks

CPU = torch.device("cpu")
SHAPE = StateShape(6, 8, (16, 16), "uint8")
ROWS = 8128
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
def test_the_fitted_costs_are_those_of_the_parts(kind: Callable[[Clock], CopyStream]) -> None:
    clock = Clock()
    samples = measure(subject(clock, kind(clock)), clock=clock)
    cost = CostModel.from_samples(samples, "here")
    host = cost.copies[SourceTier.HOST]
    assert host.hidden is not None and cost.project is not None
    assert host.hidden.per_token == pytest.approx(8 * BYTE_S)
    assert host.kv.per_token == pytest.approx(32 * BYTE_S)
    assert cost.project.per_token == pytest.approx(PROJECT_S)
    assert cost.prefill.per_token == pytest.approx(TOKEN_S)
    assert cost.prefill.per_pair == pytest.approx(PAIR_S)
    assert cost.overlap == (kind is throttled)
    assert cost.ahead == pytest.approx(FRAMES[0] * FRAMES[1] * BYTE_S)
    assert cost.complaints() == ()


LINK_BYTES_S, CALL_S = 55e9, 10e-6
"""Of PCIe 5, and what a copy costs the thread that submits it."""


class SerialLink(SlowCopyStream):
    """As pageable memory: a call returns when its copy is done."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        HostCopyStream.copy(self, target, source)
        self.clock.now += CALL_S + source.numel() / LINK_BYTES_S


@pytest.mark.parametrize("part", [256, 1024])
@pytest.mark.parametrize("beside", [True, False])
def test_a_fast_link_overlaps_although_a_call_costs_more_than_a_block(
    part: int, beside: bool
) -> None:
    """A block comes in a tenth or in half of the time of a call, so 64 calls took longer than
    their bytes, and the costs said that nothing can run beside a copy."""
    clock = Clock()
    shape = replace(SHAPE, kv_parts=(part, part))
    link = (
        ThrottledCopyStream(LINK_BYTES_S, clock, clock.pass_time, CALL_S)
        if beside
        else SerialLink(clock)
    )
    fast = subject(clock, link, hidden=False)
    sink = Sink(clock)
    sink.parts = [torch.zeros((ROWS, part), dtype=torch.uint8) for _ in shape.kv_parts]
    samples = measure(replace(fast, shape=shape, sink=sink), clock=clock)
    assert samples.overlap == beside


def test_layers_are_written_in_turn_as_in_a_pass() -> None:
    """The rows of a single layer stay in the caches, and copies into it look cheaper than they
    are in a pass."""
    clock = Clock()
    measured = subject(clock, SlowCopyStream(clock))
    measure(measured, clock=clock)
    for layers in measured.sink.written.values():  # type: ignore[attr-defined]
        assert len(layers) > LAYERS and layers == [n % LAYERS for n in range(len(layers))]


def test_a_model_without_hidden_form_has_no_costs_for_it() -> None:
    clock = Clock()
    samples = measure(subject(clock, SlowCopyStream(clock), hidden=False), clock=clock)
    assert set(samples.copies) == {(SourceTier.HOST, Form.KV)}
    assert CostModel.from_samples(samples, "here").project is None


@pytest.mark.parametrize(
    ("rows", "prefills"),
    [(1023, [(255, 0), (511, 0), (1023, 0)]), (1024, [(64, 0), (512, 0), (1024, 0)])],
)
def test_a_short_window_is_measured_too(rows: int, prefills: list[tuple[int, int]]) -> None:
    """With 600 tokens two prefills were timed, nothing was fitted, and all that was stored was
    restored, whatever it cost."""
    clock = Clock()
    short = replace(subject(clock, SlowCopyStream(clock)), rows=rows)
    samples = measure(short, clock=clock)
    assert [(new, context) for new, context, _ in samples.prefill] == prefills
    cost = CostModel.from_samples(samples, "here")
    assert cost.prefill.per_token == pytest.approx(TOKEN_S)
    assert cost.prefill.per_pair == pytest.approx(PAIR_S)


@pytest.mark.parametrize(("rows", "longest"), [(8128, 8064), (8127, 4032), (4096, 4032)])
def test_few_and_many_tokens_behind_the_longest_context_that_fits(rows: int, longest: int) -> None:
    """What 8,064 tokens take was once extrapolated from half as many."""
    clock = Clock()
    long = replace(subject(clock, SlowCopyStream(clock)), rows=rows)
    sizes = [size[:2] for size in measure(long, clock=clock).prefill]
    assert [context for new, context in sizes if new == 64] == [0, 1024, longest]
    assert ((1024, 7104) in sizes) == (rows == 8128)


@pytest.mark.parametrize(("rows", "contexts"), [(4095, [0, 1024]), (1088, [0, 1024]), (1087, [0])])
def test_the_fewest_new_tokens_in_shorter_windows(rows: int, contexts: list[int]) -> None:
    clock = Clock()
    short = replace(subject(clock, SlowCopyStream(clock)), rows=rows)
    prefill = measure(short, clock=clock).prefill
    assert [context for new, context, _ in prefill if new == 64] == contexts


@pytest.mark.parametrize("slow", [1.0, 30.0, 300.0])
def test_a_slow_machine_is_measured_within_the_budget(slow: float) -> None:
    clock = Clock()
    began = clock.now
    samples = measure(subject(clock, SlowCopyStream(clock), slow=slow), clock=clock)
    assert clock.now - began <= BUDGET_S
    assert 4 <= len(samples.prefill) <= len(PREFILLS)
    assert CostModel.from_samples(samples, "here").prefill.per_token == pytest.approx(
        slow * TOKEN_S, rel=0.01
    )


def test_a_sample_is_the_median_of_rounds_over_all_sizes() -> None:
    clock = Clock()
    calls: list[int] = []

    def run(size: int) -> float:
        calls.append(size)
        clock.now += 0.01
        return 9.0 if calls.count(size) == 4 else float(size)

    found = sample_sizes(run, [(1,), (2,)], 2, 60.0, clock)
    assert found.times == {(1,): 1.0, (2,): 2.0}
    assert found.noise == 1.0, "one slow repeat is no busy machine"
    assert calls == [1, 1, 2, 2] + [1, 2] * (ROUNDS - 1)


def test_ranks_run_equally_often_and_have_the_times_of_the_slowest() -> None:
    """One has ten times as slow a device, and a clock of its own: a rank that ran a prefill more
    than the other would wait in its collective for ever, so this meeting would break."""
    runs: list[list[tuple[int, int]]] = [[], []]

    def on_rank(group: StartGroup) -> Samples:
        clock = Clock()
        clock.now = 1000.0 * group.rank
        mine = subject(clock, SlowCopyStream(clock), slow=(30.0, 300.0)[group.rank])
        alone = mine.prefill

        def prefill(new: int, context: int) -> None:
            group.each((new, context))  # stands for the layer's all-reduce
            runs[group.rank].append((new, context))
            alone(new, context)

        mine = replace(mine, prefill=prefill, most=group.most)
        return measure(mine, clock=clock, budget_s=20.0)

    fast, slow = on_ranks(2, on_rank)
    assert runs[0] == runs[1] and 4 <= len(fast.prefill) < len(PREFILLS)
    assert fast.prefill == slow.prefill
    found = CostModel.from_samples(fast, "here").prefill.per_token
    assert found == pytest.approx(300 * TOKEN_S, rel=0.01)


def noise_of(repeats: Sequence[float], worked: float | None = None) -> float:
    """Of one size whose repeats take so long; worked: the share of it that the thread computes."""
    clock = Clock()
    left = iter([1.0, *repeats])
    computed = 0.0

    def run(size: int) -> float:
        nonlocal computed
        seconds = next(left)
        clock.now += seconds
        computed += seconds * (worked or 0.0)
        return seconds

    cpu = (lambda: computed) if worked is not None else None
    return sample_sizes(run, [(1,)], 1, 1e9, clock, cpu).noise


def test_a_machine_with_other_work_is_noticed() -> None:
    """By repeats that differ, or, where all are as slow, by waiting for a processor."""
    assert noise_of([1.0, 1.2, 1.1, 1.0, 1.3]) <= NOISY < noise_of([1.0, 3.0, 2.0, 1.0, 4.0])
    assert noise_of([4.0] * 5) == 1.0
    assert noise_of([4.0] * 5, worked=0.9) <= NOISY < noise_of([4.0] * 5, worked=0.25)


@pytest.mark.parametrize(
    ("noises", "budget", "attempts", "kept"),
    [
        ([1.1], 60.0, 1, 1.1),
        ([4.0, 1.2, 9.0], 60.0, 2, 1.2),
        ([4.0, 3.0, 9.0, 1.0], 60.0, ATTEMPTS, 3.0),
        ([4.0, 1.2], 15.0, 1, 4.0),  # two attempts of ten seconds each would not fit
    ],
)
def test_what_is_noisy_is_measured_again_as_long_as_there_is_time(
    noises: list[float], budget: float, attempts: int, kept: float
) -> None:
    clock = Clock()
    allowed: list[float] = []

    def sample(left: float) -> Sampled:
        allowed.append(left)
        clock.now += 10.0
        return Sampled({(1,): 1.0}, noises[len(allowed) - 1])

    assert quietest(sample, budget, clock).noise == kept
    assert allowed == [budget - 10.0 * n for n in range(attempts)]


def test_the_noisiest_part_makes_the_profile_noisy() -> None:
    clock = Clock()
    cost = CostModel.from_samples(
        measure(subject(clock, SlowCopyStream(clock)), clock=clock), "here"
    )
    assert cost.noise == 1.0 and not cost.is_noisy
    slow = subject(clock, SlowCopyStream(clock))
    rng = random.Random(1)

    def prefill(new: int, context: int) -> None:
        clock.now += rng.uniform(1, 8) * new * TOKEN_S

    samples = measure(replace(slow, prefill=prefill), clock=clock)
    cost = CostModel.from_samples(samples, "here")
    assert cost.is_noisy and any("busy" in complaint for complaint in cost.complaints())


def test_disk_is_read_through_the_store_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both directories are read, whole blocks of six layers; the cost is that of the reads."""
    clock = Clock()
    read: list[bytes] = []
    original, counting = DiskStore.read, threading.Lock()

    def slow_read(self: DiskStore, one: Read) -> Outcome:
        with counting:
            read.append(one.block_id)
            clock.now += 1e-3
        return original(self, one)

    monkeypatch.setattr(DiskStore, "read", slow_read)
    monkeypatch.setattr("sglang_hc.restore.measure_disk.READ_THREADS", 1)
    disks = (f"{tmp_path / 'a'}:1", str(tmp_path / "b"))
    samples = measure(subject(clock, SlowCopyStream(clock)), disks, clock=clock)
    assert len(set(read)) == 64
    from_disk = dict(samples.copies[SourceTier.DISK, Form.KV])
    for tokens, blocks in ((64, 1), (1024, 16)):
        assert from_disk[tokens] == pytest.approx(blocks * 1e-3 / 6)
    assert list((tmp_path / "a").iterdir()) == list((tmp_path / "b").iterdir()) == []


def test_a_disk_too_slow_for_the_budget_gives_the_small_sizes(tmp_path: Path) -> None:
    clock = Clock()

    def ticking() -> float:
        clock.now += 1.0
        return clock.now

    layout = BlockLayout(LayerPlan(0, 0, 4), StateShape(4, 8, (16, 16), "uint8"))
    samples, noise = disk_samples([str(tmp_path)], layout, [2048, 64, 1024, 256], 1.0, ticking)
    assert noise == 1.0
    assert [tokens for tokens, _ in samples] == [64, 256]


def test_sizes_that_need_too_much_memory_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = BlockLayout(LayerPlan(0, 0, 4), StateShape(4, 8, (16, 16), "uint8"))

    def measured(most: int) -> list[int]:
        monkeypatch.setattr("sglang_hc.restore.measure_disk.MOST_BYTES", most)
        samples, _ = disk_samples([str(tmp_path)], layout, [64, 256, 1024], 60.0, Clock())
        return [tokens for tokens, _ in samples]

    assert measured(16 * layout.slot_bytes) == [64, 256, 1024]
    assert measured(16 * layout.slot_bytes - 1) == [64, 256]
    assert measured(1) == [64, 256]


def test_a_throttled_source_gets_another_plan_than_the_host_tier() -> None:
    """The same parts: from memory K and V, from a slow source hidden states, between both a mix."""
    plans = {}
    state = replace(SHAPE, num_layers=8)
    for rate in (1e9, 9e6, 1e6):
        clock = Clock()
        copy_stream = ThrottledCopyStream(rate, clock, clock.pass_time)
        cost = CostModel.from_samples(measure(subject(clock, copy_stream), clock=clock), "here")
        host = (SourceTier.HOST,)
        found = auto_plan(cost, state, host, allow_hidden=True, allow_recompute=False)
        plans[rate] = found.plan
    assert plans[1e9] == LayerPlan(0, 0, 8)
    assert plans[9e6].hidden > 0 and plans[9e6].kv > 0
    assert plans[1e6] == LayerPlan(0, 8, 0)


def test_nothing_of_a_measurement_is_left_when_it_is_over() -> None:
    """On a GPU it is 0.8 GB of frames and scratch rows; without a run of the garbage collector."""
    clock = Clock()
    measured = subject(clock, HostCopyStream())
    left: list[weakref.ref[object]] = [weakref.ref(frame) for frame in measured.staging.free]
    left += [weakref.ref(measured.sink), weakref.ref(measured.sink.parts[0])]  # type: ignore[attr-defined]
    gc.disable()
    try:
        measure(measured, clock=clock)
        del measured
        assert len(left) == FRAMES[0] + 2
        assert [ref() for ref in left] == [None] * len(left)
    finally:
        gc.enable()
