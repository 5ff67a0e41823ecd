"""A history computed from its front while its end is read from disk, from a remote store or from
both, under SGLang's real scheduler.

The disk is held by the test: reads are ended one by one, well or badly, between the chunks of the
prompt. What every test asserts: the tokens are those of a server that never evicted, and no slot is
lost (`counted`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.core import Core, Reply, run_in_child
from support.disk_store import remove, store_of
from support.during import When
from support.meetings import (
    BLOCKS,
    FAST,
    FOLLOW,
    PROMPT,
    HeldDisk,
    Replies,
    counted,
    halving_profile,
    second_turn,
    server,
    start,
)
from support.prompts import in_store, on_disk, prompt

STORE_SECONDS = 1e-3
"""A token of a layer from a remote store, as long as it takes to compute one."""


def begin(form: str, profile: str, seconds: float | None, *below: str) -> tuple[Core, list[int]]:
    """A server of which only what lies below host memory holds the first turn, and the reply to it.
    seconds: what a token of a layer from a remote store took; None where nobody has seen it."""
    core = server(form, profile, *below, store_seconds=seconds)
    first = core.ask(PROMPT, 30).tokens
    core.forget()
    return core, first


def both_turns(form: str, profile: str, *below: str) -> tuple[list[int], Reply, dict[str, int]]:
    core, first = begin(form, profile, STORE_SECONDS, *below)
    reply, seen = counted(core, lambda: core.ask(second_turn(first), 24))
    assert core.scheduler.flush_cache(), "what was restored can be forgotten"
    return first, reply, seen


def another_server(
    form: str, profile: str, first: list[int], *below: str
) -> tuple[Reply, dict[str, int]]:
    core = server(form, profile, *below, store_seconds=STORE_SECONDS)
    HeldDisk(core)  # what is asked for comes in the next pass, however busy the machine is
    return counted(core, lambda: core.ask(second_turn(first), 24))


@pytest.mark.parametrize(
    ("below", "tier", "form"),
    [
        (on_disk, "disk", "hidden"),
        (on_disk, "disk", "kv"),
        (on_disk, "disk", "hidden:2,kv:2"),
        (in_store, "remote", "hidden:2,kv:2"),
    ],
)
def test_the_front_is_computed_and_the_end_restored(
    wanted: Replies,
    profile: str,
    tmp_path: Path,
    below: Callable[[object], tuple[str, ...]],
    tier: str,
    form: str,
) -> None:
    """By the server that has stored it, and by the next one."""
    flags = below(tmp_path / "d")
    first, reply, seen = run_in_child(both_turns, form, profile, *flags)
    assert first == wanted[0]
    assert seen["restore_reason_slow_tier"] == 1
    assert "hole" not in seen and "gap" not in seen, "the state behind the meeting is saved"
    found = [(reply, seen)]
    if form == "hidden:2,kv:2":
        found.append(run_in_child(another_server, form, profile, first, *flags))
    for reply, seen in found:
        assert reply.tokens == wanted[1]
        assert seen["meetings"] == seen["meetings_restored"] == 1
        assert 0 < reply.cached == reply.storage == seen["restored_tokens"] < BLOCKS * BLOCK_TOKENS
        assert seen[f"{tier}_loaded_blocks"] >= reply.cached // BLOCK_TOKENS


def of_unknown_speed(profile: str, folder: str) -> tuple[Reply, dict[str, int]]:
    core, first = begin("kv", profile, None, *in_store(folder))
    return counted(core, lambda: core.ask(second_turn(first), 24))


def test_a_store_whose_speed_nobody_has_seen_is_read_whole(
    wanted: Replies, profile: str, tmp_path: Path
) -> None:
    """Though the profile knows the disk's: that one is not the store's."""
    reply, seen = run_in_child(of_unknown_speed, profile, str(tmp_path))
    assert reply.tokens == wanted[1]
    assert reply.storage == BLOCKS * BLOCK_TOKENS
    assert "meetings" not in seen and "restore_reason_slow_tier" not in seen


def behind_a_disk(profile: str, shared: str, folder: str) -> tuple[Reply, dict[str, int]]:
    """The disk has the first five blocks, the store, which is twice as fast, all of them."""
    flags = (*on_disk(folder), *in_store(shared))
    core, first = begin("kv", profile, STORE_SECONDS / 2, *flags)
    stored = Prefix(None, pack_tokens(second_turn(first)))
    path = core.tree.tiers.host.tree.identities(stored)[:BLOCKS]
    assert remove(store_of(core), path[5:]) == BLOCKS - 5
    HeldDisk(core)  # what is read comes in the pass that asks for it
    return counted(core, lambda: core.ask(second_turn(first), 24))


def test_disk_and_store_are_read_at_the_same_time(
    wanted: Replies, profile: str, tmp_path: Path
) -> None:
    """By the costs the disk takes as long for a block as computing one, the store half of it: while
    the disk reads three and the store six, two are computed, and what comes is restored."""
    reply, seen = run_in_child(behind_a_disk, profile, str(tmp_path / "s"), str(tmp_path / "d"))
    assert reply.tokens == wanted[1]
    assert seen["meetings"] == seen["meetings_restored"] == 1
    assert (seen["disk_loaded_blocks"], seen["remote_loaded_blocks"]) == (3, 6)
    assert reply.cached == reply.storage == 9 * BLOCK_TOKENS


class Death(NamedTuple):
    """The second turn, when the disk was given up after so many answers. asked: reads."""

    answers: int
    asked: int
    reply: Reply
    counts: dict[str, int]


def deaths(folder: str, profile: str) -> list[Death]:
    """The disk is given up after so many answers: all that was asked for besides is answered
    IO_ERROR in the next pass, as where a directory hangs."""
    core, first = start("hidden:2,kv:2", folder, profile)
    disk, found = HeldDisk(core), []

    def give_up(_: int) -> None:
        if disk.left == 0:
            disk.left = None

    def serve() -> Reply:
        rid = core.submit(second_turn(first), 24)
        core.run(each_pass=give_up)
        disk.left = None
        return core.reply(rid)

    for answers in range(BLOCKS + 1):
        disk.asked.clear()
        disk.left = answers
        disk.verdicts = dict.fromkeys(range(answers, 2 * BLOCKS), Outcome.IO_ERROR)
        reply, counts = counted(core, serve)
        found.append(Death(answers, len(disk.asked), reply, counts))
        core.forget()
    return found


def test_a_disk_that_is_given_up_at_any_point_of_a_meeting(wanted: Replies, tmp_path: Path) -> None:
    """What had come is restored, if nothing behind it is lost: the last blocks come first. Each
    block that did not come is counted once."""
    profile = halving_profile(tmp_path, FAST)
    found = run_in_child(deaths, str(tmp_path / "d"), profile)
    for answers, asked, reply, counts in found:
        assert reply.tokens == wanted[1], answers
        assert counts["meetings"] == 1, answers
        assert counts.get("disk_read_io_error", 0) == max(0, asked - answers), answers
        assert (reply.cached > 0) == (answers > 0), answers
    assert sum(one.asked > one.answers for one in found) >= BLOCKS - 2


def disturbed(folder: str, profile: str, wanted: list[int]) -> list[tuple[str, bool]]:
    """What may happen to a request between two chunks, at each of its first passes."""
    core, first = start("hidden:2,kv:2", folder, profile)
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    history = second_turn(first)
    seen = []
    for event in ("abort", "pause", "same prompt", "weights"):
        for when in range(2, 6):
            rid = core.submit(history, 24)
            names = [] if event == "abort" else [rid]

            def happen(number: int, event: str = event, when: int = when, rid: str = rid,
                       names: list[str] = names) -> None:  # fmt: skip
                if event == "pause" and number == when + 1:
                    core.inbox.append(ContinueGenerationReqInput())
                if number != when:
                    return
                seen.append((event, core.tree.tiers.queue.meetings.under_way))
                if event == "abort":
                    core.abort(rid)
                elif event == "pause":
                    core.inbox.append(PauseGenerationReqInput(mode="retract"))
                elif event == "weights":
                    core.tree.tiers.clear()
                else:
                    names.append(core.submit(history, 24))

            counted(core, lambda happen=happen: core.run(each_pass=happen))
            for name in names:
                assert core.reply(name).tokens == wanted, (event, when)
            core.forget()
            assert core.ask(history, 24).tokens == wanted, "and it is served as before"
            core.forget()
    return seen


def test_requests_that_leave_or_share_their_history_in_the_middle_of_it(
    wanted: Replies, profile: str, tmp_path: Path
) -> None:
    seen = run_in_child(disturbed, str(tmp_path / "d"), profile, wanted[1])
    for event in ("abort", "pause", "same prompt", "weights"):
        assert (event, True) in seen, f"{event} met a meeting"


def behind_a_piece(folder: str, profile: str) -> list[tuple[str, int]]:
    """What happens to a request between two chunks behind a piece of it that was restored between
    two others, and how many of its tokens that piece has."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    core, first = start("hidden:2,kv:2", folder, profile, "--chunked-prefill-size", "128")
    found = []
    for event in ("abort", "retract"):
        told = [*PROMPT, *first, *prompt(event, 400)]
        wanted = core.ask(told, 8, salt="nobody's").tokens
        core.forget()
        before, rid = core.tree.stats().get("meetings_restored", 0), core.submit(told, 8)

        def has_piece(before: int = before) -> bool:
            pieces = core.tree.stats().get("meetings_restored", 0) - before
            return pieces == 1 and core.scheduler.chunked_req is not None

        def happen(event: str = event, rid: str = rid) -> None:
            found.append((event, core.requests[rid].cached_tokens_storage))
            if event == "abort":
                core.abort(rid)
            else:
                pause = PauseGenerationReqInput(mode="retract")
                core.inbox += [pause, ContinueGenerationReqInput()]

        counted(core, partial(core.run, each_pass=When(has_piece, happen)))
        if event == "abort":
            assert not core.requests[rid].output_ids
        else:
            assert core.reply(rid).tokens == wanted
        assert core.ask(told, 8).tokens == wanted, "and it is served as before"
    return found


