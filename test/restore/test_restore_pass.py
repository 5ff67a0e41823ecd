"""Restorations against the states they restore: any mix of loaded and recomputed layers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import LayerPlan
from sglang_hc.restore.path import Restoration
from support.copy_streams import LateCopyStream
from support.examples import examples
from support.restore_bench import LENGTH, PATHS, UNTOUCHED, Bench, check, token
from support.tiers import PARTS

plans = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)).filter(
    lambda counts: counts[1] + counts[2] > 0
)


@settings(deadline=None, max_examples=examples(150))
@given(data=st.data(), counts=plans)
def test_any_mix_of_loaded_and_recomputed_layers(data: st.DataObject, counts: tuple) -> None:
    """One pass: spans of two paths in a row, each later one attends to the one before it. KV layers
    may be copied between HIDDEN layers."""
    plan = LayerPlan(*counts)
    bench = Bench(plan, data.draw(st.lists(st.sampled_from([0, 64, 320]), min_size=3, max_size=3)))
    rate = data.draw(st.floats(0, 3))
    bench.tiers.restorer.planner.kv_per_hidden = lambda tokens: rate
    recompute = st.integers(plan.recompute, plan.num_layers)
    reach = [data.draw(st.integers(0, 90)) for _ in range(PATHS)]
    for path, stop in enumerate(reach):
        bench.valid(path, stop)
    count = recomputed = 0
    for path in data.draw(st.lists(st.integers(0, PATHS - 1), min_size=1, max_size=4)):
        start = reach[path]
        stop = data.draw(st.integers(min(start + 1, LENGTH), LENGTH))
        if stop > start:
            layers = data.draw(recompute)
            bench.queue(path, start, stop, layers)
            reach[path] = stop
            count += 1
            recomputed += layers * (stop - start)
    index = bench.tiers.restorer.start()
    bench.tiers.restorer.gate.set_consumer(index)
    for layer in data.draw(st.lists(st.integers(0, plan.num_layers - 1), max_size=8)):
        bench.tiers.restorer.gate.wait_until(layer)
        for path, stop in enumerate(reach):
            check(
                bench.pool, layer, [token(path, p) for p in range(stop)], bench.slots[path, :stop]
            )
    bench.tiers.after_pass(())
    assert bench.released == count
    bench.check(reach)
    assert bench.recomputer.ran == recomputed
    assert bench.tiers.restorer.counters["recomputed_layer_tokens"] == recomputed


@pytest.mark.parametrize("recompute", [1, 3])
def test_a_restoration_outside_any_pass_recomputes_too(recompute: int) -> None:
    bench = Bench(LayerPlan(1, 1, 2))
    bench.queue(0, 0, 100, recompute)
    bench.tiers.restorer.run_now()
    assert bench.released == 1
    bench.check([100, 0])


def test_what_recomputation_raises_reaches_the_caller_and_nothing_is_released() -> None:
    """The slots were promised, so no request may be told that they hold the state."""
    bench = Bench(LayerPlan(1, 1, 1))
    bench.recomputer.fail = True
    bench.queue(0, 0, 100, 1)
    with pytest.raises(RuntimeError, match="the model's layers failed"):
        bench.tiers.restorer.start()
    assert bench.released == 0
    assert bench.tiers.restorer.gate.current == -1


def test_layers_that_are_not_stored_cannot_be_loaded() -> None:
    bench = Bench(LayerPlan(2, 1, 1))
    with pytest.raises(AssertionError, match="not stored"):
        bench.queue(0, 0, 100, 1)


def test_copies_of_recomputed_layers_are_never_made() -> None:
    bench = Bench(LayerPlan(0, 2, 2))
    bench.queue(0, 0, 64, 3)
    bench.tiers.restorer.run_now()
    copy_stream = bench.tiers.restorer.path.copy_stream
    assert isinstance(copy_stream, LateCopyStream)
    assert copy_stream.performed == len(PARTS)  # one span of the one loaded layer, per part


def early(bench: Bench, path: int) -> None:
    slots = bench.slots[path, :128]
    bench.tiers.restorer.restore_early([Restoration(bench.nodes[path][:2], 0, 128, slots)])


@pytest.mark.parametrize("part", ["copy", "copy_ranges", "write_hidden", "write_kv"])
def test_an_early_restoration_that_an_error_ends_leaves_nothing_behind(part: str) -> None:
    """All its frames are free again, the next pass does not go on with it, and is whole."""
    reached = 0
    for when in range(6):
        bench = Bench(LayerPlan(0, 2, 2))
        path = bench.tiers.restorer.path
        owner = path.copy_stream if part.startswith("copy") else path.sink
        real, count = getattr(owner, part), itertools.count()

        def broken(*args: object, when: int = when, real=real, count=count) -> None:
            if next(count) == when:
                raise OSError("planted")
            real(*args)

        frames = len(path.staging.free)
        setattr(owner, part, broken)
        failed = False
        try:
            early(bench, 0)
        except OSError:
            failed = True
        reached += failed
        assert len(path.staging.free) == frames
        setattr(owner, part, real)
        for rows in itertools.chain(*bench.pool.kv):
            rows.fill_(UNTOUCHED)
        early(bench, 1)
        bench.tiers.restorer.poll()
        bench.check([0, 128])
    assert reached or part == "copy_ranges"
