"""One model in this process with the server's own parts around it, for timing restorations.

SGLang's real scheduler is built (test/support/core.py), so pool, projection, attention backend and
recomputation are those of a server; no request is run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "test"), str(ROOT / "benchmark" / "gpu")]

import torch  # noqa: E402

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape  # noqa: E402
from sglang_hc.policy.eviction import LruPolicy  # noqa: E402
from sglang_hc.store.host_pool import HostPool  # noqa: E402
from sglang_hc.transfer.restore import Restoration, RestorePass  # noqa: E402
from sglang_hc.transfer.staging import StagingRing  # noqa: E402
from sglang_hc.tree.block_tree import BlockTree  # noqa: E402
from sglang_hc.tree.host_tier import HostTier  # noqa: E402
from sglang_hc.tree.identity import pack_tokens  # noqa: E402
from support.core import Core  # noqa: E402

PATTERN = 1 << 20
"""Random values that a host pool is filled with, again and again."""


class Engine:
    """The parts that a restoration uses, for one model. Everything runs on the current stream."""

    def __init__(self, folder: Path, tokens: int, flags: list[str]) -> None:
        """tokens: the longest history."""
        from sglang_hc.srt import adapters
        from sglang_hc.srt.kv_pool import KvPoolRows
        from sglang_hc.srt.recompute import LayerRecomputer

        words = ["--max-total-tokens", str(tokens + 1024), "--context-length", str(tokens + 1024)]
        words += ["--hc-forms", "kv", "--hc-host-size-gb", "0.25", "--hc-read-buffer-gb", "0"]
        self.core = Core(
            *words, "--disable-cuda-graph", *flags, model=str(folder.resolve()),
            SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE="0",
            SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY="0",
        )  # fmt: skip
        self.runner: Any = self.core.scheduler.tp_worker.model_runner
        family = adapters.family_of(self.runner.model)
        assert family is not None, "the model's hidden states cannot be restored"
        self.adapters = adapters.layer_modules(self.runner.model, family)
        self.sink = KvPoolRows(self.runner.token_to_kv_pool, self.adapters)
        self.device = self.sink.device
        self.lane = self.core.tree.tiers._lane
        self.recomputer = LayerRecomputer(self.runner, None)
        self.dtype: torch.dtype = self.runner.dtype
        self.vocabulary: int = self.runner.model_config.vocab_size
        weight = self.adapters[0].qkv.weight
        self.shape = StateShape(
            self.sink.num_layers,
            weight.shape[1] * weight.element_size(),
            self.sink.part_bytes,
            str(self.dtype).removeprefix("torch."),
        )
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


class Stored:
    """A history of `tokens` tokens in host memory under one layer plan."""

    def __init__(self, engine: Engine, plan: LayerPlan, tokens: int, scattered: bool) -> None:
        """scattered: neighbours of the path lie anywhere in the pool."""
        self.engine = engine
        self.layout = BlockLayout(plan, engine.shape)
        blocks = -(-tokens // BLOCK_TOKENS)
        self.pool = HostPool(self.layout, blocks)
        _fill(self.pool, engine.dtype)
        engine.lane.pin(self.pool.buffer)
        self.host = HostTier(BlockTree(self.layout.fingerprint()), blocks, LruPolicy())
        if scattered:
            taken = [self.host.stage(0.0) for _ in range(blocks)]
            order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
            for index in order.tolist():
                self.host.unstage(taken[index])
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(engine.vocabulary, (tokens,), generator=generator).tolist()
        parent = self.host.tree.root(None)
        for first in range(0, tokens, BLOCK_TOKENS):
            slot = self.host.stage(0.0)
            piece = pack_tokens(self.tokens[first : first + BLOCK_TOKENS])
            parent = self.host.publish(parent, piece, slot, 0.0).node
            parent.ready = True
        self.nodes = tuple(parent.path())
        self.ring = StagingRing.sized_for(self.layout, engine.device, engine.lane)

    def restoration(self, tokens: int, recompute: int) -> Restoration:
        slots = self.engine.slots
        nodes = self.nodes[: -(-tokens // BLOCK_TOKENS)]
        return Restoration(nodes, 0, tokens, slots[:tokens], recompute, slots[:0])

    def restore(
        self, tokens: int, recompute: int = 0, sink: Any = None, early: Any = None,
        kv_per_hidden: float = 0.0,
    ) -> None:  # fmt: skip
        """Submit what a server does between admission and the last layer's K/V."""
        engine = self.engine
        restore = RestorePass(
            self.layout, self.pool, sink or engine.sink, engine.lane,
            [self.restoration(tokens, recompute)], self.ring, engine.recomputer, early,
            kv_per_hidden, engine.core.tree.tiers._side,
        )  # fmt: skip
        with torch.no_grad():
            restore.recompute()
            restore.finish()


def _fill(pool: HostPool, dtype: torch.dtype) -> None:
    """Values of a size that hidden states have: what is multiplied decides the power drawn."""
    values = torch.randn(PATTERN, generator=torch.Generator().manual_seed(2)).to(dtype)
    pattern = values.view(torch.uint8)
    flat = torch.from_numpy(pool.bytes).view(-1)
    for at in range(0, flat.numel(), pattern.numel()):
        part = flat[at : at + pattern.numel()]
        part.copy_(pattern[: part.numel()])
