"""Blocks of waiting conversations are on the device before their turn, in a real scheduler."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from support.core import Core, run_in_child
from support.profiles import cost_model, write

TURNS = 6


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(3, 900) for _ in range(150 + 17 * i)] for i in range(TURNS)]


class Server:
    """Serves one request at a time. Some conversations have left its device."""

    def __init__(self, forms: str, pool: int, profile: str) -> None:
        self.core = Core(
            "--hc-forms", forms, "--max-total-tokens", str(pool), "--dtype", "float32",
            "--hc-host-size-gb", "0.1", "--max-running-requests", "1", profile=profile,
        )  # fmt: skip
        self.core.believe_profile()
        self.histories = [prompt + self.core.ask(prompt, 8).tokens for prompt in prompts()]
        self.core.settle()

    def return_at_once(self) -> list[str]:
        """All conversations come back."""
        return [self.core.submit([*history, 7, 8, 9], 8) for history in self.histories]

    def served(self, rids: list[str]) -> tuple[list[list[int]], dict[str, Any]]:
        self.core.run()
        self.core.settle()
        assert self.core.tree.prerestored.tokens == 0
        assert all(node.pins == 0 for node in self.core.tree.tiers.host.tree.nodes())
        return [self.core.reply(rid).tokens for rid in rids], self.core.tree.stats()


def returning(forms: str, pool: int, profile: str) -> tuple[list[list[int]], dict]:
    server = Server(forms, pool, profile)
    return server.served(server.return_at_once())


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """Loading takes a tenth of recomputing."""
    return write(cost_model(host=1e-6, prefill=1e-5), tmp_path)


@pytest.mark.parametrize("forms", ["hidden:3,kv:1", "kv", "recompute:1,kv:3"])
def test_answers_are_those_of_conversations_that_never_left(
    models: None, profile: str, forms: str
) -> None:
    tokens, stats = run_in_child(returning, forms, 640, profile)
    wanted, never = run_in_child(returning, forms, 8000, profile)
    assert tokens == wanted
    assert "early_restored_tokens" not in never
    assert (stats.get("early_restored_tokens", 0) > 0) == (forms != "recompute:1,kv:3")
    assert stats.get("early_restored_tokens", 0) <= stats["restored_tokens"]


def disturbed(profile: str) -> tuple[list[list[int]], list[tuple[str, int]]]:
    """What may happen while some of a waiting conversation is on the device."""
    server = Server("hidden:2,kv:2", 640, profile)
    core, seen, found = server.core, [], []

    def clear() -> None:
        core.tree.forget_saved()  # as where the weights change

    def pressure() -> None:
        core.evict()

    def abort() -> None:
        core.abort(rids[-1])

    for event in (pressure, clear, abort):
        for when in (3, 6, 9):
            passes = 0
            rids = server.return_at_once()
            receive = core.scheduler.request_receiver.recv_requests

            def received(event=event, when=when, receive=receive) -> list[Any]:
                nonlocal passes
                passes += 1
                if passes == when:
                    seen.append((event.__name__, core.tree.prerestored.tokens))
                    event()
                return receive()

            core.scheduler.request_receiver.recv_requests = received
            found += server.served(rids if event is not abort else rids[:-1])[0]
            core.scheduler.request_receiver.recv_requests = receive
    return found, seen


def test_whatever_happens_meanwhile_no_slot_is_lost(models: None, profile: str) -> None:
    found, seen = run_in_child(disturbed, profile)
    wanted, _ = run_in_child(returning, "hidden:2,kv:2", 8000, profile)
    per_round = iter(found)
    for name, _ in seen:
        for tokens in wanted[: TURNS - (name == "abort")]:
            assert next(per_round) == tokens, name
    for event in ("pressure", "clear", "abort"):
        assert any(name == event and had > 0 for name, had in seen), f"{event} came too late"
