"""Histories whose last blocks are read layer by layer while the new tokens run, under SGLang's real
scheduler and over a real disk that flips bits, fails, stands still, or dies at any layer.

What every test asserts: the tokens are those of a server that never evicted, no slot is lost
(`counted`), and a fault is counted once.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.disk import threads as disk_threads
from sglang_hc.tree.identity import Prefix, pack_tokens
from support import profiles
from support.core import Core, Reply, run_in_child
from support.disk_store import Faults, open_with
from support.file_ranges import Range
from support.meetings import (
    BLOCKS,
    FOLLOW,
    HeldDisk,
    counted,
    forget,
    halving_profile,
    meet,
    run,
    second_turn,
    start,
)
from support.waiting import HANGS_S

FORM = "hidden:2,kv:2"
LAYERS = range(4)
FAST_DISK = 1e-5
"""By this price of a token of a layer nothing of the history is computed, and all of it is read
layer by layer: there is a fault to make in each layer of each block."""

SLOW_DISK = 1e-3
"""By this price a half of it is computed, and a block or two are read layer by layer."""


class LayersOnDemand(HeldDisk):
    """A disk that answers for layers when a pass waits for one: else all might be here before."""

    def __init__(self, core: Core) -> None:
        from sglang_hc.restore.arrival import LayerArrival

        super().__init__(core)
        tier, wait = core.tree.tiers.disk, LayerArrival.wait
        tier._layers = tier._layers._replace(io=self)
        self._of_layers: set[int] = set()
        self._waits = False

        def waits(arrival: LayerArrival, layer: int) -> None:
            self._waits = True
            wait(arrival, layer)

        LayerArrival.wait = waits  # type: ignore[method-assign]

    def read(self, ticket: int, *args: Any) -> None:
        if len(args) == 4:
            self._of_layers.add(ticket)
        super().read(ticket, *args)

    def poll(self) -> list[Any]:
        found, held = self._take(), list(self._held)
        self._held.clear()
        for done in held:
            keeps = done.ticket in self._of_layers and not self._waits
            (self._held if keeps else found).append(done)
        return found


def both_turns(form: str, folder: str, profile: str) -> tuple[list[int], Reply, dict[str, int]]:
    core, first = start(form, folder, profile, streams=True)
    LayersOnDemand(core)
    return meet(core, first)


@pytest.mark.parametrize("form", ["hidden", "kv", FORM])
@pytest.mark.parametrize("disk", [FAST_DISK, 2e-4, SLOW_DISK])
def test_a_history_is_restored_while_its_last_blocks_are_read(
    wanted: dict, tmp_path: Path, form: str, disk: float
) -> None:
    profile = halving_profile(tmp_path, disk)
    first, reply, seen = run_in_child(both_turns, form, str(tmp_path / "d"), profile)
    assert (first, reply.tokens) == wanted[form]
    assert seen["meetings"] == seen["meetings_streamed"] == seen["meetings_restored"] == 1
    assert 0 < reply.cached == reply.storage == seen["restored_tokens"]
    if disk == FAST_DISK:
        assert reply.cached == BLOCKS * BLOCK_TOKENS, "nothing of it was computed"
    if disk == SLOW_DISK:
        assert reply.cached < BLOCKS * BLOCK_TOKENS, "its head was computed"
    assert not {"hole", "gap", "late_layers"} & seen.keys(), "what comes behind it is saved"


class Seen(NamedTuple):
    """A request with a fault in a layer of a block."""

    block: int
    layer: int
    reply: Reply
    counts: dict[str, int]


class Server:
    """A server whose disk alone has the first turn. No layer behind the first one is read before
    the pass runs that waits for it."""

    def __init__(self, folder: str, profile: str, *flags: str) -> None:
        self.faults = Faults()
        open_with(self.faults)
        self.core, first = start(FORM, folder, profile, *flags, streams=True)
        self.prompt = second_turn(first)
        self._threads = self.core.tree.tiers.disk._io
        stored = Prefix(None, pack_tokens(self.prompt))
        self._path = self.core.tree.tiers.host.tree.identities(stored)[:BLOCKS]
        self._runs = threading.Event()
        run_batch = self.core.scheduler.run_batch

        def runs(*args: Any, **options: Any) -> Any:
            self._runs.set()
            return run_batch(*args, **options)

        self.core.scheduler.run_batch = runs

    def chunk(self, block: int, layer: int) -> Range:
        """Where a layer of a block lies."""
        store = self._threads._store
        model, directory = store.model, store.directory_of(self._path[block])
        (found,) = (chunk for chunk in model.chunks if chunk.layer == layer)
        begin = model.header_bytes + found.offset
        return Range(Path(directory.path(self._path[block])), begin, begin + found.length)

    def ask(
        self,
        on_range: Callable[[str, int, int], None] = lambda path, begin, end: None,
        each_pass: Callable[[int, str], None] = lambda number, rid: None,
    ) -> tuple[Reply, dict[str, int]]:
        """Serve the second turn; `on_range` may fail a read, or hold it up."""
        later = [self.chunk(block, layer) for block in range(BLOCKS) for layer in LAYERS[1:]]
        self._runs.clear()

        def read(path: str, begin: int, end: int) -> None:
            if any(chunk.overlaps(path, begin, end) for chunk in later):
                assert self._runs.wait(HANGS_S)
            on_range(path, begin, end)

        self.faults.on_range = read
        rid = self.core.submit(self.prompt, 24)

        def serve() -> Reply:
            run(self.core, lambda number: each_pass(number, rid))
            each_pass(0, rid)
            return self.core.reply(rid)

        try:
            found = counted(self.core, serve)
        finally:
            self.faults.on_range = Faults().on_range
        forget(self.core)
        return found

    def at_every_layer(
        self, blocks: Sequence[int], ask: Callable[[Range], tuple[Reply, dict[str, int]]]
    ) -> list[Seen]:
        """Serve it with a fault in each layer of these blocks."""
        found = []
        for block, layer in itertools.product(blocks, LAYERS):
            found.append(Seen(block, layer, *ask(self.chunk(block, layer))))
            if self._threads._store.contains(self._path) != BLOCKS:
                counted(self.core, lambda: self.core.ask(self.prompt, 24))
                forget(self.core)
            assert self._threads._store.contains(self._path) == BLOCKS, "it is stored again"
        return found


def flipped_bits(folder: str, profile: str, blocks: Sequence[int]) -> list[Seen]:
    server = Server(folder, profile)

    def ask(chunk: Range) -> tuple[Reply, dict[str, int]]:
        chunk.flip()
        return server.ask()

    return server.at_every_layer(blocks, ask)


def failing_reads(folder: str, profile: str, blocks: Sequence[int]) -> list[Seen]:
    server = Server(folder, profile)

    def ask(chunk: Range) -> tuple[Reply, dict[str, int]]:
        def fail(path: str, begin: int, end: int) -> None:
            if chunk.overlaps(path, begin, end):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)

        return server.ask(fail)

    return server.at_every_layer(blocks, ask)


def stalled_reads(folder: str, profile: str, blocks: Sequence[int]) -> list[Seen]:
    """A read stands still until the request is over, and ends well then."""
    server = Server(folder, profile)

    def ask(chunk: Range) -> tuple[Reply, dict[str, int]]:
        goes_on = threading.Event()

        def wait(path: str, begin: int, end: int) -> None:
            if chunk.overlaps(path, begin, end):
                assert goes_on.wait(HANGS_S)

        def resume(_: int, rid: str) -> None:
            if rid in server.core.requests and server.core.requests[rid].finished():
                goes_on.set()

        return server.ask(wait, resume)

    return server.at_every_layer(blocks, ask)


@pytest.mark.parametrize(
    "blocks", [(0, BLOCKS - 1), pytest.param(range(BLOCKS), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("body", "counter"),
    [(flipped_bits, "damaged"), (failing_reads, "io_error"), (stalled_reads, None)],
)
def test_a_fault_in_any_layer_is_recomputed_within_the_pass(
    wanted: dict,
    tmp_path: Path,
    body: Callable[..., list[Seen]],
    counter: str | None,
    blocks: Sequence[int],
) -> None:
    cost = profiles.cost_model(host=1e-7, disk=1e-6, prefill=1e-4)  # what is late is soon given up
    profile = profiles.write(cost, tmp_path)
    found = run_in_child(body, str(tmp_path / "d"), profile, blocks)
    assert len(found) == len(blocks) * len(LAYERS)
    for block, layer, reply, counts in found:
        assert reply.tokens == wanted[FORM][1], (block, layer)
        assert counts["meetings"] == counts["meetings_streamed"] == 1, (block, layer)
        failures = {name: n for name, n in counts.items() if name.startswith("disk_read_")}
        assert failures == ({f"disk_read_{counter}": 1} if counter else {}), (block, layer)
        # What fails before the pass begins moves the meeting point in place of ending the pass.
        assert counts.get("late_layers", 0) == 1 or (layer == 0 and counter), (block, layer)


def given_up(folder: str, profile: str, layer: int) -> tuple[Reply, dict[str, int], dict[str, Any]]:
    """The disk stands still from this layer on, for so long that it is given up. Then it is well,
    and the request comes again."""
    server, goes_on = Server(folder, profile), threading.Event()
    chunks = [server.chunk(block, layer) for block in range(BLOCKS)]
    disk = server.core.tree.tiers.disk._io

    def stand_still(path: str, begin: int, end: int) -> None:
        if any(chunk.overlaps(path, begin, end) for chunk in chunks):
            disk.patience = disk_threads.Patience(silent_s=0.2)
            assert goes_on.wait(HANGS_S)

    def resume(_: int, rid: str) -> None:
        if rid in server.core.requests and server.core.requests[rid].finished():
            goes_on.set()

    reply, seen = server.ask(stand_still, resume)
    disk.patience = disk_threads.PATIENCE
    return reply, seen, {**server.core.tree.stats(), "again": server.ask()[0]}


@pytest.mark.parametrize("layer", LAYERS[1:])
def test_a_disk_that_is_given_up_while_a_pass_waits_costs_its_blocks(
    wanted: dict, tmp_path: Path, layer: int
) -> None:
    profile = halving_profile(tmp_path, FAST_DISK)
    reply, seen, after = run_in_child(given_up, str(tmp_path / "d"), profile, layer)
    assert reply.tokens == after["again"].tokens == wanted[FORM][1]
    assert seen["disk_directory_hangs"] == seen["late_layers"] == seen["meetings_streamed"] == 1
    # What the threads were in the middle of comes late, and well; of most blocks more is asked.
    assert BLOCKS - disk_threads.READ_THREADS <= seen["disk_read_io_error"] <= BLOCKS
    assert after["disk_directories"] == 1 and after["again"].storage == BLOCKS * BLOCK_TOKENS


def beside(folder: str, profile: str) -> tuple[Reply, dict[str, int]]:
    core, first = start(FORM, folder, profile, streams=True)
    core.submit(FOLLOW, 40)
    rids: list[str] = []

    def arrive(number: int) -> None:
        if number == 6:
            rids.append(core.submit(second_turn(first), 24))

    _, seen = counted(core, lambda: run(core, arrive))
    return core.reply(rids[0]), seen


def test_who_decodes_waits_for_no_layer(wanted: dict, profile: str, tmp_path: Path) -> None:
    reply, seen = run_in_child(beside, str(tmp_path / "d"), profile)
    assert reply.tokens == wanted[FORM][1]
    assert "meetings_streamed" not in seen
