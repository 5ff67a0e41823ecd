"""One model in this process with the server's own parts around it, for timing restorations.

SGLang's real scheduler is built (harness/core.py), so pool, projection, attention backend and
recomputation are those of a server; no request is run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmark.harness.core import Core
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.policy.cost_model import CostModel
from sglang_hc.policy.eviction import LruPolicy
from sglang_hc.restore.path import Restoration, RestorePath
from sglang_hc.restore.restore_pass import RestorePass
from sglang_hc.restore.staging import StagingRing
from sglang_hc.store.disk import DirectorySpec, DiskStore, StoredModel
from sglang_hc.store.disk.format import WHOLE
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.host_memory import HostMemory, MemorySpec
from sglang_hc.store.host_pool import HostPool
from sglang_hc.tree.block_tree import BlockNode, BlockTree
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import pack_tokens

PATTERN = 1 << 20
"""Random values that a host pool is filled with, again and again."""


class Engine:
    """The parts that a restoration uses, for one model, as the server's factory put them together:
    projection and streams chosen here, pool, recomputation, measured costs. Everything runs on the
    current stream."""

    def __init__(self, folder: Path, tokens: int, flags: list[str]) -> None:
        """tokens: the longest history; at most the positions of the model."""
        from sglang_hc.srt.model.model_state import MODEL_STATE

        # In hidden form the factory chooses a projection and a stream; KV form uses neither.
        words = ["--hc-forms", "hidden", "--hc-host-size-gb", "0.25"]
        words += ["--max-total-tokens", str(tokens + 1024)]
        words += ["--cuda-graph-backend-decode", "disabled"]
        words += ["--cuda-graph-backend-prefill", "disabled"]
        self.core = Core(
            *words, *flags, model=str(folder.resolve()), profile=None,
            SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE="0",
            SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY="0",
        )  # fmt: skip
        tiers = self.core.tree.tiers
        self.runner: Any = self.core.scheduler.tp_worker.model_runner
        self.cost: CostModel = getattr(self.runner, MODEL_STATE).cost
        self.shape: StateShape = tiers.layout.shape
        assert self.cost is not None, "the server could not measure its costs; its log says why"
        assert self.shape.hidden_bytes, "the model's hidden states cannot be restored"
        self.sink = tiers.restorer.path.sink
        self.copy_stream = tiers.restorer.path.copy_stream
        self.side_stream = tiers.restorer.path.side_stream
        self.recomputer = tiers.restorer.path.recomputer
        self.device: torch.device = self.sink.device
        self.dtype: torch.dtype = self.runner.dtype
        self.vocabulary: int = self.runner.model_config.vocab_size
        allocator = self.runner.token_to_kv_pool_allocator
        self.slots: torch.Tensor = allocator.alloc(tokens).to(torch.int64)

    @property
    def layers(self) -> int:
        return self.shape.num_layers

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Time of `work` from an idle device to an idle device."""
        self.wait()
        begin = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begin


@dataclass(frozen=True)
class History:
    """The blocks of one history in slots of a pool, in the order of the tokens."""

    host: HostTier
    nodes: tuple[BlockNode, ...]


class Stored:
    """A history of `tokens` tokens in host memory under one layer plan, as a server has it; with
    `disk` in that directory as well. Close it after use."""

    def __init__(self, engine: Engine, plan: LayerPlan, tokens: int, disk: str | None) -> None:
        self.engine = engine
        self.layout = BlockLayout(plan, engine.shape)
        self._blocks = -(-tokens // BLOCK_TOKENS)
        memory = HostMemory(MemorySpec(self.layout, self._blocks, BLOCK_TOKENS, 0))
        self.pool = memory.pool
        self.blocks = self._threads(disk) if disk else None
        _fill(self.pool, engine.dtype)
        engine.copy_stream.pin(self.pool.buffer)
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(engine.vocabulary, (tokens,), generator=generator).tolist()
        self._histories: dict[str, History] = {}
        self.ring = StagingRing.sized_for(self.layout.shape, engine.device, engine.copy_stream)

    def _threads(self, path: str) -> DiskThreads:
        size = int(1.5 * self._blocks * self.layout.slot_bytes) + (1 << 30)
        directory = DirectorySpec(path, size)
        model = StoredModel.of(self.layout.chunks(), self.layout.fingerprint(), "restore", WHOLE)
        return DiskThreads(DiskStore.open((directory,), model), self.pool, Counter())

    def history(self, slots: str) -> History:
        """slots: `adjacent`, or `scattered` for neighbours of the path anywhere in the pool."""
        if slots not in self._histories:
            self._histories[slots] = self._history(slots == "scattered")
        return self._histories[slots]

    def _history(self, scattered: bool) -> History:
        host = HostTier(BlockTree(self.layout.fingerprint()), self._blocks, LruPolicy())
        if scattered:
            taken = [host.stage(0.0) for _ in range(self._blocks)]
            order = torch.randperm(self._blocks, generator=torch.Generator().manual_seed(0))
            for index in order.tolist():
                host.unstage(taken[index])
        parent = host.tree.root(None)
        for first in range(0, len(self.tokens), BLOCK_TOKENS):
            slot = host.stage(0.0)
            assert slot is not None, "the pool has a slot for each block"
            piece = pack_tokens(self.tokens[first : first + BLOCK_TOKENS])
            parent = host.publish(parent, piece, slot, 0.0).node
            parent.ready = True
        return History(host, tuple(parent.path()))

    def restore(
        self, tokens: int, slots: str, recompute: int = 0, kv_per_hidden: float = 0.0
    ) -> None:
        """Submit what a server does between admission and the last layer's K/V."""
        engine = self.engine
        nodes = self.history(slots).nodes[: -(-tokens // BLOCK_TOKENS)]
        whole = engine.slots[:tokens]
        restoration = Restoration(nodes, 0, tokens, whole, recompute, engine.slots[:0])
        path = RestorePath(self.pool, engine.sink, self.ring, engine.recomputer, engine.side_stream)
        restore = RestorePass(path, [restoration], kv_per_hidden)
        with torch.no_grad():
            restore.recompute()
            restore.finish()

    def close(self) -> None:
        """End the threads. The memory goes with this object."""
        if self.blocks is not None:
            self.blocks.close()


def _fill(pool: HostPool, dtype: torch.dtype) -> None:
    """Values of a size that hidden states have: what is multiplied decides the power drawn."""
    values = torch.randn(PATTERN, generator=torch.Generator().manual_seed(2)).to(dtype)
    pattern = values.view(torch.uint8)
    flat = torch.from_numpy(pool.bytes).view(-1)
    for at in range(0, flat.numel(), pattern.numel()):
        part = flat[at : at + pattern.numel()]
        part.copy_(pattern[: part.numel()])
