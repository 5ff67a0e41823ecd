"""Samples of what moving and computing one layer costs, taken with the server's own parts.

Everything is timed as a restoration does it: copies by a `RestorePass` over slots of a host pool,
the projection by a restore sink, disk by the store. The sizes of one kind take turns, so that a
machine that slows down meanwhile slows all of them alike. `policy.cost_model` fits lines to the
samples, as HybridServe section 4.3 does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, Form, LayerPlan, StateShape
from sglang_hc.policy.cost_model import NOISY, Samples, SourceTier
from sglang_hc.restore.measure_disk import disk_samples, spread
from sglang_hc.restore.path import Restoration, RestorePath, RestoreSink
from sglang_hc.restore.restore_pass import RestorePass
from sglang_hc.restore.staging import StagingRing
from sglang_hc.store.host_pool import HostPool
from sglang_hc.tree.block_tree import BlockNode

BUDGET_S = 10.0
"""Most seconds that measuring may take; if it needs more, it measures fewer or smaller sizes."""

ROUNDS = 5
"""Samples of each size; their median counts."""

ATTEMPTS = 3
"""Most times that one kind is measured while its samples show a busy machine, if there is time."""

LAYERS = 4
"""Layers of one timed restoration, and passes of one timed prefill on an accelerator: enough for
work to be submitted ahead of its execution, as in a forward pass, and for long copies to find less
of the rows that they write in a processor's caches than with one layer."""

TOKENS = (64, 256, 1024, 4096)
"""Sizes of a copy or projection: from one block to a usual history."""

PREFILLS = ((64, 0), (64, 1024), (64, 4032), (512, 0), (64, 8064), (512, 2048), (1024, 0),
            (1024, 1024), (2048, 0), (1024, 7104))  # fmt: skip
"""(new, context) of a prefill, in the order of their costs. The first four are measured on every
machine: a few new tokens behind a long history are what a restoration ends with."""

MAX_ROWS = max(new + context for new, context in PREFILLS)
GROWTH = 4
"""A size is expected to cost at most this many times what the one before it cost."""

SHARES = {"kv": 0.1, "hidden": 0.1, "project": 0.15, "prefill": 0.5}
"""Shares of the budget; disk has the rest."""

Sizes = Sequence[tuple[int, ...]]
Times = dict[tuple[int, ...], float]
"""Seconds per layer of each size."""

Clock = Callable[[], float]


class Sampled(NamedTuple):
    """Medians, and how busy the machine was meanwhile (`Samples.noise`)."""

    times: Times
    noise: float


@dataclass(frozen=True)
class Subject:
    """One layer of a model on one device.

    shape: of one layer, and of how many the blocks on a disk consist.
    staging: the frames that restorations pass through.
    sink: a scratch pool of LAYERS layers and at least `rows` rows.
    prefill: submits one layer's work for (new, context) tokens, new + context <= `rows`.
    hidden: whether hidden states can be projected to K and V here.
    most: the largest of a number over all ranks that run this layer together; each rank makes the
    same calls. With one rank it is the number itself.
    """

    shape: StateShape
    staging: StagingRing
    sink: RestoreSink
    prefill: Callable[[int, int], None]
    rows: int
    hidden: bool
    most: Callable[[float], float] = float

    @property
    def device(self) -> torch.device:
        return self.staging.device


