"""Who may use /hc/*, and what they are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware

from sglang_hc.srt.requests import routes
from sglang_hc.srt.requests.forgetting import METHOD, joined_answers
from sglang_hc.tree.forgetting import FORGOTTEN as HIDDEN
from sglang_hc.tree.forgetting import Forgetting

PIN = {"session": "s", "ttl_s": 5, "input_ids": [1, 2], "cache_salt": "acme"}
NAMED = {"session": "s", "cache_salt": "acme"}
CALLS: list[tuple[str, str, Any]] = [
    ("POST", "/hc/pin", PIN),
    ("POST", "/hc/unpin", NAMED),
    ("POST", "/hc/retain", NAMED | {"ttl_s": 5}),
    ("POST", "/hc/prefetch", NAMED),
    ("POST", "/hc/demote", NAMED),
    ("GET", "/hc/pins?cache_salt=acme", None),
    ("DELETE", "/hc/state", {"cache_salt": "acme"}),
]
FOR_CLIENTS = 5
"""Of these, the first ones."""
GOOD = {"status": 200, "session": "s", "blocks": 3, "ttl_s": 5.0}
FORGOTTEN = {"status": 200, "complete": True, "device": {"tokens": 9}, "host": {"blocks": 2}}


class Server:
    """SGLang's application with our routes, its keys, and a scheduler that answers as told. checks:
    SGLang itself looks at keys."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        api: str,
        admin: str,
        open_routes: bool,
        checks: bool = True,
    ):
        self.asked: list[Any] = []
        self.answers: dict[str, dict[str, Any]] = {METHOD: FORGOTTEN}
        args = SimpleNamespace(api_key=api or None, admin_api_key=admin or None)
        manager = SimpleNamespace(
            server_args=args,
            dumper_control=self.control,
            tokenizer=SimpleNamespace(encode=lambda text: [len(word) for word in text.split()]),
            model_config=SimpleNamespace(vocab_size=100, context_len=1000),
        )
        config = SimpleNamespace(open_routes=open_routes, overflow="off")
        monkeypatch.setattr(
            routes, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=manager)
        )
        monkeypatch.setattr(routes, "config_of", lambda args: config)
        monkeypatch.setattr("sglang_hc.srt.requests.overflow.config_of", lambda args: config)
        app = FastAPI()
        routes.mount(app)
        if checks and (api or admin):
            add_api_key_middleware(app, api_key=args.api_key, admin_api_key=args.admin_api_key)
        self.client = TestClient(app)

    async def control(self, request: Any) -> list[Any]:
        self.asked.append((request.method, request.body))
        return [SimpleNamespace(response=[dict(self.answers.get(request.method, GOOD))])]

    def call(self, verb: str, path: str, body: Any = None, key: str = "") -> Any:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.client.request(verb, path, json=body, headers=headers)

    def statuses(self, key: str = "") -> list[int]:
        return [self.call(*call, key=key).status_code for call in CALLS]


def test_without_keys_the_routes_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, "", "", open_routes=False)
    assert server.statuses() == [403] * len(CALLS) and not server.asked
    assert "--hc-open-routes" in server.call(*CALLS[0]).json()["error"]["message"]
    assert "--admin-api-key" in server.call(*CALLS[-1]).json()["error"]["message"]


def test_a_flag_opens_them_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, "", "", open_routes=True)
    assert server.statuses() == [200] * len(CALLS)
    assert server.asked[-1] == (METHOD, {"client": "s4:acme", "tokens": []})
    assert server.call(*CALLS[0]).json()["blocks"] == 3


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("api", ["", "api"])
def test_with_an_admin_key_nobody_else_may(
    monkeypatch: pytest.MonkeyPatch, api: str, checks: bool
) -> None:
    server = Server(monkeypatch, api, "admin", open_routes=False, checks=checks)
    for key in ("", "api", "wrong"):
        assert server.statuses(key) == [401] * len(CALLS)
    assert not server.asked
    assert server.statuses("admin") == [200] * len(CALLS)
    assert server.call(*CALLS[0], key="admin").json() == {"session": "s", "blocks": 3, "ttl_s": 5.0}


def test_with_an_api_key_alone_clients_may_keep_and_learn_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(monkeypatch, "api", "", open_routes=False)
    assert server.statuses() == [401] * len(CALLS) and not server.asked
    assert server.statuses("api") == [200] * FOR_CLIENTS + [403, 403]
    methods = [method for method, _ in server.asked]
    assert methods == [
        *("hc_pins/pin", "hc_pins/unpin"),
        *("hc_retention/retain", "hc_retention/prefetch", "hc_retention/demote"),
    ]
    answers = []
    for reply in (
        GOOD,
        GOOD | {"blocks": 400},
        {"status": 404, "error": {"message": "no tier has a block of these tokens"}},
        {"status": 409, "error": {"message": "needs 9 blocks, the bound is 4"}},
    ):
        server.answers |= dict.fromkeys(methods, reply)
        found = [server.call(*call, key="api") for call in CALLS[:FOR_CLIENTS]]
        answers.append([(one.status_code, one.json()) for one in found])
    timed, named = (200, {"session": "s", "ttl_s": 5.0}), (200, {"session": "s"})
    assert answers[0] == [timed, named, timed, named, named]
    assert all(answer == answers[0] for answer in answers), "whether a block is there shows"
    assert "--admin-api-key" in server.call(*CALLS[-1], key="api").json()["error"]["message"]


