"""What capture takes of a device: by the defaults for real cards, at its limits, without room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.server_args import ServerArgs

from sglang_hc.errors import ConfigError
from sglang_hc.forms import LayerPlan, StateShape
from sglang_hc.srt.model import capture_memory
from sglang_hc.srt.model.capture_memory import (
    SNAPSHOT_BUFFERS,
    UNCHUNKED_ROWS,
    capture_sizes,
    rows_per_pass,
    take_capture_memory,
)
from sglang_hc.srt.ranks.start_group import StartGroup
from support.ledger import MODELS, Entry, ledger, table
from support.start_groups import as_rank

ROOT = Path(__file__).resolve().parents[3]
ALONE = StartGroup(0, 1)
SHAPE = StateShape(1, 64, (32, 32), "float32")


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return ledger()


def test_a_pass_of_the_defaults_fits_on_every_card(entries: list[Entry]) -> None:
    for e in entries:
        if e.taps:
            assert e.rows >= e.chunk, e
            # One step that is computed, one that is copied, one that is scattered.
            assert SNAPSHOT_BUFFERS * e.snapshot_rows >= 3 * e.graphs, e
        assert e.ring >= min(0.05 * e.gpu, e.taps), e


def test_what_capture_takes_leaves_room_for_the_kv_pool(entries: list[Entry]) -> None:
    for e in entries:
        assert e.taps + e.ring + e.staging <= 0.12 * e.gpu, e
        assert e.kv_tokens >= MODELS[e.model].context, e
        # Allocated behind the pool's back: a small part of what SGLang leaves for activations.
        assert e.behind <= e.reserve / 6, e


def test_the_manual_has_the_table(entries: list[Entry]) -> None:
    assert table(entries) in (ROOT / "docs" / "gpu-status.md").read_text()


def args_of(**given: Any) -> Any:
    values = {
        "chunked_prefill_size": 2048, "max_running_requests": 16, "max_prefill_tokens": 16384,
        "cuda_graph_config": CudaGraphConfig(decode=PhaseConfig(max_bs=32)),
    }  # fmt: skip
    return ServerArgs(model_path="dummy", **values | given)


@pytest.mark.parametrize(
    ("given", "context", "rows"),
    [
        ({}, 4096, 2048),
        ({"enable_mixed_chunk": True}, 4096, 2064),
        ({"max_running_requests": 2049}, 4096, 2049),
        ({"speculative_num_draft_tokens": 128}, 4096, 2048),
        ({"speculative_num_draft_tokens": 129}, 4096, 2064),
        ({"chunked_prefill_size": 32, "max_running_requests": None}, 4096, 64),
        ({"chunked_prefill_size": 65_536}, 131_072, 65_536),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 1000}, UNCHUNKED_ROWS, UNCHUNKED_ROWS),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 1000}, 16_383, 16_383),
        ({"chunked_prefill_size": -1}, 131_072, UNCHUNKED_ROWS),
    ],
)
def test_rows_of_a_pass(given: dict[str, Any], context: int, rows: int) -> None:
    assert rows_per_pass(args_of(**given), context) == rows


@pytest.mark.parametrize(("gib", "ring"), [(1, 2048 * 4 * 64), (0.001, int(0.05 * 0.001 * 2**30))])
def test_the_ring_is_a_pass_or_a_share_of_the_device(gib: float, ring: int) -> None:
    plan = LayerPlan(0, 4, 2)
    assert capture_sizes(args_of(), plan, SHAPE, 4096, int(gib * 2**30)).ring_bytes == ring


@pytest.fixture
def one_rank() -> Iterator[None]:
    with as_rank(tp_rank=0, tp_size=1):
        yield


def runner_of(args: Any, context: int) -> Any:
    return SimpleNamespace(
        server_args=args, model_config=SimpleNamespace(context_len=context, hidden_size=16),
        dtype=torch.float32, model=torch.nn.Linear(1, 1),
    )  # fmt: skip


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("context", "told"), [(UNCHUNKED_ROWS, False), (UNCHUNKED_ROWS + 1, True)])
def test_a_pass_longer_than_the_taps_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, context: int, told: bool
) -> None:
    monkeypatch.setattr(capture_memory, "model_shape", lambda _: SHAPE)
    with caplog.at_level("INFO"):
        memory = take_capture_memory(
            runner_of(args_of(chunked_prefill_size=-1), context), LayerPlan(0, 1, 0), ALONE
        )
    assert memory.taps is not None and memory.taps.rows == UNCHUNKED_ROWS
    assert memory.ring is None and memory.staging is None
    assert len([r for r in caplog.records if "hidden states of its" in r.message]) == told


@pytest.mark.usefixtures("one_rank")
def test_a_device_without_room_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_memory, "model_shape", lambda _: SHAPE)
    args = args_of(chunked_prefill_size=10**13)
    with pytest.raises(ConfigError) as error:
        take_capture_memory(runner_of(args, 4096), LayerPlan(0, 4, 0), ALONE)
    assert "--chunked-prefill-size (now 10000000000000)" in str(error.value)
    assert "\n" not in str(error.value)
    plan = LayerPlan(0, 0, 4)  # nothing of it is hidden: no taps
    assert take_capture_memory(runner_of(args, 4096), plan, ALONE).taps is None


def test_verified_rows_take_memory_only_where_passes_are_verified() -> None:
    plan = LayerPlan(0, 2, 0)
    plain = capture_sizes(args_of(), plan, SHAPE, 4096, None)
    verifying = capture_sizes(args_of(speculative_num_draft_tokens=4), plan, SHAPE, 4096, None)
    assert (plain.verified_rows, verifying.verified_rows) == (0, 64)
    # Two passes of 16 requests with 4 rows each, in two layers.
    assert verifying.bytes - plain.bytes == 2 * 64 * 2 * SHAPE.hidden_bytes