def test_a_request_that_leaves_behind_a_restored_piece_leaves_nothing(
    profile: str, tmp_path: Path
) -> None:
    seen = run_in_child(behind_a_piece, str(tmp_path / "d"), profile)
    assert [event for event, _ in seen] == ["abort", "retract"]
    assert all(restored >= 2 * BLOCK_TOKENS for _, restored in seen)


class Gaps:
    """What is computed between two tokens of a request that decodes, the pass of the second one
    included: (passes, tokens of prompts)."""

    def __init__(self, core: Core, decoding: str) -> None:
        self.seen: list[tuple[int, int]] = []
        self._core, self._decoding = core, decoding
        self._passes = self._tokens = 0
        self._run = core.scheduler.run_batch
        core.scheduler.run_batch = self._run_batch

    def _run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        decodes = batch.decoding_reqs or ()
        if batch.forward_mode.is_extend():
            self._tokens += sum(batch.extend_lens) - len(decodes)
        else:
            decodes = batch.reqs
        self._passes += 1
        if any(req.rid == self._decoding for req in decodes):
            self.seen.append((self._passes, self._tokens))
            self._passes = self._tokens = 0
        return self._run(batch, *args, **kwargs)

    def widest(self) -> tuple[int, int]:
        """Most passes, and most tokens, of any gap. Ends the watch."""
        self._core.scheduler.run_batch = self._run
        passes, tokens = zip(*self.seen[1:], strict=True)  # the first gap has its own prefill
        return max(passes), max(tokens)


