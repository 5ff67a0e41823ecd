"""CUDA graphs without CUDA: the model's kernels recorded once, then replayed without its Python.

What a graph does to code that hangs on the model is what matters here. Capture runs Python with
values that mean nothing. A replay runs the recorded operations on the same memory, and no Python.
What lies in the graph's own memory is somebody else's as soon as the replay is over. Attention is
one kernel that reads the batch at hand, as it reads static metadata on a GPU. Under `breakable`
graphs it is left outside, so its Python runs; under `full` ones it is inside, so it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.core import Core

BUCKETS = (1, 2, 4, 8, 32, 64, 128, 256, 512, 1024)
"""Rows that graphs are captured for; a batch takes the smallest that holds it."""


class Graph(TorchDispatchMode):
    """Operations recorded while entered. `replay` repeats them on the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], None]] = []
        self._own: list[torch.Tensor] = []
        self._known: set[int] = set()
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._paused:
            return out
        returns = func._schema.returns
        if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return out  # a view of memory that a replay fills
        for tensor in (*args, *kwargs.values()):
            if isinstance(tensor, torch.Tensor):
                self._known.add(tensor.untyped_storage()._cdata)
        made = isinstance(out, torch.Tensor) and out.untyped_storage()._cdata not in self._known
        if made:
            self._own.append(out)
            self._known.add(out.untyped_storage()._cdata)
        self._steps.append(partial(_again, func, args, kwargs, out if made else None))
        return out

    def kernel(self, out: torch.Tensor, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One step that is not looked into: at a replay, `run` gives the first rows of `out`."""
        self._own.append(out)
        self._known.add(out.untyped_storage()._cdata)

        def step() -> None:
            result = run()
            out[: result.shape[0]].copy_(result)

        self._steps.append(step)
        return out

    def outside(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call something without recording it."""
        self._paused = True
        try:
            return run()
        finally:
            self._paused = False

    def replay(self) -> None:
        for step in self._steps:
            step()

    def leave(self) -> None:
        """The memory of the graph goes to whichever graph is replayed next."""
        for tensor in self._own:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))


def _again(func: Any, args: Any, kwargs: Any, out: torch.Tensor | None) -> None:
    result = func(*args, **kwargs)
    if out is not None:
        out.copy_(result)


class _Captured:
    """A graph of one number of rows with its static inputs."""

    def __init__(self, rows: int, like: torch.Tensor) -> None:
        self.input_ids = torch.zeros(rows, dtype=like.dtype)
        self.positions = torch.zeros(rows, dtype=torch.int64)
        self.graph = Graph()
        self.out: torch.Tensor


class GraphCore(Core):
    """A `Core` whose model runs by such graphs. One per process; it is not undone.

    backend: "breakable" or "full", for prefill; decode steps are always full graphs.
    `events` tells in order: ("rows", taken from the batch, captured for), ("wait", layer) and
    ("attention", layer).
    """

    def __init__(self, *flags: str, backend: str = "breakable", **env: str) -> None:
        super().__init__(*flags, **env)
        from sglang.srt.layers.radix_attention import RadixAttention

        runner = self.scheduler.tp_worker.model_runner
        self.events: list[tuple[Any, ...]] = []
        self._breakable = backend == "breakable"
        self._pool = runner.token_to_kv_pool
        self._body = runner.model.model.forward
        self._attend = RadixAttention.forward
        self._captured: dict[tuple[bool, int], _Captured] = {}
        self._recording: Graph | None = None
        self._live: tuple[Any, int] | None = None
        self._by_graph = False
        runner.model.model.forward = self._forward
        runner._forward_raw = partial(self._served, runner._forward_raw)

        def attention(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self._attention(module, *args, **kwargs)

        mock.patch.object(RadixAttention, "forward", attention).start()
        gate = self.tree.tiers.restorer.gate
        waits = gate.wait_until
        gate.wait_until = lambda layer: (self.events.append(("wait", layer)), waits(layer))[1]

    def _served(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A batch of the scheduler; recomputed layers call the model directly, on a GPU as well."""
        self._by_graph = True
        try:
            return original(*args, **kwargs)
        finally:
            self._by_graph = False

    def _forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any, *args: Any, **kw: Any
    ) -> torch.Tensor:
        if not self._by_graph:
            return self._body(input_ids, positions, batch, *args, **kw)
        rows = input_ids.shape[0]
        bucket = next(bucket for bucket in BUCKETS if bucket >= rows)
        self.events.append(("rows", rows, bucket))
        key = batch.forward_mode.is_extend(), bucket
        if key not in self._captured:
            self._captured[key] = self._capture(bucket, input_ids, batch)
        captured = self._captured[key]
        captured.input_ids[:rows].copy_(input_ids)
        captured.positions[:rows].copy_(positions)
        self._live = batch, rows
        captured.graph.replay()
        self._live = None
        out = captured.out[:rows].clone()
        captured.graph.leave()
        return out

    def _capture(self, bucket: int, like: torch.Tensor, batch: Any) -> _Captured:
        captured = _Captured(bucket, like)
        self._recording = captured.graph
        with captured.graph:
            captured.out = self._body(captured.input_ids, captured.positions, batch)
        self._recording = None
        captured.graph.leave()
        return captured

    def _attention(
        self, module: Any, q: torch.Tensor, k: Any, v: Any, batch: Any, *args: Any, **kw: Any
    ) -> torch.Tensor:
        graph = self._recording
        if graph is None:
            return self._attend(module, q, k, v, batch, *args, **kw)

        def run() -> torch.Tensor:
            assert self._live is not None
            live, rows = self._live
            python = self._breakable and live.forward_mode.is_extend()
            counter = self._pool.layer_transfer_counter
            if not python:
                self._pool.layer_transfer_counter = None
            try:
                return self._attend(module, q[:rows], k[:rows], v[:rows], live, *args, **kw)
            finally:
                self._pool.layer_transfer_counter = counter
                self.events.append(("attention", module.layer_id))

        width = module.tp_q_head_num * module.v_head_dim
        out = graph.outside(lambda: q.new_zeros((q.shape[0], width)))
        return graph.kernel(out, run)