def measure(
    subject: Subject,
    disks: Sequence[str] = (),
    budget_s: float = BUDGET_S,
    clock: Clock = time.perf_counter,
    computed: Clock | None = None,
) -> Samples:
    """Samples for `CostModel.from_samples`. disks: the `--hc-disk` directories. computed: the
    processor time of this thread in seconds, where this thread does all the work itself.

    Several ranks run everything equally often, because all decide by the longest time of any.

    A kind whose samples show a busy machine is measured up to ATTEMPTS times within its share of
    the budget, and the quietest attempt counts. The two smallest sizes of each kind (four of
    prefill) are measured even beyond the budget. Raises what the parts raise: OSError or
    DirectoryError for a directory, RuntimeError for the device.
    """
    bench = _Bench(subject, clock)
    tokens = [(n,) for n in TOKENS if n <= subject.rows]
    prefills = _prefills(subject.rows)

    noises: list[float] = []

    def agreed() -> float:
        return subject.most(clock())

    def sample(name: str, run: Callable[..., float], sizes: Sizes, least: int = 2) -> Times:
        share = SHARES[name] * budget_s

        def slowest(*size: int) -> float:
            return subject.most(run(*size))

        found = quietest(
            lambda left: sample_sizes(slowest, sizes, least, left, agreed, computed), share, agreed
        )
        noises.append(found.noise)
        return found.times

    with torch.no_grad():
        copies = {Form.KV: sample("kv", partial(bench.restore, Form.KV), tokens)}
        project: Times = {}
        if subject.hidden:
            copies[Form.HIDDEN] = sample("hidden", partial(bench.restore, Form.HIDDEN), tokens)
            project = sample("project", bench.project, tokens)
        prefill = sample("prefill", bench.prefill, prefills, 4)
        overlap = bench.overlaps()
    found = {(SourceTier.HOST, form): _pairs(times) for form, times in copies.items()}
    if disks:
        left = budget_s * (1 - sum(SHARES.values())) / len(copies)
        for form, times in copies.items():
            # Whole blocks: what a read costs besides its bytes is shared by all layers.
            layout = _layout(form, subject.shape, subject.shape.num_layers)
            read, noise = disk_samples(disks, layout, [n for (n,) in times], left, clock)
            noises.append(noise)
            found[SourceTier.DISK, form] = [
                (n, seconds / layout.plan.num_layers) for n, seconds in read
            ]
    return Samples(
        copies=found,
        prefill=[(new, context, seconds) for (new, context), seconds in prefill.items()],
        project=_pairs(project),
        overlap=overlap,
        ahead=_ahead(subject, copies[Form.KV]),
        noise=max(noises),
    )


