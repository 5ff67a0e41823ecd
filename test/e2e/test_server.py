"""One real server: what clients, frontend programs and SGLang's own benchmark see of the tiers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import main
from benchmark.harness.server import ServerProcess
from support.core import MODELS
from support.prompts import prompt
from support.scraped import ours, samples
from support.served import ENV, ask, chat, delete, get, message, numbers, post, refusal, start
from support.waiting import HANGS_S, until

pytestmark = pytest.mark.server

POOL = 640
FLOODS = count(1000)


@pytest.fixture(scope="module")
def server(models: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--hc-forms", "hidden", "--enable-metrics", "--enable-cache-report")
    with start(log, *flags, "--hc-open-routes", "--hc-host-size-gb", "0.05") as process:
        yield process


def flood(server: ServerProcess) -> None:
    """Fill the device twice over. No other prompt begins as these do: SGLang takes a node for used
    when a prompt shares one token with it."""
    for seed in islice(FLOODS, 4):
        ask(server, [900 + seed % 100, *prompt(seed, POOL // 2 - 1)], 1)


def test_host_hits_show_in_meta_info_and_server_info(server: ServerProcess) -> None:
    first = ask(server, prompt(1, 200))
    flood(server)
    again = ask(server, prompt(1, 200))
    assert again["output_ids"] == first["output_ids"]
    details = again["meta_info"]["cached_tokens_details"]
    assert (details["device"], details["host"]) == (0, 199)
    shown = numbers(server)
    assert shown["layer_plan"] == "hidden:4"
    assert shown["restored_tokens"] >= 199 and shown["host_blocks"] >= 4


def test_the_same_numbers_are_prometheus_metrics(server: ServerProcess) -> None:
    ask(server, prompt(3, 200))
    others = ("layer_plan", "exactness", "exactness_difference", "slowest_restorations", "weights")
    assert numbers(server)["kept_tokens"] > 0

    def missing() -> dict[str, Any]:
        wanted, found = numbers(server), ours(get(server, "/metrics"))
        return {
            name: value
            for name, value in wanted.items()
            if name not in others and value not in (found.get(name), found.get(f"{name}_total"))
        }

    until(lambda: not missing(), pause=0.5, show=missing)


def test_dashboards_of_sglang_light_up(server: ServerProcess) -> None:
    """Its families have the meaning there that they have with its own HiCache."""
    ask(server, prompt(5, 200))
    flood(server)
    back = ask(server, prompt(5, 200))["meta_info"]["cached_tokens_details"]
    assert back["host"] == 199
    shown = numbers(server)

    def wrong() -> dict[str, Any]:
        found: dict[str, float] = {}
        for name, labels, value in samples(get(server, "/metrics")):
            source = labels.get("cache_source", labels.get("pool", ""))
            key = f"{name}{{{source}}}" if source else name
            found[key] = found.get(key, 0) + value
        wanted = {
            "sglang:load_back_tokens_total{kv}": shown["restored_tokens"],
            "sglang:load_back_bytes_total": shown["restored_bytes"],
            "sglang:load_back_duration_seconds_count": found["sglang_hc_restore_seconds_count"],
            "sglang:hicache_backup_tokens_total{kv}": shown["kept_tokens"],
            "sglang:hicache_host_total_tokens": 64 * shown["host_slots"],
            "sglang:cached_tokens_total{device}": shown.get("prompt_tokens_device", 0),
            "sglang:cached_tokens_total{host}": shown["prompt_tokens_host"],
            "sglang:prompt_tokens_total": sum(
                value for name, value in shown.items() if name.startswith("prompt_tokens_")
            ),
        }
        wanted = {name: value for name, value in wanted.items() if value}
        off = {name: (found.get(name), value) for name, value in wanted.items()}
        off = {name: pair for name, pair in off.items() if pair[0] != pair[1]}
        alive = ("sglang:evicted_tokens_total", "sglang:hicache_host_used_tokens")
        return off | {name: "nothing" for name in alive if not found.get(name)}

    until(lambda: not wrong(), pause=0.5, show=wrong)
    assert shown["slowest_restorations"][0]["tokens"] > 0


def test_a_flush_forgets_both_tiers(server: ServerProcess) -> None:
    ask(server, prompt(2, 200))
    # An answer is out before its pass is over, and until then SGLang refuses.
    post(server, "/flush_cache?timeout=60")
    assert numbers(server)["host_blocks"] == 0
    assert ask(server, prompt(2, 200))["meta_info"]["cached_tokens"] == 0


def test_openai_client(server: ServerProcess) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "Tell me about memory. " * 10}]
    options: Any = {"model": model, "max_tokens": 24, "temperature": 0}
    first = client.chat.completions.create(messages=messages, **options)
    text = first.choices[0].message.content or ""
    parts = client.chat.completions.create(messages=messages, stream=True, **options)
    streamed = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert streamed == text
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And then?"},
    ]
    flood(server)
    restored = numbers(server).get("restored_tokens", 0)
    second = client.chat.completions.create(messages=messages, **options)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= 64
    assert numbers(server)["restored_tokens"] - restored == cached


def pins(server: ServerProcess, salt: str | None = None) -> Any:
    query = "" if salt is None else f"?cache_salt={salt}"
    return get(server, f"/hc/pins{query}")


def test_the_openai_client_pins_a_session(server: ServerProcess) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "Call a tool, please. " * 12}]
    options: Any = {"model": model, "max_tokens": 8, "messages": messages}

    def ask(wish: Any) -> None:
        body = {"custom_params": {"hc_pin": wish}, "cache_salt": "tenant"}
        client.chat.completions.create(**options, extra_body=body)

    began = time.monotonic()
    ask({"session": "s1", "ttl_s": 300})
    shown = pins(server, "tenant")
    took = time.monotonic() - began
    assert [pin["session"] for pin in shown["pins"]] == ["s1"]
    assert 0 < shown["pins"][0]["blocks"] == shown["blocks"] <= shown["max_blocks"]
    assert 300 - took <= shown["pins"][0]["expires_in_s"] <= 300
    assert pins(server)["pins"] == [], "another namespace"
    assert numbers(server)["pins"] == 1
    for wish, part in (
        ({"session": "s1"}, "ttl_s"),
        ({"ttl_s": -1}, "> 0"),
        ({"ttl_s": 99999}, "<= 3600"),
        ({"ttl_s": 5, "for": "ever"}, "`for`"),
        ("s1", "object"),
    ):
        with pytest.raises(openai.BadRequestError, match=part):
            ask(wish)


def test_salt_and_key_are_two_parts_of_a_namespace(server: ServerProcess) -> None:
    """A gateway sets the salt, a client the key; together they do not spell another tenant's."""
    tokens = prompt(123, 200)

    def cached(**parts: Any) -> int:
        body = {"model": "default", "prompt": tokens, "max_tokens": 1, **parts}
        usage = post(server, "/v1/completions", body)["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    assert cached(cache_salt="acme2") == 0
    assert cached(cache_salt="acme2") > 0, "the tenant itself"
    assert cached(cache_salt="acme", extra_key="2") == 0
    assert cached(extra_key="acme2") == 0
    assert cached(extra_key="s5:acme2") == 0
    assert cached(cache_salt="", extra_key="acme2") > 0, "an empty salt is none"
    there = ask(server, tokens, 1, cache_salt="acme2")["meta_info"]["cached_tokens"]
    other = ask(server, tokens, 1, cache_salt="other")["meta_info"]["cached_tokens"]
    assert there > 0 and other == 0, "by whichever entrance"
    status, message = refusal(server, "/v1/completions", {"prompt": tokens, "cache_salt": ["a"]})
    assert status == 400 and "cache_salt must be a string" in message


def test_pins_over_http(server: ServerProcess) -> None:
    tokens = prompt(77, 200)
    wish = {"session": "http", "ttl_s": 3000}
    assert refusal(server, "/hc/pin", {**wish, "input_ids": tokens})[0] == 404
    ask(server, tokens)
    assert post(server, "/hc/pin", {**wish, "input_ids": tokens}) == {**wish, "blocks": 4}
    assert [pin["session"] for pin in pins(server)["pins"]] == ["http"]
    for body, part in (
        ({**wish}, "input_ids or"),
        ({**wish, "input_ids": [10**6]}, "outside 0 to"),
        ({**wish, "input_ids": "1,2"}, "input_ids"),
        ({**wish, "input_ids": tokens, "rid": "r"}, "unknown field `rid`"),
        ({"ttl_s": 3000, "input_ids": tokens}, "session"),
        ({**wish, "ttl_s": "3000", "input_ids": tokens}, "ttl_s"),
        ([1], "object"),
    ):
        status, message = refusal(server, "/hc/pin", body)
        assert status == 400 and part in message
    assert post(server, "/hc/unpin", {"session": "http"}) == {"session": "http"}
    assert refusal(server, "/hc/unpin", {"session": "http"})[0] == 404
    assert pins(server)["pins"] == []


def test_pins_of_one_namespace_are_bounded(server: ServerProcess) -> None:
    most = pins(server)["max_blocks"]
    held = 0
    for number in range(most):
        tokens = prompt(1000 + number, 500)
        ask(server, tokens, 1)
        body = {"session": f"s{number}", "ttl_s": 3600, "input_ids": tokens}
        if held + 8 > most:
            status, message = refusal(server, "/hc/pin", body)
            assert status == 409 and "unpin another session" in message
            break
        held += post(server, "/hc/pin", body)["blocks"]
    else:
        raise AssertionError("nothing was refused")
    for pin in pins(server)["pins"]:
        post(server, "/hc/unpin", {"session": pin["session"]})


def overflow(server: ServerProcess) -> None:
    """More than the host tier holds."""
    for seed in islice(FLOODS, 64 * numbers(server)["host_slots"] // 600 + 1):
        ask(server, [900 + seed % 100, *prompt(seed, 599)], 1)


def test_what_agents_retain_outlives_a_load(server: ServerProcess) -> None:
    """In the fields that they send: what was asked for is there when equal chats have left."""
    five, hour = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    template = 8  # all chats begin with so many equal tokens at most
    post(server, "/flush_cache?timeout=60")
    before = numbers(server)["retained_blocks"]
    assert max(chat(server, 1), message(server, 2)) <= template
    assert numbers(server)["retained_blocks"] == before
    chat(server, 3, prompt_cache_retention="24h")
    whole = numbers(server)["retained_blocks"] - before
    message(server, 4, five)
    part = numbers(server)["retained_blocks"] - before - whole
    assert whole >= 3 and 1 <= part < whole, "what lies before the breakpoint alone"
    system = [{"type": "text", "text": "5 shelves of state. " * 12, "cache_control": hour}]
    message(server, 5, system=system)
    until(lambda: numbers(server)["retained_blocks"] > before + whole + part, pause=0.1)
    overflow(server)
    gone = chat(server, 1), message(server, 2)
    assert max(gone) <= template, "a load pushes out what nobody retains"
    assert chat(server, 3) >= 128
    assert message(server, 4) >= 64 * part and message(server, 5, system=system) >= 64

    held = numbers(server)["retained_blocks"]
    chat(server, 6, nvext={"cache_control": {"type": "ephemeral", "ttl": "1s"}})
    until(lambda: numbers(server)["retained_blocks"] <= held, pause=0.2)
    overflow(server)
    assert chat(server, 6) <= template < 128 <= chat(server, 3), "its time is over"
    assert numbers(server)["retentions"] >= 4


def test_wrong_fields_of_agents_are_refused_by_name(server: ServerProcess) -> None:
    text = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    block = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "2h"}}
    for path, fields, part in (
        ("/v1/chat/completions", {"prompt_cache_retention": "1w"}, "prompt_cache_retention"),
        ("/v1/chat/completions", {"nvext": {"cache_control": 5}}, "nvext.cache_control"),
        ("/v1/chat/completions", {"kv_hints": {"message_id": 5}}, "kv_hints"),
        ("/v1/messages", {"cache_control": {"type": "for ever"}}, "cache_control must be"),
        ("/v1/messages", {"system": [block]}, "system.0.cache_control.ttl"),
    ):
        status, reply = refusal(server, path, text | fields)
        assert status == 400 and part in reply


