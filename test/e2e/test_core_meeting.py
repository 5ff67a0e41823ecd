"""A history computed from its front while its end is read, under SGLang's real scheduler.

The disk is held by the test: reads are ended one by one, well or badly, between the chunks of the
prompt. What every test asserts: the tokens are those of a server that never evicted, no slot is
lost, and each fault is counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.store.outcome import Outcome
from support.core import Core, Reply, run_in_child
from support.meetings import (
    BLOCKS,
    FOLLOW,
    HeldDisk,
    counted,
    halving_profile,
    meet,
    second_turn,
    start,
)


def both_turns(form: str, folder: str, profile: str) -> tuple[list[int], Reply, dict[str, int]]:
    return meet(*start(form, folder, profile))


@pytest.mark.parametrize("form", ["hidden", "kv", "hidden:2,kv:2"])
def test_the_front_is_computed_and_the_end_restored(
    wanted: dict, profile: str, tmp_path: Path, form: str
) -> None:
    first, reply, seen = run_in_child(both_turns, form, str(tmp_path / "d"), profile)
    assert (first, reply.tokens) == wanted[form]
    assert seen["meetings"] == seen["meetings_restored"] == seen["restore_reason_slow_tier"] == 1
    assert 0 < reply.cached == reply.storage == seen["restored_tokens"] < BLOCKS * 64
    assert "hole" not in seen and "gap" not in seen, "the state behind the meeting is saved"


def faults_at_every_block(folder: str, profile: str) -> list[tuple]:
    """(outcome, block from the end, reply, counts), then the reply once the disk is well again."""
    core, first = start("hidden:2,kv:2", folder, profile)
    disk = HeldDisk(core)
    history = second_turn(first)
    results = []
    for outcome in (Outcome.DAMAGED, Outcome.IO_ERROR, Outcome.TIMED_OUT):
        for block in range(7):
            disk.asked.clear()
            disk.verdicts = {block: outcome}
            reply, seen = counted(core, lambda: core.ask(history, 24))
            results.append((outcome, block, len(disk.asked), reply, seen))
            disk.verdicts = {}
            core.forget()
    return results


def test_a_fault_at_any_block_costs_time_and_nothing_else(
    wanted: dict, profile: str, tmp_path: Path
) -> None:
    results = run_in_child(faults_at_every_block, str(tmp_path / "d"), profile)
    reached = 0
    for outcome, block, asked, reply, seen in results:
        assert reply.tokens == wanted["hidden:2,kv:2"][1], (outcome, block)
        if block < asked:
            reached += 1
            assert seen[f"disk_read_{outcome.value}"] == 1, (outcome, block)
            # Everything up to the end of the lost block is computed.
            assert reply.cached <= block * 64, (outcome, block)
        else:
            assert f"disk_read_{outcome.value}" not in seen
    assert reached >= 3 * 4


def stalls_at_every_block(folder: str, profile: str) -> list[tuple]:
    """The source stands still behind so many blocks, until the request is over."""
    core, first = start("hidden", folder, profile)
    disk = HeldDisk(core)
    results = []
    for come in range(8):
        disk.left = come
        rid = core.submit(second_turn(first), 24)

        def resume(_: int, rid: str = rid) -> None:
            if rid in core.requests and core.requests[rid].finished():
                disk.left = None  # what was under way ends well, too late

        def ask(rid: str = rid, resume: Callable[[int], None] = resume) -> Reply:
            core.run(each_pass=resume)
            disk.left = None
            return core.reply(rid)

        reply, seen = counted(core, ask)
        results.append((come, reply, seen))
        core.forget()
    return results


def test_a_source_that_stands_still_at_any_block_ends_in_recomputation(
    wanted: dict, profile: str, tmp_path: Path
) -> None:
    results = run_in_child(stalls_at_every_block, str(tmp_path / "d"), profile)
    served = []
    for come, reply, _ in results:
        assert reply.tokens == wanted["hidden"][1], come
        assert reply.cached <= come * 64
        served.append(reply.cached)
    assert served[0] == 0 and max(served) > 0


def disturbed(folder: str, profile: str) -> list[tuple[str, int]]:
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
                assert core.reply(name).tokens == WANTED[0], (event, when)
            core.forget()
            assert core.ask(history, 24).tokens == WANTED[0], "and it is served as before"
            core.forget()
    return seen


WANTED: list[list[int]] = []


def test_requests_that_leave_or_share_their_history_in_the_middle_of_it(
    wanted: dict, profile: str, tmp_path: Path
) -> None:
    WANTED[:] = [wanted["hidden:2,kv:2"][1]]  # inherited by the fork
    seen = run_in_child(disturbed, str(tmp_path / "d"), profile)
    for event in ("abort", "pause", "same prompt", "weights"):
        assert (event, True) in seen, f"{event} met a meeting"


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
@pytest.mark.parametrize("chunk", ["4096", "512", "100"])
def test_beside_a_decoding_request_no_gap_is_longer_than_a_plain_prefill(
    wanted: dict, tmp_path: Path, chunk: str, how: str
) -> None:
    """Counted in passes and in tokens that are computed between two steps of the request that
    decodes. A pass costs about a step: one more than with the plain prefill is the bound."""
    flag = {"mixed chunk": "--enable-mixed-chunk", "no overlap": "--disable-overlap-schedule"}
    flags = ["--chunked-prefill-size", chunk, *([flag[how]] if how in flag else [])]
    profile = halving_profile(tmp_path, 6e-3)  # slow enough that computing pays beside others
    met, plain, meetings = run_in_child(beside, str(tmp_path / "d"), profile, *flags)
    assert met[2].tokens == plain[2].tokens == wanted["hidden"][1][:4]
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
