"""Restorations against the states they restore: any mix of loaded and recomputed layers.

Copies happen as late as the fences allow (`LateCopyStream`): a missing wait shows as a wrong row.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.restore.path import Restoration
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.block_tree import Moved
from sglang_hc.tree.identity import pack_tokens
from support.copy_streams import LateCopyStream
from support.examples import examples
from support.host import keep
from support.tiers import HIDDEN_BYTES, PARTS, ToyPool, build, project

PATHS = 2
LENGTH = 150
DEVICE_SLOTS = 400
UNTOUCHED = 255
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.randint(0, 256, (8, PATHS, LENGTH, HIDDEN_BYTES), generator=GENERATOR).byte()


def token(path: int, position: int) -> int:
    return path * 1000 + position


def truth(layer: int, tokens: Sequence[int], shift: int = 0) -> list[torch.Tensor]:
    """K/V of these tokens, per part, at positions that are further from the start by `shift`."""
    paths, positions = np.divmod(np.asarray(tokens), 1000)
    hidden = HIDDEN[layer, paths, positions]
    return project(layer, hidden, torch.from_numpy(positions) + shift)


class ToyRotation:
    """Moves what `project` gives."""

    def move(
        self, layer: int, parts: Sequence[torch.Tensor], old: torch.Tensor, new: torch.Tensor
    ) -> list[torch.Tensor]:
        zeros = torch.zeros((len(old), HIDDEN_BYTES), dtype=torch.uint8)
        ways = zip(parts, project(layer, zeros, new), project(layer, zeros, old), strict=True)
        return [part + there - here for part, there, here in ways]


class ToyRecomputer:
    """Writes what the model would, and looks at the prefix wherever attention would."""

    def __init__(self) -> None:
        self.tiers: Tiers
        self.pool: ToyPool
        self.fail = False
        self.ran = 0

    def run(self, restoration: Restoration, between: Callable[[], None]) -> None:
        if self.fail:
            raise RuntimeError("the model's layers failed")
        tokens = restoration.tokens()
        path = tokens[0] // 1000
        assert tokens.tolist() == [token(path, p) for p in range(*span(restoration))]
        assert restoration.prefix_slots is not None
        self.ran += len(tokens) * restoration.recompute
        before = [token(path, p) for p in range(restoration.start)]
        for layer in range(restoration.recompute):
            if layer < restoration.recompute - 1:
                self.tiers.restorer.gate.wait_until(layer)
                check(self.pool, layer, before, restoration.prefix_slots)
            rows = truth(layer, tokens.tolist())
            for part, wanted in zip(self.pool.rows(layer), rows, strict=True):
                part[restoration.device_slots] = wanted
            between()


def span(restoration: Restoration) -> tuple[int, int]:
    return restoration.start, restoration.stop


def check(pool: ToyPool, layer: int, tokens: Sequence[int], slots: torch.Tensor) -> None:
    for part, wanted in zip(pool.rows(layer), truth(layer, tokens), strict=True):
        assert torch.equal(part[slots], wanted), f"layer {layer}: a restored row is wrong"


class Bench:
    """Tiers whose host tier holds both paths; everything else of the device pool is `UNTOUCHED`."""

    def __init__(self, plan: LayerPlan, shifts: Sequence[int] = (0, 0, 0)) -> None:
        """shifts: of the blocks of each path; KV was stored that much further from the start."""
        self.plan = plan
        self.recomputer = ToyRecomputer()
        self.tiers, self.pool, _ = build(
            plan,
            slots=8,
            device_slots=DEVICE_SLOTS,
            copy_stream=LateCopyStream(),
            recomputer=self.recomputer,
        )
        restorer = self.tiers.restorer
        restorer.path = replace(restorer.path, rotation=ToyRotation())
        self.shifts = shifts
        self.recomputer.tiers, self.recomputer.pool = self.tiers, self.pool
        for part in itertools.chain(*self.pool.kv):
            part.fill_(UNTOUCHED)
        self.slots = torch.randperm(DEVICE_SLOTS, generator=torch.Generator().manual_seed(1))
        self.slots = self.slots[: PATHS * LENGTH].view(PATHS, LENGTH)
        self.nodes = [self._store(path) for path in range(PATHS)]
        self.released = 0

    def _store(self, path: int) -> tuple:
        host, pool, plan = self.tiers.host, self.tiers.restorer.path.pool, self.plan
        nodes = keep(host, pack_tokens([token(path, p) for p in range(LENGTH)]))
        for node, first in zip(nodes, range(0, LENGTH, BLOCK_TOKENS), strict=True):
            tokens = [token(path, p) for p in range(first, first + node.num_tokens)]
            slot, rows = node.slot, node.num_tokens
            for index, layer in enumerate(plan.hidden_layers):
                pool.hidden[slot, index, :rows] = HIDDEN[layer, path, first : first + rows].numpy()
            for index, layer in enumerate(plan.kv_layers):
                shift = self.shifts[first // BLOCK_TOKENS]
                for view, part in zip(pool.kv, truth(layer, tokens, shift), strict=True):
                    view[slot, index, :rows] = part.numpy()
            node.moved = Moved(node.block_id, self.shifts[first // BLOCK_TOKENS])
        return tuple(nodes)

    def valid(self, path: int, stop: int) -> None:
        """The first tokens of a path are on the device already."""
        tokens = [token(path, p) for p in range(stop)]
        for layer in range(self.plan.num_layers):
            for part, rows in zip(self.pool.rows(layer), truth(layer, tokens), strict=True):
                part[self.slots[path, :stop]] = rows

    def queue(self, path: int, start: int, stop: int, recompute: int) -> None:
        restoration = Restoration(
            self.nodes[path][: -(-stop // BLOCK_TOKENS)],
            start,
            stop,
            self.slots[path, start:stop],
            recompute,
            self.slots[path, :start],
        )
        self.tiers.restorer.queue(restoration, self.release)

    def release(self) -> None:
        self.released += 1

    def check(self, reach: Sequence[int]) -> None:
        """Exactly the first `reach` tokens of each path are on the device, in every layer."""
        for path, stop in enumerate(reach):
            tokens = [token(path, p) for p in range(stop)]
            for layer in range(self.plan.num_layers):
                check(self.pool, layer, tokens, self.slots[path, :stop])
                for part in self.pool.rows(layer):
                    assert bool((part[self.slots[path, stop:]] == UNTOUCHED).all())
        self.tiers.check_integrity()
        for node in itertools.chain(*self.nodes):
            assert node.pins == 0


plans = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)).filter(
    lambda counts: counts[1] + counts[2] > 0
)


@settings(deadline=None, max_examples=examples(150))
@given(data=st.data(), counts=plans)
def test_any_mix_of_loaded_and_recomputed_layers(data: st.DataObject, counts: tuple) -> None:
    """One pass: spans of two paths in a row, each later one attends to the one before it. KV layers
    may be copied between HIDDEN layers. Who recomputes how many is decided when the pass begins."""
    plan = LayerPlan(*counts)
    bench = Bench(plan, data.draw(st.lists(st.sampled_from([0, 64, 320]), min_size=3, max_size=3)))
    rate = data.draw(st.floats(0, 3))
    bench.tiers.restorer.planner.kv_per_hidden = lambda tokens: rate
    recompute = st.integers(plan.recompute, plan.num_layers)
    reach = [data.draw(st.integers(0, 90)) for _ in range(PATHS)]
    for path, stop in enumerate(reach):
        bench.valid(path, stop)
    spans: list[int] = []
    for path in data.draw(st.lists(st.integers(0, PATHS - 1), min_size=1, max_size=4)):
        start = reach[path]
        stop = data.draw(st.integers(min(start + 1, LENGTH), LENGTH))
        if stop > start:
            bench.queue(path, start, stop, data.draw(recompute))
            reach[path] = stop
            spans.append(stop - start)
    way = tuple(data.draw(recompute) for _ in spans)
    bench.tiers.restorer.planner.share = lambda loads: way
    recomputed = sum(map(operator.mul, way, spans))
    index = bench.tiers.restorer.start()
    bench.tiers.restorer.gate.set_consumer(index)
    for layer in data.draw(st.lists(st.integers(0, plan.num_layers - 1), max_size=8)):
        bench.tiers.restorer.gate.wait_until(layer)
        for path, stop in enumerate(reach):
            check(
                bench.pool, layer, [token(path, p) for p in range(stop)], bench.slots[path, :stop]
            )
    bench.tiers.after_pass(())
    assert bench.released == len(spans)
    bench.check(reach)
    assert bench.recomputer.ran == recomputed
    assert bench.tiers.restorer.counters["recomputed_layer_tokens"] == recomputed


@pytest.mark.parametrize("in_turn", [False, True])
def test_hidden_states_may_have_to_wait_for_their_layers_turn(in_turn: bool) -> None:
    """Weights come layer by layer: between two passes of a recomputation those of a later layer
    would cost a copy each, although the rows are there."""
    bench, early = Bench(LayerPlan(2, 2, 1)), []
    restorer, pool = bench.tiers.restorer, bench.pool
    restorer.path = replace(restorer.path, in_turn=in_turn)
    stream = restorer.path.copy_stream
    write, run = pool.write_hidden, bench.recomputer.run

    def recompute(restoration: Restoration, between: Callable[[], None]) -> None:
        def all_copied() -> None:
            stream.advance_to(stream.enqueued)  # type: ignore[attr-defined]
            between()

        run(restoration, all_copied)

    def written(layer: int, *rows: torch.Tensor) -> None:
        early.append(layer)
        write(layer, *rows)

    bench.recomputer.run = recompute  # type: ignore[method-assign]
    pool.write_hidden = written  # type: ignore[method-assign]
    bench.queue(0, 0, 100, 2)
    restorer.gate.set_consumer(restorer.start())
    assert bool(early) != in_turn
    bench.tiers.after_pass(())
    assert set(early) == {2, 3}
    bench.check([100, 0])


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
