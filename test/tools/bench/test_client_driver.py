"""Requests over HTTP: what is sent, what is read, and in which order a trace goes out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from benchmark.harness.client import Client, History, Reply, RequestFailed, make_api
from benchmark.harness.driver import Pace, Run, drive
from benchmark.harness.workload import Session, Trace, Turn
from sglang_hc.tools.cli.main import UsageError
from support.waiting import HANGS_S

Start = Callable[..., Any]


def chat(sessions: int = 3, turns: int = 3) -> Trace:
    return Trace(
        "test",
        tuple(
            Session(
                f"s{s}",
                tuple(
                    Turn(tuple(range(10 * s + t, 10 * s + t + 5)), 4, text=f"say {s} {t}.")
                    for t in range(turns)
                ),
                system_ids=(900 + s,),
                system_text="be kind. ",
            )
            for s in range(sessions)
        ),
    )


def send(url: str, trace: Trace, pace: Pace | None = None, api: str = "generate") -> Run:
    async def work() -> Run:
        async with Client(url, make_api(api, "fake-model"), 20.0) as client:
            return await drive(client, trace, pace or Pace())

    return asyncio.run(work())


@pytest.mark.parametrize("incremental", [False, True])
def test_every_prompt_is_the_exact_history(fake_server: Start, incremental: bool) -> None:
    fake = fake_server(incremental=incremental)
    trace = chat()
    run = send(fake.url, trace)
    assert len(run.measured) == 9 and not run.failed
    prompts = {tuple(body["input_ids"]) for body in fake.paths("/generate")}
    for index in range(3):
        outputs = [run.outputs()[index, turn].reply.ids for turn in range(3)]
        for turn in range(3):
            prompt = trace.prompt_ids(index, turn, outputs)
            assert tuple(prompt) in prompts
            assert outputs[turn] == fake.reply_ids(prompt, 4)
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
    turns = (Turn((1,), 1, at_s=0.02), Turn((2,), 1, think_s=0.06))
    trace = Trace("t", (Session("a", turns, arrival_s=0.02), Session("b", (Turn((3,), 1),))))
    run = send(fake_server().url, trace, Pace(time_scale=2.0))
    starts = {(r.session, r.turn): r for r in run.records}
    assert starts[1, 0].start_s < starts[0, 0].start_s
    early = 0.002  # the timers of an event loop may count whole milliseconds
    assert starts[0, 0].start_s >= 0.04 - early
    first = starts[0, 0]
    assert starts[0, 1].start_s - (first.start_s + first.reply.latency_s) >= 0.1 - early


def test_chat_sends_messages_and_reads_usage(fake_server: Start) -> None:
    fake = fake_server()
    run = send(fake.url, chat(1, 2), api="chat")
    messages = fake.paths("/v1/chat/completions")[1]["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == " w0 w1 w2 w3"
    reply = run.records[1].reply
    assert (reply.tokens, reply.prompt_tokens, reply.hits) == (4, 40, {"cached": 8})


def test_completions_sends_the_whole_text(fake_server: Start) -> None:
    fake = fake_server()
    send(fake.url, chat(1, 2), api="completions")
    prompt = fake.paths("/v1/completions")[1]["prompt"]
    assert prompt == "be kind. say 0 0. w0 w1 w2 w3say 0 1."


def test_a_refusal_ends_the_session_but_not_the_run(fake_server: Start) -> None:
    run = send(fake_server(status=400).url, chat(2, 2))
    assert len(run.failed) == 4 and not run.measured
    assert "HTTP 400" in run.failed[0].error
    assert {record.error.split(":")[0] for record in run.failed if record.turn} == {"not sent"}
    assert run.duration_s == 0


@pytest.mark.parametrize("api", ["generate", "chat"])
def test_a_broken_stream_is_a_failure(fake_server: Start, api: str) -> None:
    fake = fake_server(break_stream=True)
    run = send(fake.url, chat(1, 1), api=api)
    if api == "generate":
        assert "the fake broke" in run.failed[0].error
    else:
        assert run.records[0].reply.tokens < 4


def test_nobody_listens() -> None:
    run = send("http://127.0.0.1:9", chat(1, 1))
    assert "Connect" in run.failed[0].error


def test_logprobs_of_two_candidates(fake_server: Start) -> None:
    fake = fake_server(margin=0.25)
    prompt = [1, 2, 3]
    (best,) = fake.reply_ids(prompt, 1)

    async def ask() -> dict[int, float]:
        async with Client(fake.url, make_api("generate", ""), HANGS_S) as client:
            return await client.logprobs(prompt, [best, 5])

    assert asyncio.run(ask()) == {best: 0.0, 5: -0.25}


def test_flush_is_reported(fake_server: Start) -> None:
    async def flush(url: str) -> bool:
        async with Client(url, make_api("generate", ""), HANGS_S) as client:
            return await client.flush_cache()

    assert asyncio.run(flush(fake_server().url)) is True
    assert asyncio.run(flush(fake_server(can_flush=False).url)) is False


def test_history_of_a_whole_prompt_forgets() -> None:
    history = History(Session("s", (), system_ids=(1,)))
    history.ask(Turn((2,), 1))
    history.answer(Reply(ids=[3]))
    history.ask(Turn((9,), 1, whole=True))
    assert history.ids == [9]


def test_unknown_api() -> None:
    with pytest.raises(UsageError, match="--api"):
        make_api("grpc", "")


def test_a_request_timeout_is_a_failure(fake_server: Start) -> None:
    fake = fake_server()

    async def ask() -> None:
        async with Client(fake.url, make_api("generate", ""), 1e-4) as client:
            await client.ask(History(Session("s", ())), 4)

    with pytest.raises(RequestFailed):
        asyncio.run(ask())
