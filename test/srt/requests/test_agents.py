"""What agents' fields become, and which values are refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_hc.policy.soft_retention import MAX_RETAIN_S
from sglang_hc.srt.requests import agents, entrance
from sglang_hc.srt.requests.agents import MOST_RETAINS, Retain, of_body, read_retains, retains_of
from sglang_hc.srt.requests.breakpoints import (
    MOST_BREAKPOINTS,
    Breakpoint,
    breakpoints_of,
    furthest,
)
from support.json_values import json_values

FIVE = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def hints(*actions: Any, version: str = "1.0") -> dict[str, Any]:
    made = [
        {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}
        for kind, payload in actions
    ]
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": made}}


def retain(**directive: Any) -> dict[str, Any]:
    return hints(("kv.retain", {"scope": None, "directives": [directive]}))


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, []),
        ({"prompt_cache_retention": "in_memory"}, [Retain(300)]),
        ({"prompt_cache_retention": "24h"}, [Retain(MAX_RETAIN_S)]),
        ({"prompt_cache_retention": None, "cache_control": None, "nvext": None}, []),
        ({"cache_control": FIVE}, [Retain(300)]),
        ({"cache_control": HOUR}, [Retain(3600)]),
        ({"nvext": {"cache_control": FIVE, "annotations": ["x"]}}, [Retain(300)]),
        ({"nvext": {"cache_control": FIVE | {"ttl": "90s"}}}, [Retain(90)]),
        ({"nvext": {"cache_control": FIVE | {"ttl": 45}}}, [Retain(45)]),
        ({"nvext": {"cache_control": FIVE | {"ttl": "2h"}}}, [Retain(MAX_RETAIN_S)]),
        ({"nvext": {"agent_hints": {"priority": 5, "osl": 9}}}, []),
        ({"nvext": {"agent_hints": {"total_requests": 10, "iat": 2500}}}, [Retain(25)]),
        (retain(priority=40, end=128, duration=60), [Retain(60, 40, 128)]),
        (retain(priority=100, covers_output=True), [Retain(MAX_RETAIN_S)]),
        (retain(priority=1, duration=86400), [Retain(MAX_RETAIN_S, 1)]),
        (retain(priority=0), []),
        (hints(("kv.demote", {})), [Retain(MAX_RETAIN_S, 0)]),
        (hints(("kv.demote", {"session": "of somebody"}), ("kv.fetch", {"x": 1})), []),
        (hints(("kv.retain", {"anything": 1}), version="2.0"), []),
        ({"kv_hints": [None]}, []),
    ],
)
def test_what_a_field_becomes(body: Any, wanted: list[Retain]) -> None:
    assert of_body(body) == wanted


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"prompt_cache_retention": "48h"}, "prompt_cache_retention must be"),
        ({"prompt_cache_retention": 24}, "prompt_cache_retention must be"),
        ({"cache_control": "ephemeral"}, "cache_control must be an object"),
        ({"cache_control": {"type": "persistent"}}, "cache_control must be an object"),
        ({"cache_control": FIVE | {"ttl": "2h"}}, 'cache_control.ttl must be "5m" or "1h"'),
        ({"cache_control": FIVE | {"ttl": {}}}, "cache_control.ttl must be"),
        ({"nvext": "x"}, "nvext"),
        ({"nvext": {"cache_control": FIVE | {"ttl": "0s"}}}, "nvext.cache_control.ttl must be"),
        ({"nvext": {"cache_control": FIVE | {"ttl": True}}}, "nvext.cache_control.ttl must be"),
        ({"nvext": {"cache_control": FIVE | {"ttl": float("nan")}}}, "nvext.cache_control.ttl"),
        ({"nvext": {"agent_hints": {"iat": "soon"}}}, "nvext"),
        ({"nvext": {"agent_hints": [1]}}, "nvext"),
        ({"kv_hints": "x"}, "kv_hints"),
        ({"kv_hints": {"protocol_version": "0.1"}}, "kv_hints"),
        (retain(priority=101), "kv_hints: kv.retain"),
        (retain(priority=5, end=4, start=4), "kv_hints: kv.retain: end must be greater"),
        (retain(priority=5, duration=-1), "kv_hints: kv.retain"),
        (retain(priority=5, block=1), "kv_hints: kv.retain"),
        (hints(("kv.retain", {})), "kv_hints: kv.retain"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(body: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part.replace(".", r"\.")):
        of_body(body)


def test_both_sides_of_the_longest_and_the_most() -> None:
    longest = {"ttl_s": MAX_RETAIN_S, "priority": 100, "tokens": 1, "session": "s" * 256}
    assert read_retains(longest) == [Retain(MAX_RETAIN_S, 100, 1, "s" * 256)]
    for wrong in (
        *({"ttl_s": MAX_RETAIN_S + 1}, {"ttl_s": 0}, {"priority": 101}, {"priority": -1}),
        *({"tokens": 0}, {"session": "s" * 257}, {"session": ""}, {"for": "ever"}),
    ):
        with pytest.raises(ValueError, match="hc_retain"):
            read_retains(longest | wrong)
    text = json.dumps(longest)
    assert len(read_retains([text] * MOST_RETAINS)) == MOST_RETAINS
    with pytest.raises(ValueError, match="hc_retain has 17"):
        read_retains([text] * (MOST_RETAINS + 1))
    for wrong_list in ([longest], ["x"], ["5"], [5]):
        with pytest.raises(ValueError, match="hc_retain"):
            read_retains(wrong_list)
    each = [("kv.demote", {})] * MOST_RETAINS
    assert len(of_body(hints(*each))) == MOST_RETAINS
    with pytest.raises(ValueError, match="kv_hints"):
        of_body(hints(*each, each[0]))
    many = {"directives": [{"priority": 1}] * 9}
    with pytest.raises(ValueError, match="kv_hints has more than 16"):
        of_body(hints(("kv.retain", many), ("kv.retain", many)))


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents], **more}


def block(control: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": "x"} | ({} if control is None else {"cache_control": control})


def test_breakpoints_have_places_and_the_last_of_each_time_counts() -> None:
    body = chat(
        "plain", [block(), block(FIVE)], [block(HOUR), block(FIVE)],
        system=[block(HOUR)], tools=[{"name": "f"}],
    )  # fmt: skip
    points = breakpoints_of(body)
    assert points == [
        Breakpoint(-1, -1, 3600), Breakpoint(1, 1, 300), Breakpoint(2, 0, 3600),
        Breakpoint(2, 1, 300),
    ]  # fmt: skip
    assert furthest(points) == points[2:]
    assert furthest(points[:2]) == points[:2]
    assert furthest([]) == [] and breakpoints_of({"messages": "x", "system": 5}) == []
    result = {"type": "tool_result", "content": [block(HOUR)]}
    assert breakpoints_of(chat([result])) == [Breakpoint(0, 0, 3600)]


def test_a_wrong_breakpoint_is_refused_by_its_place() -> None:
    with pytest.raises(ValueError, match=r"messages\.1\.content\.0\.cache_control\.ttl"):
        breakpoints_of(chat("a", [block({"type": "ephemeral", "ttl": "3m"})]))
    with pytest.raises(ValueError, match=r"tools\.0\.cache_control must be"):
        breakpoints_of(chat("a", tools=[{"cache_control": 5}]))
    most = [block(FIVE)] * MOST_BREAKPOINTS
    assert len(breakpoints_of(chat(most))) == MOST_BREAKPOINTS
    with pytest.raises(ValueError, match="cache_control: 5 blocks have one; at most 4 may"):
        breakpoints_of(chat([*most, block(FIVE)]))


NAMES = ("kv_hints", "nvext", "cache_control", "prompt_cache_retention", "system", "messages")


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(NAMES), json_values(st.text(max_size=9)), max_size=3))
def test_a_body_is_read_or_refused(body: dict[str, Any]) -> None:
    for read in (of_body, breakpoints_of):
        try:
            read(body)
        except ValueError as error:
            assert any(name in str(error) for name in NAMES)


@given(json_values(st.text(max_size=9)))
def test_what_a_client_wrote_in_its_custom_params_is_read_or_left_out(value: Any) -> None:
    req = SimpleNamespace(sampling_params=SimpleNamespace(custom_params={"hc_retain": value}))
    assert all(0 < one.ttl_s <= MAX_RETAIN_S for one in retains_of(req))


class Sent:
    """SGLang's HTTP request, whose body FastAPI has parsed."""

    def __init__(self, body: Any) -> None:
        self._json = body


