"""The stream of the model, and the checker that tells ordered accesses from lucky ones."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from sglang_hc.srt.engine.streams import ComputeStream
from support.happens_before import LATE, Clocks
from support.watch import Watch

CPU = torch.device("cpu")


@pytest.fixture
def clocks() -> Iterator[Clocks]:
    clocks = Clocks()
    with clocks.installed():
        yield clocks


@pytest.fixture
def table(clocks: Clocks) -> tuple[Watch, torch.Tensor]:
    watch = Watch(clocks)
    rows = torch.zeros((8, 16), dtype=torch.int32)
    watch.region("table", rows, rows.itemsize)
    return watch, rows


@pytest.mark.parametrize(("overlap", "stages"), [(True, 1), (False, 1), (False, 2)])
def test_work_runs_where_the_model_runs(clocks: Clocks, overlap: bool, stages: int) -> None:
    """SGLang's stages run on the forward stream without overlap scheduling: blocks were saved from
    the schedule stream, before the pass had written them."""
    served = SimpleNamespace(
        device="cpu",
        forward_stream=clocks.stream("forward"),
        server_args=SimpleNamespace(disable_overlap_schedule=not overlap, pp_size=stages),
    )
    serial = not overlap and stages == 1
    schedule = clocks.stream("scheduler")
    compute = ComputeStream.of(served)
    with clocks.on(schedule):
        clocks.submit()
        with compute.entered():
            assert clocks.current is (schedule if serial else served.forward_stream)
            assert bool((clocks.current.clock >= schedule.clock).all())
        assert clocks.current is schedule


def test_without_a_stream_of_its_own_the_model_runs_on_the_current_one(clocks: Clocks) -> None:
    compute = ComputeStream(CPU)
    with compute.entered():
        assert clocks.current is clocks.default
    compute.will_read(torch.zeros(1))


def test_on_a_cpu_nothing_is_told_to_an_allocator() -> None:
    compute = ComputeStream(CPU, torch.cpu.Stream())
    compute.will_read(torch.zeros(1))
    with compute.entered():
        pass


# -- the checker -----------------------------------------------------------------------------------


def test_unordered_accesses_to_one_place_are_found(
    clocks: Clocks, table: tuple[Watch, torch.Tensor]
) -> None:
    watch, rows = table
    one, other = clocks.stream("one"), clocks.stream("other")
    with watch:
        with clocks.on(one):
            rows[torch.tensor([1, 2]), torch.tensor([3, 4])] = torch.tensor([5, 5]).int()
        with clocks.on(other):
            rows[1, :3].clone()  # ends before what was written
            rows[3].clone()
            rows.view(-1).index_select(0, torch.tensor([18, 35]))
            assert not watch.races
            rows[1, :4].clone()
    (race,) = watch.races
    assert (race.kind, race.first.stream, race.second.stream) == (
        "read after a write", "one", "other",
    )  # fmt: skip


@pytest.mark.parametrize("by", ["stream", "event", "host"])
def test_a_wait_orders(clocks: Clocks, table: tuple[Watch, torch.Tensor], by: str) -> None:
    watch, rows = table
    one, other = clocks.stream("one"), clocks.stream("other")
    with watch:
        with clocks.on(one):
            rows[2].fill_(1)
            event = one.record_event()
        if by == "stream":
            other.wait_stream(one)
        elif by == "event":
            other.wait_event(event)
        else:
            event.synchronize()
        with clocks.on(other):
            rows[2].clone()
    assert not watch.races


def test_a_wait_orders_what_was_submitted_before_it_only(
    clocks: Clocks, table: tuple[Watch, torch.Tensor]
) -> None:
    watch, rows = table
    one, other = clocks.stream("one"), clocks.stream("other")
    with watch:
        with clocks.on(one):
            rows[2].clone()
        other.wait_stream(one)
        with clocks.on(one):
            rows[2].clone()
        with clocks.on(other):
            rows[2].fill_(1)
    (race,) = watch.races
    assert race.kind == "written after a read"


def test_the_host_reads_too_early(clocks: Clocks, table: tuple[Watch, torch.Tensor]) -> None:
    watch, rows = table
    one = clocks.stream("one")
    with watch, clocks.on(one):
        rows.fill_(1)
        watch.on_host("look", rows, write=False)
    assert [race.second.stream for race in watch.races] == ["host"]


def test_memory_that_is_dropped_while_another_stream_reads_it(clocks: Clocks) -> None:
    """Only where this project has a part in it, so here by its own function."""
    for told in (False, True):
        watch = Watch(clocks)
        one, forward = clocks.stream("one"), clocks.stream("forward")
        compute = ComputeStream(CPU, forward)
        with watch, clocks.on(one):
            made = torch.ones(4)
            if told:
                watch.keep(made, forward)
            with compute.entered():
                _scatter(made)
            del made
            torch.zeros(1)
        assert [race.kind for race in watch.races] == ([] if told else ["freed while in use"])


def _scatter(rows: torch.Tensor) -> None:
    from sglang_hc.device.gather_scatter import scatter

    target = torch.zeros((4, 4), dtype=torch.uint8)
    scatter(target, torch.arange(4), rows.view(torch.uint8).view(4, 4))


def test_an_event_is_over_some_time_later(clocks: Clocks) -> None:
    one = clocks.stream("one")
    with clocks.on(one):
        clocks.submit()
        event = one.record_event()
    assert not event.query() and not event.query()
    for _ in range(LATE):
        clocks.on_host()
    assert event.query()
    assert bool((one.clock <= clocks.host.clock).all())