def _prefills(rows: int) -> list[tuple[int, int]]:
    """Those of PREFILLS that fit into `rows`. Below 1,024 rows only two do, too few for a fit; then
    a quarter, a half and all of the rows.

    The fewest new tokens are measured behind the longest context that fits, and not behind the next
    shorter one. Where the longest outgrows the caches it takes more than in proportion, and a line
    through both falls short of what a restoration of a long history waits for.
    """
    fitting = [(new, context) for new, context in PREFILLS if new + context <= rows]
    if len(fitting) <= 2:
        return [(rows // part, 0) for part in (4, 2, 1)]
    longest = max(context for new, context in fitting if new == BLOCK_TOKENS)
    return [(n, c) for n, c in fitting if n > BLOCK_TOKENS or c <= 1024 or c == longest]


def quietest(sample: Callable[[float], Sampled], budget_s: float, clock: Clock) -> Sampled:
    """The quietest of up to ATTEMPTS attempts. None follows a quiet one, or one after which another
    like it would not fit into the budget. sample: takes the seconds that it may use."""
    began = last = clock()
    found = sample(budget_s)
    for _ in range(ATTEMPTS - 1):
        now = clock()
        if found.noise <= NOISY or now - began + (now - last) > budget_s:
            break
        last = now
        found = min(found, sample(budget_s - (now - began)), key=lambda one: one.noise)
    return found


def sample_sizes(
    run: Callable[..., float],
    sizes: Sizes,
    least: int,
    budget_s: float,
    clock: Clock,
    computed: Clock | None = None,
) -> Sampled:
    """Median of `run(*size)` for growing sizes, within a budget of seconds.

    computed: see `measure`. A size beyond the `least` first ones is left out if one round with it
    would not fit any more.
    """
    began = clock()
    worked = computed() if computed is not None else 0.0
    taken: dict[tuple[int, ...], list[float]] = {}
    for size in sizes:
        spent = clock() - began
        last = max((times[-1] for times in taken.values()), default=0.0)
        if len(taken) >= least and spent + 2 * GROWTH * last > budget_s:
            break
        run(*size)  # the first time pays for memory and for choosing kernels
        taken[size] = [run(*size)]
    for _ in range(ROUNDS - 1):
        before = clock()
        if before - began + sum(times[-1] for times in taken.values()) > budget_s:
            break
        for size, times in taken.items():
            times.append(run(*size))
    noise = spread(list(taken.values()))
    if computed is not None:
        # Other work on the machine makes this thread wait for a processor, in every repeat.
        noise = max(noise, (clock() - began) / max(computed() - worked, 1e-9))
    return Sampled({size: statistics.median(times) for size, times in taken.items()}, noise)


class _Bench:
    """Runs and times single samples; every method returns seconds per layer."""

    def __init__(self, subject: Subject, clock: Clock) -> None:
        self._subject = subject
        self._clock = clock
        self._slots = torch.arange(subject.rows, dtype=torch.int64, device=subject.device)
        self._layers = cycle(range(LAYERS))
        self._pools = {Form.KV: self._pool(Form.KV)}
        if subject.hidden:
            self._pools[Form.HIDDEN] = self._pool(Form.HIDDEN)
        blocks = self._pools[Form.KV].num_slots
        # In a pool in use the blocks of one path lie anywhere.
        self._nodes = [block_in(slot) for slot in np.random.default_rng(0).permutation(blocks)]

    def restore(self, form: Form, tokens: int) -> float:
        """Host slots to rows of the device pool; hidden states to the device, not projected."""
        subject, pool = self._subject, self._pools[form]
        nodes = tuple(self._nodes[: -(-tokens // BLOCK_TOKENS)])
        span = Restoration(nodes, 0, tokens, self._slots[:tokens])
        self._wait()
        begin = self._clock()
        path = RestorePath(pool, _CopiesOnly(subject.sink), subject.staging)
        RestorePass(path, [span]).finish()
        self._wait()
        return (self._clock() - begin) / LAYERS

    def project(self, tokens: int) -> float:
        """Hidden states on the device to K and V in the pool."""
        subject = self._subject
        width = subject.shape.hidden_bytes
        hidden = torch.zeros((tokens, width), dtype=torch.uint8, device=subject.device)
        slots, layers = self._slots[:tokens], self._layers
        return self._repeated(lambda: subject.sink.write_hidden(next(layers), hidden, slots, slots))

    def prefill(self, new: int, context: int) -> float:
        return self._repeated(lambda: self._subject.prefill(new, context))

    def overlaps(self) -> bool:
        """Whether a copy returns well before it is done: then compute can run beside it.

        One copy of all slots: a fast link brings a single block in less time than a call takes.
        """
        copy_stream = self._subject.staging.copy_stream
        source = torch.from_numpy(self._pools[Form.KV].bytes).flatten()
        target = torch.empty_like(source, device=self._subject.device)
        copy_stream.copy(target, source)  # the first time pays for memory
        self._wait()
        begin = self._clock()
        copy_stream.copy(target, source)
        event = copy_stream.record()
        returned = self._clock()
        event.wait()
        return returned - begin < (self._clock() - begin) / 2

    def _repeated(self, work: Callable[[], None]) -> float:
        times = LAYERS if self._subject.device.type == "cuda" else 1
        self._wait()
        begin = self._clock()
        for _ in range(times):
            work()
        self._wait()
        return (self._clock() - begin) / times

    def _wait(self) -> None:
        if self._subject.device.type == "cuda":
            torch.cuda.synchronize(self._subject.device)

    def _pool(self, form: Form) -> HostPool:
        layout = _layout(form, self._subject.shape, LAYERS)
        blocks = -(-min(max(TOKENS), self._subject.rows) // BLOCK_TOKENS)
        return scratch_pool(layout, blocks, self._subject.device)


class _CopiesOnly:
    """The scratch pool, but hidden states are not projected, so that only their copy is timed."""

    def __init__(self, sink: RestoreSink) -> None:
        self._sink = sink

    def write_hidden(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        return None

    def write_kv(self, layer: int, parts: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        self._sink.write_kv(layer, parts, slots)


def _ahead(subject: Subject, copies: Times) -> float:
    """Seconds of copies that the staging frames hold."""
    (tokens,), seconds = max(copies.items())
    return subject.staging.bytes * seconds / (tokens * subject.shape.kv_bytes)


def _layout(form: Form, shape: StateShape, layers: int) -> BlockLayout:
    hidden = layers if form is Form.HIDDEN else 0
    plan = LayerPlan(0, hidden, layers - hidden)
    return BlockLayout(plan, replace(shape, num_layers=layers))


def scratch_pool(layout: BlockLayout, blocks: int, device: torch.device) -> HostPool:
    """Slots of zeros, from which the device copies as from those of a server."""
    pinned = device.type == "cuda"
    memory = torch.zeros(blocks * layout.slot_bytes, dtype=torch.uint8, pin_memory=pinned)
    return HostPool(layout, blocks, memory.numpy().data)


def block_in(slot: int) -> BlockNode:
    """A block of no tree that lies in a slot."""
    node = BlockNode(None, b"", b"", None)
    node.slot = int(slot)
    return node


def _pairs(times: Mapping[tuple[int, ...], float]) -> list[tuple[int, float]]:
    return [(size[0], seconds) for size, seconds in times.items()]