def test_bodies_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, "", "admin", open_routes=False)
    for body, part in (
        ({"cache_salt": 5}, "cache_salt"),
        ({"namespace": "acme"}, "unknown field `namespace`"),
        ({"input_ids": [1], "text": "a"}, "one of the two"),
        ({"input_ids": []}, "may not be empty"),
        ({"input_ids": [100]}, "outside 0 to 99"),
        ([], "object"),
    ):
        reply = server.call("DELETE", "/hc/state", body, "admin")
        assert reply.status_code == 400 and part in reply.json()["error"]["message"]
    for path, body, part in (
        ("retain", NAMED, "`ttl_s`"),
        ("retain", NAMED | {"ttl_s": 3601}, "<= 3600"),
        ("retain", NAMED | {"ttl_s": 5, "priority": 0}, ">= 1"),
        ("retain", NAMED | {"ttl_s": 5, "priority": 101}, "<= 100"),
        ("retain", {"ttl_s": 5}, "give a session"),
        ("prefetch", {"cache_salt": "acme"}, "give a session"),
        ("prefetch", NAMED | {"ttl_s": 5}, "unknown field `ttl_s`"),
        ("demote", NAMED | {"session": ""}, "session"),
        ("demote", NAMED | {"session": "s" * 257}, "<= 256"),
        ("demote", {"input_ids": [1], "text": "a"}, "one of the two"),
        ("demote", {"input_ids": [1] * 1001}, "context is 1000"),
    ):
        reply = server.call("POST", f"/hc/{path}", body, "admin")
        assert reply.status_code == 400 and part in reply.json()["error"]["message"]
    reply = server.call("POST", "/hc/pin", PIN | {"extra_key": "k" * 1025}, "admin")
    assert reply.status_code == 400 and "1025 bytes" in reply.json()["error"]["message"]
    assert not server.asked


def test_what_is_forgotten_is_named_as_requests_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, "", "admin", open_routes=False)
    for body, client, tokens in (
        ({}, None, []),
        ({"cache_salt": "", "extra_key": ""}, None, []),
        ({"cache_salt": "a"}, "s1:a", []),
        ({"cache_salt": "a", "extra_key": "b", "text": "one three"}, "s1:ak1:b", [3, 5]),
        ({"extra_key": "b", "input_ids": [99]}, "k1:b", [99]),
        ({"extra_key": "b", "input_ids": [99], "session": "s"}, "k1:b", [99]),
    ):
        assert server.call("DELETE", "/hc/state", body, "admin").status_code == 200
        assert server.asked[-1] == (METHOD, {"client": client, "tokens": tokens})
    assert server.call("DELETE", "/hc/state", NAMED, "admin").status_code == 200
    assert server.asked[-1] == (METHOD, {"client": "s4:acme", "tokens": [], "session": "s"})
    missed = FORGOTTEN | {"status": 503, "complete": False, "error": {"message": "the disk"}}
    server.answers[METHOD] = missed
    reply = server.call("DELETE", "/hc/state", {}, "admin")
    assert reply.status_code == 503 and reply.json()["complete"] is False
    assert reply.json()["error"]["message"] == "the disk"


def test_state_is_named_by_a_session_or_tokens_or_both(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, "", "admin", open_routes=False)
    for body, asked in (
        ({"session": "s"}, ("s", None, None)),
        ({"input_ids": [1, 2]}, (None, None, [1, 2])),
        ({"text": "a bc", "session": "s", "extra_key": "k"}, ("s", "k1:k", [1, 2])),
    ):
        for path in ("retain", "prefetch", "demote"):
            timed = {"ttl_s": 5, "priority": 7} if path == "retain" else {}
            assert server.call("POST", f"/hc/{path}", body | timed, "admin").status_code == 200
            session, namespace, tokens = asked
            wanted = {"session": session, "namespace": namespace, "tokens": tokens}
            assert server.asked[-1] == (f"hc_retention/{path}", wanted | timed)


def test_replicas_answer_together() -> None:
    unknown = {"status": 404, "complete": False, "error": {"message": "left nothing here"}}
    assert joined_answers([unknown, FORGOTTEN]) == joined_answers([FORGOTTEN])
    assert joined_answers([unknown, unknown])["status"] == 404
    disk = {"disk": {"blocks": 4, "complete": True}}
    assert joined_answers([FORGOTTEN | disk, FORGOTTEN | disk]) == {
        "status": 200,
        "complete": True,
        "device": {"tokens": 18},
        "host": {"blocks": 4},
        "disk": {"blocks": 8, "complete": True},
    }
    bad = {
        "status": 503,
        "complete": False,
        "disk": {"blocks": 1, "complete": False},
        "error": {"message": "the disk"},
    }
    together = joined_answers([FORGOTTEN | disk, FORGOTTEN | bad])
    assert together["status"] == 503 and together["complete"] is False
    assert together["disk"] == {"blocks": 5, "complete": False}
    assert together["error"] == {"message": "the disk"}


def test_the_namespaces_of_a_client() -> None:
    mine = Forgetting("k4:acme")
    assert mine.names("k4:acme") and mine.names("k4:acmea2:0f") and mine.names("k4:acmec1:9a2:0f")
    assert not any(map(mine.names, (None, "k3:acm", "k5:acme2", "s4:acme", f"{HIDDEN}0")))
