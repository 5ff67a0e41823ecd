"""SGLang's scheduler with the tiers on streams that hold order only, every access compared.

What a GPU would have is put in the place of what a CPU has: streams, events, a copy stream with
device memory for snapshots, SGLang's barrier between its two streams, and that barrier's short form
at a decode step by CUDA graph, behind which the schedule stream goes on while the model runs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch

from sglang_hc.capture.direct import DeviceRing
from sglang_hc.capture.taps import SideBranch
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.srt.hybrid import build as streamed
from sglang_hc.srt.model import capture_memory, model_state, offload
from sglang_hc.srt.model.capture_memory import CaptureMemory
from sglang_hc.srt.start import build
from sglang_hc.store.executor import CopyRows, Operation, ScatterRows
from support.copy_streams import FakeCopyStream
from support.core import Core
from support.happens_before import Clocks, Event, Stream
from support.watch import Watch

DEVICE_BYTES = 4 << 20
"""Memory that capture is told the device has: the ring holds a few hundred rows."""


class _Event:
    def __init__(self, event: Event) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class OrderedCopyStream(FakeCopyStream):
    """What `CudaCopyStream` does, on streams of a `Clocks`."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._stream = clocks.stream("copy_stream")
        self.other: OrderedCopyStream | None = None

    def computed(self) -> _Event:
        return _Event(self._clocks.current.record_event())

    def after(self, computed: Any) -> None:
        self._stream.wait_event(computed.event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._clocks.on(self._stream):
            target.copy_(source)

    def record(self) -> _Event:
        return _Event(self._stream.record_event())

    def before_compute(self, event: Any) -> None:
        self._clocks.current.wait_event(event.event)

    def side_stream(self) -> Callable[[], AbstractContextManager[Any]]:
        return partial(self._clocks.on, self._clocks.stream("side"))

    def opposite(self) -> OrderedCopyStream:
        if self.other is None:
            self.other = OrderedCopyStream(self._clocks)
            self.other.other = self
        return self.other


class OrderedCore(Core):
    """A `Core` whose accesses are compared while it runs. One per process; it is not undone.

    beside: restorations run beside the compute stream.
    """

    def __init__(self, *flags: str, beside: bool = False, **env: str) -> None:
        from sglang.srt.model_executor.model_runner import ModelRunner

        self.clocks = Clocks()
        self.watch = Watch(self.clocks)
        patches = contextlib.ExitStack()
        patches.enter_context(self.clocks.installed())
        copy_stream = OrderedCopyStream(self.clocks)
        side = copy_stream.side_stream() if beside else None
        told = partial(_told, self.watch)
        take = model_state.take_capture_memory
        taps = SideBranch(torch.cpu, self.clocks.stream("taps"))
        for target, name, new in (
            (build, "copy_stream_for", lambda *_: copy_stream),
            (offload, "copy_stream_for", lambda *_: OrderedCopyStream(self.clocks)),
            (streamed, "copy_stream_for", lambda *_: OrderedCopyStream(self.clocks)),
            (capture_memory, "_tap_branch", lambda *_: taps),
            (build, "_side_stream", lambda *_: side),
            (model_state, "take_capture_memory", partial(_with_device_memory, take)),
            (ComputeStream, "will_read", lambda compute, *made: told(compute, made)),
            (ModelRunner, "_forward_raw", _publishing(ModelRunner._forward_raw, self.watch)),
        ):
            patches.enter_context(mock.patch.object(target, name, new))
        super().__init__(*flags, **{"SGLANG_ENABLE_WAR_BARRIER": "1", **env})
        self.scheduler.tp_worker.model_runner.forward_stream.name = "forward"
        self.scheduler.copy_stream.name = "results"
        self._watch_long_lived()
        self.clocks.all_over()

    def run(self, steps: int | None = None, each_pass: Callable[[int], None] | None = None) -> None:
        with self.watch:
            super().run(steps, each_pass)

    def settle(self) -> None:
        self.clocks.all_over()
        super().settle()
        self.clocks.all_over()

    def _watch_long_lived(self) -> None:
        tiers, watch = self.tree.tiers, self.watch
        table = self.scheduler.req_to_token_pool.req_to_token
        watch.region("slot table", table, table.itemsize)
        for layer in range(tiers.layout.plan.num_layers):
            for part, rows in enumerate(tiers.restorer.path.sink.rows(layer)):
                watch.region(f"KV pool, layer {layer}, part {part}", rows, rows.shape[1])
        if tiers.capture.taps is not None:
            watch.region("taps", tiers.capture.taps.states)
        shape = tiers.layout.shape
        row = math.gcd(shape.hidden_bytes, *shape.kv_parts)
        watch.region("host pool", torch.from_numpy(tiers.restorer.path.pool.bytes), row)
        hidden, kv = tiers.capture.hidden, tiers.capture.kv
        ring = hidden.direct.ring if hidden is not None else kv.ring
        watch.region("ring", ring.memory, 16)
        snapshots: dict[int, torch.Tensor] = {}
        for staging in hidden.snapshots.free if hidden is not None else ():
            snapshots[staging.index] = staging.host
            watch.region(f"snapshot {staging.index} on the host", staging.host)
            watch.region(f"snapshot {staging.index} on the device", staging.device)
        for frame in tiers.restorer.path.staging.free:
            watch.region("frame", frame)
        weights = self.model_state.weights.ring
        for number, place in enumerate(weights.places if weights is not None else ()):
            watch.region(f"weights in place {number}", place)
        executor = tiers.capture.scatters.executor
        executor.submit = _noting(executor.submit, watch, tiers.restorer.path.pool, snapshots)


class OrderedStreams(OrderedCore):
    """The same without tiers, where the state of running requests passes through places."""

    def _watch_long_lived(self) -> None:
        attention = self.scheduler.tp_worker.model_runner.attn_backend
        units, watch = attention.units, self.watch
        table = self.scheduler.req_to_token_pool.req_to_token
        watch.region("slot table", table, table.itemsize)
        watch.region("row table", attention.rows, attention.rows.itemsize)
        for number, place in enumerate(units._places):
            for part in (place.hidden, *place.parts):
                watch.region(f"place {number}", part, part.shape[1])
        mirror = units._mirror
        for part in (mirror.hidden, *mirror.parts):
            watch.region("host rows", part, part.shape[2])
        watch.region("kept rows", units._kept, units._kept.shape[2])


def _told(watch: Watch, compute: Any, made: tuple[torch.Tensor, ...]) -> None:
    """In the place of `record_stream`, which a CPU does not have."""
    if isinstance(compute.forward, Stream):
        for tensor in made:
            watch.keep(tensor, compute.forward)


def _publishing(original: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    """A decode step reads the slot table and tells so before its graph is replayed. The attention
    of this test reads it in every layer, which counts as read at that point."""

    def forward(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not forward_batch.forward_mode.is_decode():
            return original(self, forward_batch, *args, **kwargs)
        watch.read_before = "slot table", watch.clocks.submit()
        self.shared_read_done_event = watch.clocks.current.record_event()
        try:
            return original(self, forward_batch, *args, **kwargs)
        finally:
            watch.read_before = None

    return forward


def _noting(
    submit: Callable[[int, Operation], None],
    watch: Watch,
    pool: Any,
    snapshots: dict[int, torch.Tensor],
) -> Callable[[int, Operation], None]:
    """What the executor will read and write, noted when it is handed the work."""
    hidden = torch.from_numpy(pool.hidden)

    def noting(ticket: int, operation: Operation) -> None:
        if isinstance(operation, ScatterRows):
            watch.on_host("file rows", snapshots[operation.snapshot], write=False)
            for span in operation.spans:
                rows = hidden[span.slot, :, span.slot_row : span.slot_row + span.rows]
                watch.on_host("file rows", rows, write=True)
        if isinstance(operation, CopyRows):
            watch.on_host("copy rows", hidden[operation.source, :, : operation.rows], False)
            watch.on_host("copy rows", hidden[operation.target, :, : operation.rows], True)
        submit(ticket, operation)

    return noting


def _with_device_memory(
    original: Callable[..., CaptureMemory], runner: Any, plan: Any, group: Any
) -> CaptureMemory:
    """What capture takes at load, as for a small device: rows pass through a ring in pieces."""
    memory = original(runner, plan, group)
    layer = capture_memory.model_shape(runner)
    context = runner.model_config.context_len
    sizes = capture_memory.capture_sizes(runner.server_args, plan, layer, context, DEVICE_BYTES)
    ring = DeviceRing(sizes.ring_bytes, torch.device("cpu"))
    staging = torch.empty(sizes.staging_bytes, dtype=torch.uint8)
    return CaptureMemory(sizes, memory.taps, memory.verified, ring, staging)
