"""Requests over HTTP: what is sent, what is read, and in which order a trace goes out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from benchmark.harness.client import Client, RequestFailed
from benchmark.harness.driver import Pace, Run, drive
from benchmark.harness.workload import History, prompt_ids
from sglang_hc.tools.workloads.sessions import Ids, Session, Span, Turn, Workload
from sglang_hc.tree.identity import pack_tokens
from support.waiting import HANGS_S

Start = Callable[..., Any]


def turn(*ids: int, answer: int = 4, **times: float) -> Turn:
    return Turn((Ids(pack_tokens(ids)),), Span(0, answer), **times)


def chat(sessions: int = 3, turns: int = 3) -> Workload:
    """Session `s` begins with the id 900 + s."""

    def talk(s: int) -> Session:
        first, *others = (range(10 * s + t, 10 * s + t + 5) for t in range(turns))
        return Session(0.0, (turn(900 + s, *first), *(turn(*ids) for ids in others)))

    return Workload("test", tuple(map(talk, range(sessions))))


def send(url: str, workload: Workload, pace: Pace | None = None) -> Run:
    async def work() -> Run:
        async with Client(url, 20.0) as client:
            return await drive(client, workload, pace or Pace())

    return asyncio.run(work())


@pytest.mark.parametrize("incremental", [False, True])
def test_every_prompt_is_the_exact_history(fake_server: Start, incremental: bool) -> None:
    fake = fake_server(incremental=incremental)
    trace = chat()
    run = send(fake.url, trace)
    assert len(run.measured) == 9 and not run.failed
    prompts = {tuple(body["input_ids"]) for body in fake.paths("/generate")}
    for index in range(3):
        outputs = [run.outputs()[index, number].reply.ids for number in range(3)]
        for number in range(3):
            prompt = prompt_ids(trace.sessions[index], number, outputs)
            assert tuple(prompt) in prompts
            assert outputs[number] == fake.reply_ids(prompt, 4)
    body = fake.paths("/generate")[0]
    assert body["sampling_params"] == {
        "temperature": 0,
        "max_new_tokens": 4,
        "ignore_eos": True,
    }


def test_hits_tokens_and_times_are_read(fake_server: Start) -> None:
    run = send(fake_server().url, chat(1))
    second = run.records[1].reply
    assert second.prompt_tokens == 1 + 5 + 4 + 5
    assert second.hits == {"device": 5, "host": 5}
    assert (second.tokens, len(second.itl_s)) == (4, 3)
    assert 0 < second.ttft_s <= second.latency_s
    assert run.records[0].reply.hits == {}
    assert run.duration_s >= second.latency_s


def test_the_round_barrier_holds_all_sessions(fake_server: Start) -> None:
    fake = fake_server()
    run = send(fake.url, chat(), Pace(max_parallel=1, round_barrier=True))
    order = [(record.turn, record.session) for record in run.records]
    assert order == sorted(order)
    sent = [body["input_ids"][0] for body in fake.paths("/generate")]
    assert sent == [900, 901, 902] * 3


def test_max_parallel_runs_sessions_one_after_the_other(fake_server: Start) -> None:
    fake = fake_server()
    send(fake.url, chat(), Pace(max_parallel=1))
    sent = [body["input_ids"][0] for body in fake.paths("/generate")]
    assert sent == [900] * 3 + [901] * 3 + [902] * 3


def test_times_of_the_trace_are_waited_for(fake_server: Start) -> None:
    turns = (turn(1, answer=1, at=0.02), turn(2, answer=1, think=0.06))
    trace = Workload("t", (Session(0.02, turns), Session(0.0, (turn(3, answer=1),))))
    run = send(fake_server().url, trace, Pace(time_scale=2.0))
    starts = {(r.session, r.turn): r for r in run.records}
    assert starts[1, 0].start_s < starts[0, 0].start_s
    early = 0.002  # the timers of an event loop may count whole milliseconds
    assert starts[0, 0].start_s >= 0.04 - early
    first = starts[0, 0]
    assert starts[0, 1].start_s - (first.start_s + first.reply.latency_s) >= 0.1 - early


def test_a_refusal_ends_the_session_but_not_the_run(fake_server: Start) -> None:
    run = send(fake_server(status=400).url, chat(2, 2))
    assert len(run.failed) == 4 and not run.measured
    assert "HTTP 400" in run.failed[0].error
    assert {record.error.split(":")[0] for record in run.failed if record.turn} == {"not sent"}
    assert run.duration_s == 0


def test_a_broken_stream_is_a_failure(fake_server: Start) -> None:
    run = send(fake_server(break_stream=True).url, chat(1, 1))
    assert "the fake broke" in run.failed[0].error


def test_nobody_listens() -> None:
    run = send("http://127.0.0.1:9", chat(1, 1))
    assert "Connect" in run.failed[0].error


def test_flush_is_reported(fake_server: Start) -> None:
    async def flush(url: str) -> bool:
        async with Client(url, HANGS_S) as client:
            return await client.flush_cache()

    assert asyncio.run(flush(fake_server().url)) is True
    assert asyncio.run(flush(fake_server(can_flush=False).url)) is False


def test_a_request_timeout_is_a_failure(fake_server: Start) -> None:
    fake = fake_server()

    async def ask() -> None:
        async with Client(fake.url, 1e-4) as client:
            await client.ask(History(Session(0.0, ())), 4)

    with pytest.raises(RequestFailed):
        asyncio.run(ask())


def test_a_window_measures_what_ends_in_it_and_gives_up_the_rest(fake_server: Start) -> None:
    """Four of seven users talk at once; nothing counts before each of them has an answer, or after
    one of them has nothing left to ask."""
    run = send(fake_server().url, chat(7, 3), Pace(4, window_s=60.0))
    assert not run.failed and len(run.records) <= 7 * 3
    ends = {(r.session, r.turn): r.start_s + r.reply.latency_s for r in run.records}
    begin = max(ends[session, 0] for session in range(4))
    assert run.measured and run.window is not None and run.window.seconds < 60
    for record in run.measured:
        assert begin <= ends[record.session, record.turn] <= begin + run.window.seconds + 0.01
    assert run.duration_s == run.window.seconds
    came = run.window.tokens
    assert 0 < came < sum(record.reply.tokens for record in run.records)
    cut = send(fake_server().url, chat(400, 3), Pace(4, window_s=0.05))
    assert cut.duration_s == pytest.approx(0.05) and len(cut.records) < 1200