@pytest.mark.parametrize("sampling", [None, {}, {"custom_params": {"x": 1}}])
def test_fields_go_with_the_request(sampling: Any) -> None:
    made = GenerateReqInput(input_ids=[1], sampling_params=sampling)
    agents.take_fields(made, Sent({"prompt_cache_retention": "24h"}))
    custom = made.sampling_params["custom_params"]
    assert read_retains(custom["hc_retain"]) == [Retain(MAX_RETAIN_S)]
    assert custom.get("x") == (sampling or {}).get("custom_params", {}).get("x")
    entrance.check_fields(made)


def test_what_a_client_writes_itself_stays_beside_it_in_each_request_of_a_batch() -> None:
    own = {"custom_params": {"hc_retain": {"ttl_s": 5}}}
    batch = GenerateReqInput(input_ids=[[1], [2]], sampling_params=[own, {}])
    agents.take_fields(batch, Sent({"cache_control": FIVE}))
    found = [read_retains(one["custom_params"]["hc_retain"]) for one in batch.sampling_params]
    assert found == [[Retain(5), Retain(300)], [Retain(300)]]
    assert own == {"custom_params": {"hc_retain": {"ttl_s": 5}}}, "the client's own is left alone"


@pytest.mark.parametrize("request_", [None, SimpleNamespace(), Sent([1]), Sent("x"), Sent({})])
def test_a_request_without_such_fields_is_left_alone(request_: Any) -> None:
    made = GenerateReqInput(input_ids=[1], sampling_params={"temperature": 0})
    agents.take_fields(made, request_)
    assert made.sampling_params == {"temperature": 0}


def test_an_engines_hints_count_too() -> None:
    made = GenerateReqInput(input_ids=[1], **retain(priority=7, duration=9))
    agents.take_fields(made, None)
    assert read_retains(made.sampling_params["custom_params"]["hc_retain"]) == [Retain(9, 7)]
