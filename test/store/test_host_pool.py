"""Bytes of the host tier: rows where the layout says, executed in order, failures reported."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.store import executor as executor_module
from sglang_hc.store.executor import (
    Completion,
    CopyRows,
    RowSpan,
    ScatterRows,
    ThreadExecutor,
    perform,
    shares,
)
from sglang_hc.store.host_pool import HostPool
from support.waiting import HANGS_S

LAYOUT = BlockLayout(LayerPlan(1, 2, 3), StateShape(6, 5, (3, 2), "uint8"))


def snapshot(rows: int) -> np.ndarray:
    return np.zeros((LAYOUT.plan.hidden, rows, LAYOUT.shape.hidden_bytes), dtype=np.uint8)


def numbered(pool: HostPool) -> None:
    """Every row of every view holds a value of its own."""
    for number, view in enumerate((pool.hidden, *pool.kv)):
        size = view.size // view.shape[-1]
        values = (np.arange(size) * 7 + number * 31).astype(np.uint8)
        view[...] = values.reshape(view.shape[:-1])[..., None]


def test_rows_lie_in_the_chunk_of_their_layer() -> None:
    pool = HostPool(LAYOUT, 3)
    numbered(pool)
    for layer, offset, _ in LAYOUT.chunks():
        chunk = pool.slot(2)[offset:]
        if layer in LAYOUT.plan.hidden_layers:
            rows = pool.hidden[2, layer - 1]
            assert np.array_equal(chunk[: rows.size].reshape(rows.shape), rows)
        else:
            keys, values = (part[2, layer - 3] for part in pool.kv)
            assert np.array_equal(chunk[: keys.size].reshape(keys.shape), keys)
            rest = chunk[keys.size : keys.size + values.size]
            assert np.array_equal(rest.reshape(values.shape), values)


def test_a_copy_takes_the_first_hidden_rows_of_every_layer_and_no_more() -> None:
    pool = HostPool(LAYOUT, 3)
    numbered(pool)
    before = pool.bytes.copy()
    pool.copy_rows(0, 2, 10)
    assert np.array_equal(pool.hidden[2, :, :10], pool.hidden[0, :, :10])
    for view in pool.kv:  # rows of KV may be on their way there already
        assert not np.array_equal(view[2, :, :10], view[0, :, :10])
    pool.slot(2)[:] = before[2]
    assert np.array_equal(pool.bytes, before), "another slot was touched"


def test_the_executor_files_rows_in_order_and_says_when() -> None:
    pool = HostPool(LAYOUT, 2)
    buffers = [snapshot(8)]
    buffers[0][:] = np.arange(8, dtype=np.uint8)[None, :, None]
    executor = ThreadExecutor(pool, buffers)
    spans = (RowSpan(2, 0, 60, 4), RowSpan(6, 1, 0, 2))
    executor.submit(70, ScatterRows(0, spans))
    executor.submit(7, CopyRows(0, 1, BLOCK_TOKENS))
    assert executor.drain() == [Completion(70, True), Completion(7, True)]
    for slot in (0, 1):  # the copy came after the second span, and covers it
        assert pool.hidden[slot, 1, 60:, 0].tolist() == [2, 3, 4, 5]
        assert pool.hidden[slot, 0, :2, 0].tolist() == [0, 0]
    assert not pool.kv[0].any()
    assert executor.poll() == []
    executor.close()


def test_a_failed_operation_is_reported_and_the_next_one_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = ThreadExecutor(HostPool(LAYOUT, 2), [])
    executor.submit(1, CopyRows(0, 99, 1))
    executor.submit(2, CopyRows(0, 1, 1))
    assert executor.drain() == [Completion(1, False), Completion(2, True)]
    assert "its blocks are not kept" in caplog.text
    executor.close()


@given(
    spans=st.lists(
        st.tuples(st.integers(0, 63), st.integers(0, 4), st.integers(0, 63), st.integers(1, 64)),
        max_size=40,
    ),
    threads=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_threads_that_share_a_snapshot_leave_what_one_leaves(
    spans: list[tuple[int, int, int, int]], threads: int
) -> None:
    """Spans may write the same rows: the last one holds. No share is too small to be given away."""
    cut = tuple(RowSpan(s, slot, t, min(n, 64 - s, 64 - t)) for s, slot, t, n in spans)
    buffers = [snapshot(64)]
    buffers[0][:] = np.random.default_rng(3).integers(0, 256, buffers[0].shape, dtype=np.uint8)
    alone, shared = HostPool(LAYOUT, 5), HostPool(LAYOUT, 5)
    perform(ScatterRows(0, cut), alone, buffers)
    with mock.patch.object(executor_module, "_SHARE_BYTES", 1):
        executor = ThreadExecutor(shared, buffers, threads=threads)
        executor.submit(1, ScatterRows(0, cut))
        assert executor.drain() == [Completion(1, True)]
        executor.close()
    assert np.array_equal(shared.bytes, alone.bytes)
    parts = shares(cut, threads)
    assert len(parts) <= threads and sorted(s for p in parts for s in p) == sorted(cut)


def test_a_share_that_fails_fails_the_operation_after_all_are_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    buffers = [snapshot(8)]
    with mock.patch.object(executor_module, "_SHARE_BYTES", 1):
        executor = ThreadExecutor(HostPool(LAYOUT, 2), buffers, threads=2)
        executor.submit(1, ScatterRows(0, (RowSpan(0, 0, 0, 4), RowSpan(4, 99, 0, 4))))
        executor.submit(2, CopyRows(0, 1, 1))
        assert executor.drain() == [Completion(1, False), Completion(2, True)]
        executor.close()


def test_a_share_that_nobody_takes_fails_the_operation_after_the_others_are_over() -> None:
    """No thread could be started for the second share: the first one still read the snapshot, which
    was said to be free."""
    buffers = [snapshot(12)]
    began, goes_on = threading.Event(), threading.Event()
    scatter = executor_module._scatter

    def slow(*work: Any) -> None:
        began.set()
        assert goes_on.wait(HANGS_S)
        scatter(*work)

    with mock.patch.object(executor_module, "_SHARE_BYTES", 1):
        executor = ThreadExecutor(HostPool(LAYOUT, 3), buffers, threads=3)
        assert executor._helpers is not None
        submit, submitted = executor._helpers.submit, []

        def no_second(*work: Any) -> Any:
            submitted.append(work)
            if len(submitted) == 2:
                raise RuntimeError("can't start new thread")
            return submit(slow, *work[1:])

        with mock.patch.object(executor._helpers, "submit", no_second):
            executor.submit(1, ScatterRows(0, tuple(RowSpan(4 * n, n, 0, 4) for n in range(3))))
            assert began.wait(HANGS_S)
            time.sleep(0.05)
            assert executor.poll() == []
            goes_on.set()
            assert executor.drain() == [Completion(1, False)]
        executor.close()
