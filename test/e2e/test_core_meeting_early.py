"""Blocks of a meeting that are restored as they come, under SGLang's real scheduler.

The disk's answers come one by one, one in each pass, so that most blocks are restored before both
ends meet. What every test asserts: the tokens are those of a server that never evicted, no slot of
the host or of the device is lost, and each fault is counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.outcome import Outcome
from support.core import Reply, run_in_child
from support.meetings import (
    BLOCKS,
    HeldDisk,
    Replies,
    counted,
    halving_profile,
    second_turn,
    start,
)

FORM = "hidden:2,kv:2"
SLOW_RESTORE = 2e-4
"""At this price of a token of a layer, it pays to restore blocks as they come."""


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A profile by which blocks are restored as they come."""
    return halving_profile(tmp_path_factory.mktemp("early"), host=SLOW_RESTORE)


class Seen(NamedTuple):
    """One request. had: most device slots that early blocks had at the top of a pass."""

    reply: Reply
    counts: dict[str, int]
    had: int


class Server:
    """A server whose disk alone holds a conversation's first turn, and answers when it is told."""

    def __init__(self, form: str, folder: str, profile: str) -> None:
        self.core, first = start(form, folder, profile)
        self.prompt = second_turn(first)
        self.disk = HeldDisk(self.core)

    def ask(self, each_pass: Callable[[int, str], None] = lambda number, rid: None) -> Seen:
        """Serve the second turn, the disk answering once in each pass; nothing is kept."""
        core, disk, had = self.core, self.disk, 0
        disk.asked.clear()
        rid = core.submit(self.prompt, 24)

        def look(number: int) -> None:
            nonlocal had
            done = rid in core.requests and core.requests[rid].finished()
            disk.left = None if done else 1
            had = max(had, core.tree.prerestored.tokens)
            each_pass(number, rid)

        def serve() -> Reply:
            core.run(each_pass=look)
            disk.left = None
            return core.reply(rid)

        reply, counts = counted(core, serve)
        assert core.tree.prerestored.tokens == 0
        core.forget()
        return Seen(reply, counts, had)


def one_by_one(form: str, folder: str, profile: str) -> Seen:
    return Server(form, folder, profile).ask()


@pytest.mark.parametrize("form", ["hidden", "kv", FORM])
def test_what_comes_one_by_one_is_restored_one_by_one(
    wanted: Replies, early: str, tmp_path: Path, form: str
) -> None:
    reply, counts, had = run_in_child(one_by_one, form, str(tmp_path / "d"), early)
    assert reply.tokens == wanted[1]
    assert counts["meetings"] == counts["meetings_restored"] == 1
    assert 0 < reply.cached == reply.storage == counts["restored_tokens"] < BLOCKS * BLOCK_TOKENS
    assert 0 < had <= counts["early_restored_tokens"] <= counts["restored_tokens"]


def faults(folder: str, profile: str) -> list[tuple[Outcome, int, int, Seen]]:
    """(outcome, number of the read that has it, reads, what was seen)."""
    server = Server(FORM, folder, profile)
    found = []
    for outcome in (Outcome.DAMAGED, Outcome.IO_ERROR, Outcome.TIMED_OUT):
        for number in range(7):
            server.disk.verdicts = {number: outcome}
            seen = server.ask()
            found.append((outcome, number, len(server.disk.asked), seen))
    return found


def test_a_fault_at_any_block_moves_the_meeting_and_costs_nothing_else(
    wanted: Replies, early: str, tmp_path: Path
) -> None:
    found = run_in_child(faults, str(tmp_path / "d"), early)
    for outcome, number, reads, (reply, counts, _) in found:
        assert reply.tokens == wanted[1], (outcome, number)
        assert counts.get(f"disk_read_{outcome.value}", 0) == (number < reads), (outcome, number)
        if number < reads:  # everything up to the end of the lost block is computed
            assert reply.cached <= number * BLOCK_TOKENS, (outcome, number)
    assert sum(number < reads for _, number, reads, _ in found) >= 3 * 4
    assert sum(seen.had > 0 for *_, seen in found) >= 3 * 4


def stalls(folder: str, profile: str) -> list[Seen]:
    """The source stands still behind so many blocks, until the request is over."""
    server = Server(FORM, folder, profile)
    found = []
    for come in range(8):

        def stop(number: int, rid: str, come: int = come) -> None:
            if server.disk.left is not None and number > come:
                server.disk.left = 0

        found.append(server.ask(stop))
    return found


def test_a_source_that_stands_still_gives_back_what_it_brought_or_it_is_used(
    wanted: Replies, early: str, tmp_path: Path
) -> None:
    found = run_in_child(stalls, str(tmp_path / "d"), early)
    for come, (reply, _, _) in enumerate(found):
        assert reply.tokens == wanted[1], come
        assert reply.cached <= come * BLOCK_TOKENS
    assert any(seen.had > 0 for seen in found)


def disturbed(folder: str, profile: str) -> list[tuple[str, Reply, int]]:
    """(what happens to a request at the top of a pass, the reply to it or to one with its prompt,
    device slots of early blocks then)."""
    server = Server(FORM, folder, profile)
    core, others = server.core, []
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    def abort(rid: str) -> None:
        core.abort(rid)

    def pause(rid: str) -> None:
        core.inbox.append(PauseGenerationReqInput(mode="retract"))

    def same_prompt(rid: str) -> None:
        others.append(core.submit(server.prompt, 24))

    def weights(rid: str) -> None:
        server.disk.left = None  # it waits for what is under way
        core.tree.tiers.clear()

    def pressure(rid: str) -> None:
        core.evict()
        assert core.tree.prerestored.tokens == 0

    def whole_pool(rid: str) -> None:
        """Somebody takes all device slots, and gives them back."""
        allocator = core.scheduler.token_to_kv_pool_allocator
        free = allocator.available_size() + core.tree.evictable_size()
        slots = core.tree.allocate(free)
        assert slots is not None and core.tree.prerestored.tokens == 0
        allocator.free(slots)

    found = []
    for event in (abort, pause, same_prompt, weights, pressure, whole_pool):
        for when in range(3, 8):
            had: list[int] = []

            def happen(number: int, rid: str, event=event, when: int = when, had=had) -> None:
                if number == when:
                    had.append(core.tree.prerestored.tokens)
                    event(rid)
                elif number == when + 1 and event is pause:
                    core.inbox.append(ContinueGenerationReqInput())

            found.append((event.__name__, server.ask(happen).reply, *had))
    found += [("same_prompt", core.reply(rid), 0) for rid in others]
    return [*found, ("nothing", server.ask().reply, 0)]


def test_whatever_happens_meanwhile_no_slot_is_lost(
    wanted: Replies, early: str, tmp_path: Path
) -> None:
    found = run_in_child(disturbed, str(tmp_path / "d"), early)
    for event, reply, _ in found:
        assert event == "abort" or reply.tokens == wanted[1], event
    for event in ("abort", "pause", "same_prompt", "weights", "pressure", "whole_pool"):
        assert any(name == event and had > 0 for name, _, had in found), f"{event} came too late"