def beside(folder: str, profile: str, *flags: str) -> tuple:
    """The widest gap of a decoding request and the reply of the one that comes, when that one meets
    its history and when nothing of its history is stored. Two blocks come at once, and then one in
    each third pass."""
    core, first = start("hidden", folder, profile, *flags)
    disk, found = HeldDisk(core), []
    disk.left = 0
    for salt in (None, "nobody's"):
        asked: list[str] = []

        def arrive(number: int, salt: str | None = salt, asked: list[str] = asked) -> None:
            disk.left = (disk.left or 0) + (number % 3 == 0)
            if number == 6:
                asked.append(core.submit(second_turn(first), 4, salt=salt))

        gaps = Gaps(core, core.submit(FOLLOW, 60))
        core.run(each_pass=arrive)
        found.append((*gaps.widest(), core.reply(asked[0])))
        core.forget()
    return (*found, core.tree.stats().get("meetings", 0))


@pytest.mark.parametrize("how", ["overlap", "mixed chunk", "no overlap"])
@pytest.mark.parametrize(
    "chunk", ["512", *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in ("4096", "100"))]
)
def test_beside_a_decoding_request_no_gap_is_longer_than_a_plain_prefill(
    wanted: Replies, tmp_path: Path, chunk: str, how: str
) -> None:
    """Counted in passes and in tokens that are computed between two steps of the request that
    decodes. A pass costs about a step: one more than with the plain prefill is the bound."""
    flag = {"mixed chunk": "--enable-mixed-chunk", "no overlap": "--disable-overlap-schedule"}
    flags = ["--chunked-prefill-size", chunk, *([flag[how]] if how in flag else [])]
    profile = halving_profile(tmp_path, 6e-3)  # slow enough that computing pays beside others
    met, plain, meetings = run_in_child(beside, str(tmp_path / "d"), profile, *flags)
    assert met[2].tokens == plain[2].tokens == wanted[1][:4]
    assert met[1] <= plain[1] and plain[1] > 0, (met, plain)
    assert met[0] <= plain[0] + 1, (met, plain)
    assert meetings == 1 and met[2].cached > 0


def exact(folder: str, profile: str) -> tuple[Any, bool]:
    core, first = start("kv", folder, profile, "--hc-exact")
    _, seen = counted(core, lambda: core.ask(second_turn(first), 24))
    return seen, core.tree.tiers.restorer.path.recomputer is not None


def test_exactness_lets_a_computed_front_in_only_where_it_was_proven(
    profile: str, tmp_path: Path
) -> None:
    seen, proven = run_in_child(exact, str(tmp_path / "d"), profile)
    assert ("meetings" in seen) == proven


def whole(folder: str, profile: str) -> dict[str, int]:
    flags = "--chunked-prefill-size", "-1", "--mem-fraction-static", "0.5"
    core, first = start("kv", folder, profile, *flags)
    return counted(core, lambda: core.ask(second_turn(first), 24))[1]


def test_without_chunks_there_is_no_meeting(profile: str, tmp_path: Path) -> None:
    assert "meetings" not in run_in_child(whole, str(tmp_path / "d"), profile)
