"""The tiers without SGLang: a toy device pool and copy streams whose copies can be late."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from sglang_hc.capture.capture import Capture
from sglang_hc.capture.direct import DeviceRing, DirectRows
from sglang_hc.capture.saving import DeviceState, HiddenPath
from sglang_hc.capture.snapshots import Snapshots
from sglang_hc.device.copy_stream import CopyStream, HostCopyStream
from sglang_hc.device.exactness import Exactness
from sglang_hc.device.gather_scatter import gather, scatter
from sglang_hc.forms import (
    NO_DRAFT,
    BlockLayout,
    DraftLayers,
    EndLayout,
    LayerPlan,
    StateShape,
)
from sglang_hc.policy.pins import RetentionPriority, SessionPins
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.queue.queue_view import QueueRules
from sglang_hc.ranks.agreement import ALONE, Ranks
from sglang_hc.restore.path import Recomputer, RestorePath
from sglang_hc.restore.staging import StagingRing
from sglang_hc.restore.timed_restorer import TimedRestorer
from sglang_hc.store.block_io import BlockIo, LocalBlockIo
from sglang_hc.store.chain import Chain
from sglang_hc.store.executor import Completion, Operation, perform
from sglang_hc.store.host_pool import Bytes, HostPool
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.store.read_watch import not_observed
from sglang_hc.store.scatter_queue import ScatterQueue
from sglang_hc.tiers.retention import Retention
from sglang_hc.tiers.tiers import Tiers
from support.decisions import CALLS, Note, note_calls
from support.host import host_tier, queue_over

HIDDEN_BYTES = 8
PARTS = (8, 8)
CPU = torch.device("cpu")


class StepExecutor:
    """Performs an operation when a test says so; the next `fail_next` operations fail."""

    def __init__(self, pool: HostPool, snapshots: list[Bytes]) -> None:
        self._pool, self._snapshots = pool, snapshots
        self.waiting: deque[tuple[int, Operation]] = deque()
        self._done: list[Completion] = []
        self.fail_next = 0

    def submit(self, ticket: int, operation: Operation) -> None:
        self.waiting.append((ticket, operation))

    def step(self) -> None:
        """Perform the oldest operation, if any."""
        if not self.waiting:
            return
        ticket, operation = self.waiting.popleft()
        ok = self.fail_next == 0
        if ok:
            perform(operation, self._pool, self._snapshots)
        else:
            self.fail_next -= 1
        self._done.append(Completion(ticket, ok))

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def drain(self) -> list[Completion]:
        while self.waiting:
            self.step()
        return self.poll()

    def close(self) -> None:
        self.drain()


class ToyPool:
    """Device pool whose K/V are a function of the hidden state, as a projection is."""

    def __init__(self, slots: int, layers: int, parts: Sequence[int] = PARTS) -> None:
        """parts: bytes of K and of V per token; a projection gives `PARTS`."""
        self.kv = [
            [torch.zeros((slots, part), dtype=torch.uint8) for part in parts] for _ in range(layers)
        ]

    def rows(self, layer: int) -> list[torch.Tensor]:
        return self.kv[layer]

    def write_hidden(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for part, rows in zip(self.kv[layer], project(layer, hidden, positions), strict=True):
            part.index_copy_(0, slots, rows)

    def write_kv(self, layer: int, parts: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        for target, rows in zip(self.kv[layer], parts, strict=True):
            scatter(target, slots, rows)

    def gather(
        self, layers: Sequence[int], slots: torch.Tensor, targets: list[torch.Tensor], at: int
    ) -> None:
        gather(self, layers, slots, targets, at)


def project(layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    """A stand-in for the projection: depends on layer, state and position."""
    mixed = hidden * 3 + (positions[:, None] * 7 + layer).to(torch.uint8)  # modulo 256
    return [mixed + part for part in range(len(PARTS))]


def build(
    plan: LayerPlan, slots: int, device_slots: int, rows: int = 64, buffers: int = 3,
    copy_stream: CopyStream | None = None, recomputer: Recomputer | None = None,
    ring: int = 0,
    disk: Callable[[HostPool], LocalBlockIo] | None = None,
    store: Callable[[HostPool], LocalBlockIo] | None = None,
    clock: Callable[[], float] = time.monotonic,
    ranks: Ranks = ALONE, notes: list[Note] | None = None,
    draft: DraftLayers = NO_DRAFT, ends: EndLayout | None = None,
) -> tuple[Tiers, ToyPool, StepExecutor]:  # fmt: skip
    """Tiers over toy parts. `rows` x `buffers` bounds what may be on its way to slots.

    ring: bytes that stand for the device's own memory, which rows are saved through; 0 for none.
    disk: makes what lies below the host tier, whose requests are fetched as they arrive. store:
    makes a remote store behind the disk. ranks: who decides with them; several have a clock of
    their own. notes: get what the host tier does, and what reads took. ends: what other layers
    keep.
    """
    clock = clock if ranks.count == 1 else ranks.clock
    shape = StateShape(plan.num_layers, HIDDEN_BYTES, PARTS, "uint8")
    layout = BlockLayout(plan, shape, draft, ends)
    host = host_tier(slots, fingerprint=layout.fingerprint("toy"))
    if notes is not None:
        note_calls(host, CALLS, notes)
    pool, device = HostPool(layout, slots), ToyPool(device_slots, layout.num_layers)
    copy_stream = copy_stream or HostCopyStream()
    snapshots = np.zeros((buffers, plan.hidden, rows, HIDDEN_BYTES), dtype=np.uint8)
    executor = StepExecutor(pool, list(snapshots))
    several = ranks.count > 1
    scatters = ScatterQueue(ranks.executor(executor), host, points_too=several)
    own = DeviceRing(ring, CPU) if ring else None
    staging = torch.empty(snapshots.size, dtype=torch.uint8) if ring else None
    ways = copy_stream.opposite(), scatters, own
    hidden = None
    if plan.hidden:
        gathered = Snapshots(list(snapshots), staging, copy_stream.opposite(), scatters)
        hidden = HiddenPath(gathered, DirectRows([pool.hidden], *ways))
    kv = DirectRows(pool.kv, *ways) if layout.kv_layers else None
    source = DeviceState(device, None, None, hidden, kv)
    below = None
    if disk is not None:
        io: BlockIo = KnownBlocks(ranks.blocks(disk(pool)), clock)
        if store is not None:
            io = Chain(io, KnownBlocks(ranks.blocks(store(pool)), clock))
        on_read = not_observed
        if notes is not None:
            on_read = lambda *read: notes.append(("read", list(read), None))  # noqa: E731
        below = LowerTier(io, host, clock, on_read, ranks.pause)
    on_ready = below.write_through if below is not None else lambda node: None
    staging = StagingRing.sized_for(layout.shape, CPU, copy_stream)
    path = RestorePath(pool, device, staging, recomputer)
    counters: Counter[str] = Counter()
    planner = RestorePlanner(None, plan, recomputer is not None, counters)
    window = LookAhead()
    pins = SessionPins(2 * slots, 1.0)
    tiers = Tiers(
        host,
        below,
        Capture(layout, host, scatters, source, on_ready, clock=lambda: 0.0),
        TimedRestorer(host, path, planner, None, counters, ranks),
        queue_over(host, below, window, QueueRules("on-arrival")),
        Retention(host, below, pins, RetentionPriority(window, pins), clock),
        Exactness(True, 0.0),
        ranks,
    )
    return tiers, device, executor
