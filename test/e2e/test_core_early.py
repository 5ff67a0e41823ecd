"""Blocks of waiting conversations are on the device before their turn, in a real scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from support import leaks
from support.core import Core, run_in_child
from support.profiles import cost_model, write
from support.prompts import SMALL
from support.versions import new_version

TURNS = 6


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(3, 900) for _ in range(150 + 17 * i)] for i in range(TURNS)]


class Server:
    """Serves one request at a time. Some conversations have left its device."""

    def __init__(self, forms: str, pool: int, profile: str) -> None:
        flags = ("--max-total-tokens", str(pool), "--max-running-requests", "1")
        self.core = Core("--hc-forms", forms, *SMALL, *flags, profile=profile)
        self.core.believe_profile()
        self.histories = [prompt + self.core.ask(prompt, 8).tokens for prompt in prompts()]
        self.core.settle()

    def return_at_once(self) -> list[str]:
        """All conversations come back."""
        return [self.core.submit([*history, 7, 8, 9], 8) for history in self.histories]

    def served(
        self, rids: list[str], each_pass: Callable[[int], None] | None = None
    ) -> tuple[list[list[int]], dict[str, Any]]:
        self.core.run(each_pass=each_pass)
        self.core.settle()
        assert self.core.tree.prerestored.tokens == 0
        assert all(node.pins == 0 for node in self.core.tree.tiers.host.tree.nodes())
        return [self.core.reply(rid).tokens for rid in rids], self.core.tree.stats()


def returning(forms: str, pool: int, profile: str) -> tuple[list[list[int]], dict]:
    server = Server(forms, pool, profile)
    return server.served(server.return_at_once())


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Loading takes a tenth of recomputing."""
    return write(cost_model(host=1e-6, prefill=1e-5), tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def never_left(models: None, profile: str) -> list[list[int]]:
    """Replies of a device that has room for all conversations."""
    tokens, stats = run_in_child(returning, "kv", 8000, profile)
    assert "early_restored_tokens" not in stats
    return tokens


@pytest.mark.parametrize("forms", ["hidden:3,kv:1", "kv", "recompute:1,kv:3"])
def test_answers_are_those_of_conversations_that_never_left(
    never_left: list[list[int]], profile: str, forms: str
) -> None:
    tokens, stats = run_in_child(returning, forms, 640, profile)
    assert tokens == never_left
    assert (stats.get("early_restored_tokens", 0) > 0) == (forms != "recompute:1,kv:3")
    assert stats.get("early_restored_tokens", 0) <= stats["restored_tokens"]


def disturbed(profile: str) -> tuple[list[list[int]], list[tuple[str, int]]]:
    """What may happen while some of a waiting conversation is on the device: in the first pass in
    which it is, or in a later one."""
    server = Server("hidden:2,kv:2", 640, profile)
    core, seen, found = server.core, [], []

    def clear() -> None:
        new_version(core)

    def pressure() -> None:
        core.evict()

    def abort() -> None:
        core.abort(rids[-1])

    for event in (pressure, clear, abort):
        for when in (1, 2, 4):
            left, had = when, 0

            def each_pass(_: int, event=event) -> None:
                nonlocal left, had
                tokens = core.tree.prerestored.tokens
                left -= tokens > 0
                if not left and not had:
                    had = tokens
                    event()

            rids = server.return_at_once()
            answered = rids if event is not abort else rids[:-1]
            found += server.served(answered, each_pass)[0]
            seen.append((event.__name__, had))
    return found, seen


def test_whatever_happens_meanwhile_no_slot_is_lost(
    never_left: list[list[int]], profile: str
) -> None:
    found, seen = run_in_child(disturbed, profile)
    per_round = iter(found)
    for name, _ in seen:
        for tokens in never_left[: TURNS - (name == "abort")]:
            assert next(per_round) == tokens, name
    for event in ("pressure", "clear", "abort"):
        assert any(name == event and had > 0 for name, had in seen), f"{event} came too late"


class BrokenWrite:
    """The first early restoration ends with an error, at one of its writes."""

    def __init__(self, core: Core, name: str, when: int) -> None:
        """name: of the sink's write. when: how many of these go before."""
        restorer = core.tree.restorer
        self.sink, self.name, self.left = restorer.path.sink, name, when
        self.write, self.restore = getattr(self.sink, name), type(restorer).restore_early
        self.restorer, self.calls = restorer, 0
        restorer.restore_early = self.restore_early

    def restore_early(self, runs: Any) -> Any:
        self.calls += 1
        setattr(self.sink, self.name, self.failing if self.calls == 1 else self.write)
        try:
            return self.restore(self.restorer, runs)
        finally:
            setattr(self.sink, self.name, self.write)

    def failing(self, *args: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError("planted")
        self.write(*args)


def broken(profile: str) -> list[tuple[list[list[int]], int, int]]:
    """(tokens, errors, early restorations) of an error at each of the first writes."""
    from sglang_hc.srt.engine.guard import counters

    leaks.errors_are_planted = True
    server, found = Server("hidden:2,kv:2", 640, profile), []
    for name in ("write_hidden", "write_kv"):
        for when in range(3):
            planted = BrokenWrite(server.core, name, when)
            before = counters["guarded_errors"]
            tokens, _ = server.served(server.return_at_once())
            found.append((tokens, counters["guarded_errors"] - before, planted.calls))
    return found


def test_blocks_that_an_error_left_half_written_serve_nobody(
    never_left: list[list[int]], profile: str
) -> None:
    found = run_in_child(broken, profile)
    for tokens, _, calls in found:
        assert tokens == never_left and calls
    assert sum(errors for _, errors, _ in found) >= 4
