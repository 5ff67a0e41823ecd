"""Which tool a reply calls, in the formats that models write."""

from __future__ import annotations

from types import SimpleNamespace as Fake

import pytest

from sglang_hc.config import HcConfig
from sglang_hc.srt.requests import tools
from sglang_hc.srt.requests.tools import FIELD, MAX_NAMES, called_by, called_in, name_tools

NAMES = ("run", "run_tests", "search")


@pytest.mark.parametrize(
    "reply",
    [
        'I look.\n<tool_call>\n{"name": "run_tests", "arguments": {"path": "search"}}</tool_call>',
        "<tool_call>\n<function=run_tests>\n<parameter=path>\nrun\n</parameter></function>",
        '[TOOL_CALLS] [{"name": "run_tests", "arguments": {}}]',
        "[run_tests(path='.')]",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>run_tests\n{}",
        "<|tool_call_begin|>functions.run_tests:0<|tool_call_argument_begin|>{}",
        "<tool_call>run_tests\n<arg_key>path</arg_key>",
        '{"name": "search", "arguments": {}}\n{"name": "run_tests", "arguments": {}}',
    ],
)
def test_a_call_is_found(reply: str) -> None:
    assert called_in(reply, NAMES) == "run_tests"


@pytest.mark.parametrize("reply", ["", "I could run_tests now.", '{"name": "other"}', "running"])
def test_no_call_is_none(reply: str) -> None:
    assert called_in(reply, NAMES) == ""


def request(names: object) -> Fake:
    texts = {7: '{"name": "search"}'}
    return Fake(
        sampling_params=Fake(custom_params=None if names is None else {FIELD: names}),
        output_ids=[1, 7],
        tokenizer=Fake(decode=lambda ids: "".join(texts.get(token, "") for token in ids)),
    )


def test_the_reply_of_a_request_is_read() -> None:
    assert called_by(request(["search"])) == "search"


@pytest.mark.parametrize(
    "names",
    [None, "search", [], [1, None], ["x" * 1000], [*map(str, range(MAX_NAMES)), "search"]],
)
def test_whatever_a_client_sends_is_read_or_left(names: object) -> None:
    assert called_by(request(names)) == ""


def test_a_server_without_a_tokenizer_knows_no_calls() -> None:
    one = request(["search"])
    one.tokenizer = None
    assert called_by(one) == ""


@pytest.mark.parametrize(
    ("options", "named"),
    [({"eviction": "learned"}, True), ({"trace": "t.jsonl"}, True), ({}, False), (None, False)],
)
def test_a_chats_tools_are_named_where_somebody_learns_or_records(
    monkeypatch: pytest.MonkeyPatch, options: dict | None, named: bool
) -> None:
    config = None if options is None else HcConfig(**options)
    monkeypatch.setattr(tools, "config_of", lambda args: config)
    serving = Fake(tokenizer_manager=Fake(server_args=None))
    sent = Fake(tools=[Fake(function=Fake(name=name)) for name in NAMES])
    adapted = Fake(sampling_params={"custom_params": {"mine": 1}})
    name_tools((adapted, sent), serving, sent)
    expected = {"mine": 1} | ({FIELD: list(NAMES)} if named else {})
    assert adapted.sampling_params["custom_params"] == expected


def test_a_chat_without_tools_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "config_of", lambda args: HcConfig(eviction="learned"))
    adapted = Fake(sampling_params={})
    name_tools((adapted, None), Fake(tokenizer_manager=Fake(server_args=None)), Fake(tools=None))
    assert adapted.sampling_params == {}
