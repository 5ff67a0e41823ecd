"""The tap: a copy in the forward pass to an address that never moves."""

from __future__ import annotations

import contextlib

import pytest
import torch

from sglang_hc.capture.taps import TapBuffer


def tapped(rows: int = 8) -> tuple[TapBuffer, list[torch.nn.Module]]:
    taps = TapBuffer(2, rows, 4, torch.float32, torch.device("cpu"))
    modules: list[torch.nn.Module] = [torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)]
    for index, module in enumerate(modules):
        taps.install(index, module)
    return taps, modules


def test_each_pass_leaves_its_own_states_at_the_same_address() -> None:
    """A hook that kept a reference would show the first pass for ever in a replayed graph."""
    taps, modules = tapped()
    address = taps.bytes(3).data_ptr()
    for seed in range(3):
        states = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))
        for module, hidden in zip(modules, states, strict=True):
            module(hidden)
        left = taps.bytes(3)
        assert left.data_ptr() == address
        assert torch.equal(left.view(torch.float32), states)


def test_the_input_may_be_overwritten_after_the_pass() -> None:
    taps, (first, _) = tapped()
    hidden = torch.ones(2, 4)
    first(hidden)
    hidden.zero_()
    assert torch.equal(taps.states[0, :2], torch.ones(2, 4))


def test_a_projection_called_by_keyword_is_tapped_too() -> None:
    class Projection(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    taps = TapBuffer(1, 4, 4, torch.float32, torch.device("cpu"))
    module = Projection()
    taps.install(0, module)
    module(hidden_states=torch.full((1, 4), 5.0))
    assert taps.states[0, 0].tolist() == [5.0] * 4


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


def test_rows_are_bytes_without_a_copy() -> None:
    taps, _ = tapped()
    rows = taps.bytes(5)
    assert rows.shape == (2, 5, 16) and rows.dtype == torch.uint8
    assert rows.data_ptr() == taps.states.data_ptr()
