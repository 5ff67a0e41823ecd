"""The tap: a copy in the forward pass to an address that never moves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_hc.capture.taps import SideBranch, TapBuffer
from support.happens_before import Clocks, Use


def tapped(rows: int = 8) -> tuple[TapBuffer, list[torch.nn.Module]]:
    taps = TapBuffer(2, rows, 4, torch.float32, torch.device("cpu"))
    modules: list[torch.nn.Module] = [torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)]
    for index, module in enumerate(modules):
        taps.install(index, module)
    return taps, modules


def test_each_pass_leaves_its_own_states_at_the_same_address() -> None:
    """A hook that kept a reference would show the first pass for ever in a replayed graph."""
    taps, modules = tapped()
    address = taps.states.data_ptr()
    for seed in range(3):
        states = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))
        for module, hidden in zip(modules, states, strict=True):
            module(hidden)
        left = taps.bytes(3)
        assert left.data_ptr() == address
        assert torch.equal(left.view(torch.float32), states)


def test_a_projection_called_by_keyword_is_tapped_too() -> None:
    class Projection(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    taps = TapBuffer(1, 4, 4, torch.float32, torch.device("cpu"))
    module = Projection()
    taps.install(0, module)
    module(hidden_states=torch.full((1, 4), 5.0))
    assert taps.states[0, 0].tolist() == [5.0] * 4


def test_a_rank_keeps_its_own_columns() -> None:
    """Two ranks tap the same input; together they have all of it."""
    hidden = torch.arange(12.0).view(3, 4)
    module = torch.nn.Linear(4, 6)
    ranks = [
        TapBuffer(1, 8, 2, torch.float32, torch.device("cpu"), first_column=first)
        for first in (0, 2)
    ]
    for taps in ranks:
        taps.install(0, module)
    module(hidden)
    parts = [taps.bytes(3)[0].view(torch.float32) for taps in ranks]
    assert ranks[0].row_bytes == 8
    assert torch.equal(torch.cat(parts, dim=1), hidden)


@pytest.mark.parametrize(("given", "left"), [(1, 1), (2, 2), (3, 2)])
def test_of_a_pass_with_more_rows_than_the_buffer_the_first_are_left(given: int, left: int) -> None:
    taps, (first, _) = tapped(rows=2)
    taps.states.fill_(7)
    hidden = torch.arange(4.0 * given).view(given, 4)
    first(hidden)
    assert torch.equal(taps.states[0, :left], hidden[:left])
    assert bool((taps.states[0, left:] == 7).all()) and bool((taps.states[1] == 7).all())


def test_a_paused_tap_leaves_the_buffer_alone() -> None:
    taps, (first, _) = tapped(rows=2)
    taps.states.fill_(7)
    with contextlib.suppress(RuntimeError), taps.paused():
        first(torch.ones(2, 4))
        raise RuntimeError("the pass failed")
    assert bool((taps.states == 7).all())
    first(torch.ones(2, 4))
    assert bool((taps.states[0] == 1).all())


class Projection(torch.nn.Module):
    """Notes what is in the buffer and what comes before it when it runs."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self.fails = False
        self.ran: list[Use] = []
        self._clocks = clocks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("no memory left")
        self.ran.append(self._clocks.submit())
        return hidden


class Beside:
    """A tapped projection on streams that hold order only; copies are steps of the stream on which
    they are submitted."""

    def __init__(self, rows: int = 4) -> None:
        self.clocks = Clocks()
        self.copies: list[Use] = []
        with self.clocks.installed():
            self.side = self.clocks.stream("taps")
            self.branch = SideBranch(torch.cpu, self.side)
        self.taps = TapBuffer(1, rows, 4, torch.float32, torch.device("cpu"), self.branch)
        self.taps.states.fill_(7)
        self.projection = Projection(self.clocks)
        self.taps.install(0, self.projection)

    def run(self, hidden: torch.Tensor) -> None:
        copy = torch.Tensor.copy_

        def noted(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
            self.copies.append(self.clocks.submit())
            return copy(target, source)

        with self.clocks.installed(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", noted)
            self.projection(hidden)

    def before(self, first: Use, then: Use) -> bool:
        """Does work come before what is submitted to the stream of `then` from now on?"""
        return bool(first.at <= then.actor.clock[first.actor.index])


def test_beside_the_model_the_copy_begins_behind_it_and_is_joined_behind_the_projection() -> None:
    beside = Beside()
    made = beside.clocks.submit()  # the hidden states
    joined: list[bool] = []
    beside.projection.register_forward_pre_hook(
        lambda *_: joined.append(beside.before(beside.copies[-1], made))
    )
    for _ in range(2):  # the second pass uses stream and events again
        beside.run(torch.ones(2, 4))
        (copy, ran) = beside.copies[-1], beside.projection.ran[-1]
        assert copy.actor is beside.side and ran.actor is beside.clocks.default
        assert beside.before(made, copy)
        assert beside.before(copy, made), "what comes next is not behind the copy"
        made = beside.clocks.submit()
    assert joined == [False, False], "the projection waits for the copy"
    assert torch.equal(beside.taps.states[0, :2], torch.ones(2, 4))


@pytest.mark.parametrize(("given", "left"), [(4, 4), (5, 4)])
def test_more_rows_than_the_buffer_has_are_joined_too(given: int, left: int) -> None:
    beside = Beside(rows=4)
    beside.run(torch.ones(given, 4))
    assert beside.before(beside.copies[0], beside.projection.ran[0])
    assert bool((beside.taps.states[0, :left] == 1).all())


def test_a_paused_tap_does_not_fork() -> None:
    beside = Beside()
    with beside.taps.paused():
        beside.run(torch.ones(2, 4))
    assert not beside.copies and not beside.side.clock.any()
    assert beside.clocks.default.clock[beside.side.index] == 0
    assert bool((beside.taps.states == 7).all())


def copy_fails(beside: Beside) -> torch.Tensor:
    return torch.ones(2, 3)


def projection_fails(beside: Beside) -> torch.Tensor:
    beside.projection.fails = True
    return torch.ones(2, 4)


@pytest.mark.parametrize("breaks", [copy_fails, projection_fails])
def test_a_pass_that_fails_leaves_nothing_behind(breaks: Callable[[Beside], Any]) -> None:
    beside = Beside()
    hidden = breaks(beside)
    with pytest.raises(RuntimeError):
        beside.run(hidden)
    (copy,) = beside.copies
    assert copy.actor is beside.side
    assert copy.at <= beside.clocks.default.clock[beside.side.index], "not joined"
    # Nothing is left to join: a pass with paused taps does not wait for the side again.
    beside.side.step()
    beside.projection.fails = False
    with beside.taps.paused():
        beside.run(torch.ones(2, 4))
    assert beside.clocks.default.clock[beside.side.index] == copy.at
