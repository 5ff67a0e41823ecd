"""The stream of the model, and what engines do not show of the checker of orders."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.server_args import ServerArgs

from sglang_hc.srt.engine.streams import ComputeStream
from support.happens_before import LATE, Clocks
from support.watch import Watch

CPU = torch.device("cpu")


@pytest.fixture
def clocks() -> Iterator[Clocks]:
    clocks = Clocks()
    with clocks.installed():
        yield clocks


@pytest.mark.parametrize(("overlap", "stages"), [(True, 1), (False, 1), (False, 2)])
def test_work_runs_where_the_model_runs(clocks: Clocks, overlap: bool, stages: int) -> None:
    """SGLang's stages run on the forward stream without overlap scheduling: blocks were saved from
    the schedule stream, before the pass had written them."""
    served = SimpleNamespace(
        device="cpu",
        forward_stream=clocks.stream("forward"),
        server_args=ServerArgs(
            model_path="dummy", disable_overlap_schedule=not overlap, pp_size=stages
        ),
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


# -- the checker: more of it is in test_core_order.py ----------------------------------------------


def test_the_host_reads_too_early(clocks: Clocks) -> None:
    watch, one = Watch(clocks), clocks.stream("one")
    rows = torch.zeros((8, 16), dtype=torch.int32)
    watch.region("table", rows, rows.itemsize)
    with watch, clocks.on(one):
        rows.fill_(1)
        watch.on_host("look", rows, write=False)
    assert [race.second.stream for race in watch.races] == ["host"]


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
