"""What copies, projection and prefill of one layer cost, by a short probe at the start.

The layer plan has to be known before anything is served, so a few sizes of each are timed with the
server's own parts: copies by a `RestorePass` over slots of a host pool, the projection by a restore
sink, reads from disk by the store. What the probe got wrong is learned from the requests
(`policy.correction`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import numpy as np
import torch

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, Form, LayerPlan, StateShape
from sglang_hc.policy.cost_model import CostModel, SourceTier, TierCopy
from sglang_hc.policy.fit import Fit, fit_line, fit_prefill
from sglang_hc.restore.path import Restoration, RestorePath, RestoreSink
from sglang_hc.restore.probe_disk import read_seconds
from sglang_hc.restore.restore_pass import RestorePass
from sglang_hc.restore.staging import StagingRing
from sglang_hc.store.host_pool import HostPool
from sglang_hc.tree.block_tree import BlockNode

BUDGET_S = 10.0
"""When so many seconds have passed, nothing is repeated any more."""

ROUNDS = 3
"""Samples of each size; the fastest counts, because other work on the machine only adds to it."""

LAYERS = 4
"""Layers of one timed restoration, and passes of one timed prefill on an accelerator: enough for
work to be submitted ahead of its execution, as in a forward pass, and for long copies to find less
of the rows that they write in a processor's caches than with one layer."""

HISTORY = 2048
"""Tokens of the largest copy and projection, and of the context behind which a prefill is timed."""

CHUNK = 512
"""New tokens of the largest prefill."""

ROWS = HISTORY + CHUNK
"""Rows of a scratch pool in which everything fits."""

Clock = Callable[[], float]


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


def probe(
    subject: Subject, fingerprint: str, disks: Sequence[str] = (), clock: Clock = time.perf_counter
) -> CostModel:
    """The costs of `subject`. disks: the `--hc-disk` directories.

    Several ranks run everything equally often, because all decide by the longest time of any.
    Raises what the parts raise: OSError or DirectoryError for a directory, RuntimeError for the
    device; ValueError for times that cannot be.
    """
    bench = _Bench(subject, clock)
    began = clock()

    def sample(run: Callable[..., float], sizes: Sequence[tuple[int, ...]]) -> list[list[float]]:
        for size in sizes:
            run(*size)  # the first time pays for memory and for choosing kernels
        rounds: list[list[float]] = []
        while len(rounds) < ROUNDS:
            if rounds and subject.most(clock() - began) > BUDGET_S:
                break
            rounds.append([subject.most(run(*size)) for size in sizes])
        fastest = map(min, zip(*rounds, strict=True))
        return [[*size, seconds] for size, seconds in zip(sizes, fastest, strict=True)]

    def line(run: Callable[[int], float]) -> Fit:
        return fit_line([(int(n), seconds) for n, seconds in sample(run, _tokens(subject.rows))])

    with torch.no_grad():
        kv = line(partial(bench.restore, Form.KV))
        hidden = line(partial(bench.restore, Form.HIDDEN)) if subject.hidden else None
        project = line(bench.project) if subject.hidden else None
        prefill = sample(bench.prefill, _prefills(subject.rows))
    copies = {SourceTier.HOST: TierCopy(kv, hidden)}
    if disks:
        copies[SourceTier.DISK] = _disk_copy(subject, disks, clock)
    return CostModel(
        fingerprint=fingerprint,
        origin="measured",
        copies=copies,
        prefill=fit_prefill([(int(new), int(context), took) for new, context, took in prefill]),
        project=project,
        overlap=subject.staging.copy_stream.beside_compute,
        ahead=subject.staging.bytes * kv.per_token / subject.shape.kv_bytes,
    )


def _tokens(rows: int) -> list[tuple[int, ...]]:
    """One block and a usual history, as far as they fit into `rows`."""
    most = min(HISTORY, rows)
    return [(max(1, min(BLOCK_TOKENS, most // 2)),), (most,)]


def _prefills(rows: int) -> list[tuple[int, int]]:
    """(new, context): few and many new tokens, without a context and behind a long one. A few new
    tokens behind a long history are what a restoration ends with."""
    many = max(2, min(CHUNK, rows // 4))
    few, context = min(BLOCK_TOKENS, many // 2), min(HISTORY, rows - many)
    return [(few, 0), (many, 0), (few, context), (many, context)]


def _disk_copy(subject: Subject, disks: Sequence[str], clock: Clock) -> TierCopy:
    """Whole blocks of K and V are read: what a read costs besides its bytes is shared by all
    layers. Hidden states take as long for each byte."""
    shape = subject.shape
    layers = shape.num_layers
    line = fit_line([
        (blocks * BLOCK_TOKENS, seconds / layers)
        for blocks, seconds in read_seconds(disks, _layout(Form.KV, shape, layers), clock)
    ])  # fmt: skip
    if not subject.hidden:
        return TierCopy(line)
    return TierCopy(line, line.of_bytes(shape.hidden_bytes / shape.kv_bytes))


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
        blocks = -(-min(HISTORY, self._subject.rows) // BLOCK_TOKENS)
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