def test_a_salt_counts_on_every_route(server: ServerProcess) -> None:
    """Anthropic's and Ollama's have no field for one: tenants of a gateway shared their state."""
    message(server, 8, cache_salt="acme")
    assert message(server, 8, cache_salt="other") == 0
    assert message(server, 8, cache_salt="acme") >= 64
    said = [{"role": "user", "content": "9 barrels of state. " * 24}]
    body = {"model": "m", "messages": said, "stream": False, "options": {"num_predict": 2}}
    post(server, "/api/chat", body | {"cache_salt": "ollama"})
    assert delete(server, "/hc/state", {"cache_salt": "ollama"})["device"]["tokens"] >= 64
    wrong = {"model": "m", "max_tokens": 2, "messages": said, "cache_salt": ["acme"]}
    status, reply = refusal(server, "/v1/messages", wrong)
    assert status == 400 and "cache_salt must be a string" in reply


def test_a_session_is_kept_fetched_demoted_and_forgotten_by_its_name(server: ServerProcess) -> None:
    chat(server, 7, session_id="s7", cache_salt="acme")
    named = {"session": "s7", "cache_salt": "acme"}
    assert refusal(server, "/hc/retain", {"session": "s7", "ttl_s": 60})[0] == 404, (
        "not whose it is"
    )
    kept = post(server, "/hc/retain", named | {"ttl_s": 600})
    assert kept["blocks"] >= 2
    assert post(server, "/hc/prefetch", named) == {"session": "s7"}
    flood(server)
    assert chat(server, 7, cache_salt="acme") >= 128
    assert post(server, "/hc/demote", named)["blocks"] == kept["blocks"]
    assert delete(server, "/hc/state", named)["complete"]
    assert chat(server, 7, cache_salt="acme") == 0
    assert refusal(server, "/hc/demote", named)[0] == 404


