"""Comparison of outputs, and numbers from records written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmark.harness import metrics
from benchmark.harness.client import Reply
from benchmark.harness.compare import compare
from benchmark.harness.driver import Record, Run
from benchmark.harness.points import Cell
from sglang_hc.tools.workloads.sessions import Ids, Session, Span, Turn, Workload
from sglang_hc.tree.identity import pack_tokens


def record(session: int, turn: int, ids: list[int], ttft: float = 0.1, **fields: Any) -> Record:
    reply = Reply(
        ids=ids,
        tokens=len(ids),
        prompt_tokens=fields.pop("prompt", 10),
        hits=fields.pop("hits", {}),
        ttft_s=ttft,
        latency_s=ttft + 0.02 * (len(ids) - 1),
        itl_s=[0.02] * (len(ids) - 1),
    )
    values = {"measured": True, "label": "", "start_s": float(turn)}
    return Record(session, turn, reply=reply, **{**values, **fields})


def cell(arm: str, *records: Record, point: str = "p", repeat: int = 0) -> Cell:
    return Cell(arm, point, repeat, Run(list(records)), 0.0, True)


TRACE = Workload(
    "test",
    (
        Session(
            0.0,
            tuple(Turn((Ids(pack_tokens(said)),), Span(0, 3)) for said in ([0, 1, 2], [3], [4])),
        ),
    ),
)


def test_the_first_difference_of_a_session_is_listed_with_its_prompt() -> None:
    stock = [record(0, 0, [7, 8, 9]), record(0, 1, [1, 2, 3]), record(0, 2, [4, 5, 6])]
    hidden = [record(0, 0, [7, 8, 9]), record(0, 1, [1, 0, 3]), record(0, 2, [9, 9, 9])]
    (agreement,) = compare(
        [cell("stock", *stock), cell("hidden", *hidden)], "stock", lambda *_: TRACE
    )
    (item,) = agreement.disagreements
    assert (agreement.compared, agreement.equal, agreement.after) == (2, 1, 1)
    assert (item.turn, item.position, item.reference_token, item.arm_token) == (1, 1, 2, 0)
    assert item.prompt == [0, 1, 2, 7, 8, 9, 3, 1]
    assert agreement.verdict == "1 of 2 differ, 1 unexplained"
    assert item.to_json()["prompt_len"] == 8


def test_a_short_reply_differs_where_it_ends() -> None:
    cells = [cell("stock", record(0, 0, [7, 8])), cell("kv", record(0, 0, [7]))]
    (agreement,) = compare(cells, "stock", lambda *_: TRACE)
    (item,) = agreement.disagreements
    assert (item.position, item.reference_token, item.arm_token) == (1, 8, -1)


def test_replies_without_ids_are_not_compared() -> None:
    cells = [cell("stock", record(0, 0, [])), cell("kv", record(0, 0, []))]
    (agreement,) = compare(cells, "stock", lambda *_: TRACE)
    assert agreement.verdict == "not compared"


def test_summary_has_the_schema_of_bench_multiturn() -> None:
    run = Run(
        [
            record(0, 0, [1, 2, 3], 0.1, hits={}, prompt=10),
            record(0, 1, [1, 2, 3], 0.3, hits={"device": 4, "host": 6}, prompt=20),
            record(0, 2, [1], 9.0, measured=False),
            record(0, 3, [1], 9.0, error="refused"),
        ]
    )
    total = metrics.summary(run, 2.0)
    for name in ("prompt_len", "output_len", "ttft", "itl", "latency"):
        assert {f"average_{name}", f"p90_{name}", f"p99_{name}"} <= set(total)
    for name in ("ttft", "itl", "latency"):
        assert {f"median_{name}", f"max_{name}"} <= set(total)
    assert total["request_rate"] == 2.0
    assert {"input_token_throughput", "output_token_throughput", "throughput"} <= set(total)
    assert total["total_requests"] == 2 and total["failed"] == 1
    assert total["median_ttft"] == pytest.approx(0.2)
    assert total["cache_hit_rate"] == pytest.approx(10 / 30)
    assert total["hits"] == {"device": 4, "host": 6}
    assert total["median_tbt"] == pytest.approx(0.02)
    assert total["duration"] == pytest.approx(1.34)
    assert total["output_token_throughput"] == pytest.approx(6 / 1.34)


def test_groups_by_turn() -> None:
    run = Run([record(s, t, [1, 2], 0.1 * (t + 1)) for s in range(2) for t in range(3)])
    found = metrics.groups(run, metrics.by_turn)
    assert [(name, part["requests"]) for name, part in found.items()] == [
        ("turn 0", 2),
        ("turn 1", 2),
        ("turn 2", 2),
        ("turns 1+", 4),
    ]
    assert found["turns 1+"]["median_ttft"] == pytest.approx(0.25)


def run_object(arm: str, repeat: int, ttft: float, throughput: float) -> dict[str, Any]:
    return {
        "arm": arm,
        "point": "p",
        "repeat": repeat,
        "groups": {"turn 1": {"median_ttft": ttft}},
        "summary": {"median_tbt": 0.0, "output_token_throughput": throughput},
    }


def test_ratios_are_paired_by_repeat_and_losses_are_said() -> None:
    runs = [
        run_object("stock", 0, 1.0, 100.0),
        run_object("kv", 0, 0.25, 90.0),
        run_object("stock", 1, 2.0, 100.0),
        run_object("kv", 1, 1.0, 80.0),
    ]
    ttft, throughput = metrics.ratio_rows(runs, "stock")
    assert ttft["against"] == "stock"
    assert (ttft["median"], ttft["low"], ttft["high"], ttft["repeats"]) == (3.0, 2.0, 4.0, 2)
    assert throughput["median"] == pytest.approx(0.85)
    (line,) = metrics.losses([ttft, throughput])
    assert line == (
        "kv, p, all: output throughput is 0.85 times as good as stock's (0.80 to 0.90 in 2 repeats)"
    )
