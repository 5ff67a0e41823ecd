"""The time that the scheduler thread needs to enqueue a long restoration, against the link's time.

Every call that reaches the driver counts 20 us, which is on the slow side of what Python and the
driver need together. What the driver spends per range within one batched copy is not counted: it
is not known before a GPU run.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.restore.path import Restoration, RestorePath
from sglang_hc.restore.restore_pass import RestorePass
from sglang_hc.restore.staging import CUDA_FRAMES, StagingRing
from sglang_hc.store.host_pool import HostPool
from support.copy_streams import FakeCopyStream
from support.restores import nodes_in
from support.tiers import CPU

CALL_S = 20e-6
LINK_BYTES_S = 50e9
SHARE = 0.5
TOKENS = 16384

PROJECTION_LAUNCHES = 6
"""Of one piece by the model's modules: GEMM, bias where it is apart, K norm, RoPE, and K and V into
the pool. `by_epilogue` has two, `by_fused` one."""

SCATTER_LAUNCHES = 1
"""`KvPoolRows.write_kv_by_sglang`: K and V in one launch."""


class CountingCopyStream(FakeCopyStream):
    """Copies nothing; counts every call that reaches the driver."""

    def __init__(self) -> None:
        self.calls = 0

    def _count(self, *_: Any) -> None:
        self.calls += 1

    computed = after = copy = copy_ranges = record = before_compute = _count


class CountingSink:
    def __init__(self, copy_stream: CountingCopyStream) -> None:
        self.copy_stream = copy_stream
        self.rows = 0

    def write_hidden(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self.copy_stream.calls += PROJECTION_LAUNCHES
        self.rows += len(hidden)

    def write_kv(self, layer: int, parts: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        self.copy_stream.calls += SCATTER_LAUNCHES
        self.rows += len(parts[0])


SHAPES = {
    "llama-2-7b": StateShape(32, 8192, (8192, 8192), "bfloat16"),
    "llama-2-13b": StateShape(40, 10240, (10240, 10240), "bfloat16"),
    "llama-3.1-8b": StateShape(32, 8192, (2048, 2048), "bfloat16"),
}
CASES = [
    ("llama-2-7b", 32, 0),
    ("llama-2-7b", 0, 32),
    ("llama-2-7b", 20, 12),
    ("llama-2-13b", 40, 0),
    ("llama-2-13b", 0, 40),
    ("llama-3.1-8b", 0, 32),
    ("llama-3.1-8b", 16, 16),
]


@pytest.mark.parametrize("scattered", [False, True], ids=["adjacent", "scattered"])
@pytest.mark.parametrize(("model", "hidden", "kv"), CASES)
def test_enqueueing_takes_at_most_half_the_time_of_the_link(
    model: str, hidden: int, kv: int, scattered: bool
) -> None:
    shape = SHAPES[model]
    layout = BlockLayout(LayerPlan(0, hidden, kv), shape)
    blocks = TOKENS // BLOCK_TOKENS
    # Address space only: nothing of it is read or written.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, 2 * blocks * layout.slot_bytes, flags=flags)
    pool = HostPool(layout, 2 * blocks, memory)
    places = np.random.default_rng(0).permutation(2 * blocks)[:blocks]
    slots = places if scattered else np.arange(blocks)
    nodes = nodes_in([0] * blocks)
    for node, slot in zip(nodes, slots, strict=True):
        node.slot = int(slot)
    copy_stream = CountingCopyStream()
    sink = CountingSink(copy_stream)
    ring = StagingRing(*CUDA_FRAMES, CPU, copy_stream)  # type: ignore[arg-type]
    restoration = Restoration(nodes, 0, TOKENS, torch.arange(TOKENS))
    path = RestorePath(pool, sink, ring)  # type: ignore[arg-type]
    restore = RestorePass(path, [restoration])
    for layer in range(shape.num_layers):
        restore.wait(layer)
    restore.finish()
    assert sink.rows == shape.num_layers * TOKENS
    size = TOKENS * (hidden * shape.hidden_bytes + kv * shape.kv_bytes)
    assert copy_stream.calls * CALL_S <= SHARE * size / LINK_BYTES_S