def test_frontend_program(server: ServerProcess) -> None:
    import sglang as sgl

    @sgl.function
    def program(s: Any) -> None:
        s += "A conversation about caches. " * 8
        s += "Question: what is kept? Answer:" + sgl.gen("one", max_tokens=12, temperature=0)
        branches = s.fork(2)
        for index in range(2):
            branches[index] += f" Tip {index}:" + sgl.gen("tip", max_tokens=8, temperature=0)
        s += "".join(branch["tip"] for branch in branches)
        s += " Keep it? " + sgl.select("choice", choices=["yes", "no"])
        s += " Next:" + sgl.gen("two", max_tokens=12, temperature=0)

    sgl.set_default_backend(sgl.RuntimeEndpoint(server.url))
    states = []
    for _ in range(2):
        states.append(program.run())
        flood(server)
    assert all(state["choice"] in ("yes", "no") for state in states)
    assert states[0]["one"] and states[0]["two"]
    assert states[0].text() == states[1].text()


def test_sglangs_own_benchmark_with_shared_prefixes(server: ServerProcess, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [
        sys.executable, "-m", "sglang.benchmark.serving", "--base-url", server.url,
        "--output-file", str(results), "--tokenizer", str(MODELS / "llama-mha"), "--disable-tqdm",
        "--backend", "sglang-oai-chat", "--dataset-name", "generated-shared-prefix",
        "--gsp-num-groups", "2", "--gsp-prompts-per-group", "2", "--gsp-system-prompt-len", "48",
        "--gsp-question-len", "16", "--gsp-output-len", "8", "--gsp-num-turns", "3",
        "--max-concurrency", "2",
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, **ENV, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(results.read_text().splitlines()[-1])["completed"] >= 4


def test_our_benchmark_replays_a_mooncake_trace(server: ServerProcess, tmp_path: Path) -> None:
    """Three prompts of 300 tokens, then the same three again."""
    mooncake = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 40 * i, "input_length": 300, "output_length": 6, "hash_ids": [i % 3]}
        for i in range(6)
    ]
    mooncake.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["multi-turn", "--base-url", server.url, "--model", str(MODELS / "llama-mha")]
    words += ["--dataset", str(mooncake), "--max-parallel", "1", "--repeat", "1"]
    assert main([*words, "--warmup", "1", "--output", str(tmp_path / "out")]) == 0
    run = json.loads((tmp_path / "out" / "result.json").read_text())["runs"][0]
    assert run["summary"]["total_requests"] == 6
    # The second half asks for the prompts of the first again, after the pool had overflowed.
    assert run["summary"]["hits"]["host"] >= 3 * 256
    assert run["flushed"]


def test_disabled_it_is_plain_sglang(models: None, tmp_path: Path) -> None:
    with start(tmp_path / "log", "--hc-disable", "--enable-cache-report") as plain:
        first = ask(plain, prompt(1, 200))
        flood(plain)
        again = ask(plain, prompt(1, 200))
        state = get(plain, "/server_info")["internal_states"][0]
    assert again["output_ids"] == first["output_ids"]
    assert again["meta_info"]["cached_tokens"] == 0
    assert "hc" not in state
