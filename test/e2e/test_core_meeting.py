"""A history computed from its front while its end is read, under SGLang's real scheduler.

The disk is held by the test: reads are ended one by one, well or badly, between the chunks of the
prompt. What every test asserts: the tokens are those of a server that never evicted, no slot is
lost, and each fault is counted once.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.store.outcome import Outcome
from support import profiles
from support.core import Core, Reply, run_in_child

FLAGS = (
    "--max-total-tokens", "4000", "--dtype", "float32", "--hc-host-size-gb", "0.2",
    "--chunked-prefill-size", "512",
)  # fmt: skip
PROMPT = [random.Random(3).randrange(3, 900) for _ in range(700)]
FOLLOW = [random.Random(4).randrange(3, 900) for _ in range(20)]
BLOCKS = 11
"""Whole blocks of the prompt and its reply of 30 tokens, 29 of which are kept."""


def undisturbed(form: str) -> tuple[list[int], list[int]]:
    core = Core("--hc-forms", form, *FLAGS)
    first = core.ask(PROMPT, 30).tokens
    return first, core.ask([*PROMPT, *first, *FOLLOW], 24).tokens


@pytest.fixture(scope="module")
def wanted(models: None) -> dict[str, tuple[list[int], list[int]]]:
    return {form: run_in_child(undisturbed, form) for form in ("hidden", "kv", "hidden:2,kv:2")}


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """By these costs half of a history is computed."""
    cost = profiles.cost_model(host=1e-6, disk=1e-3, prefill=1e-3)
    return profiles.write(cost, tmp_path_factory.mktemp("profile"))


class HeldDisk:
    """The disk's `BlockIo` with its answers in the hand of the test."""

    def __init__(self, core: Core) -> None:
        tier = core.tree.tiers.disk
        self._io, tier._io = tier._io, self
        self._held: deque[Any] = deque()
        self.left: int | None = None
        """So many answers are let through, then none; None for all."""
        self.verdicts: dict[int, Outcome] = {}
        """Outcome of the reads by their number, 0 for the first that was asked for."""
        self.asked: list[int] = []

    def read(self, ticket: int, *args: Any) -> None:
        self.asked.append(ticket)
        self._io.read(ticket, *args)

    def poll(self) -> list[Any]:
        for done in self._io.poll():
            outcome = done.outcome
            if done.ticket in self.asked:
                outcome = self.verdicts.get(self.asked.index(done.ticket), outcome)
            self._held.append(done._replace(outcome=outcome))
        count = len(self._held) if self.left is None else min(self.left, len(self._held))
        if self.left is not None:
            self.left -= count
        return [self._held.popleft() for _ in range(count)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io, name)


def start(form: str, folder: str, profile: str, *flags: str) -> tuple[Core, list[int]]:
    """A server whose disk alone holds the first turn."""
    core = Core("--hc-forms", form, "--hc-disk", f"{folder}:1", *FLAGS, *flags, profile=profile)
    core.believe_profile()
    first = core.ask(PROMPT, 30).tokens
    forget(core)
    return core, first


def forget(core: Core) -> None:
    core.settle()
    assert core.scheduler.flush_cache()


def counted(core: Core, during: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    before = core.tree.stats()
    reply = during()
    core.settle()
    tiers = core.tree.tiers
    assert tiers.host.staged_slots == 0 and not len(tiers.disk.coming), "nothing is left over"
    assert all(node.pins == 0 for node in tiers.host.tree.nodes())
    after = core.tree.stats()
    changes = {k: v - before.get(k, 0) for k, v in after.items() if isinstance(v, int)}
    return reply, {name: change for name, change in changes.items() if change}


def run(core: Core, each_pass: Callable[[int], None]) -> None:
    """Run to the end; `each_pass` is told the number of each pass at its top."""
    receive = core.scheduler.request_receiver.recv_requests
    passes = itertools.count(1)

    def received() -> list[Any]:
        each_pass(next(passes))
        return receive()

    core.scheduler.request_receiver.recv_requests = received
    try:
        core.run()
    finally:
        core.scheduler.request_receiver.recv_requests = receive


def meet(form: str, folder: str, profile: str) -> tuple[list[int], Reply, dict[str, int]]:
    core, first = start(form, folder, profile)
    reply, seen = counted(core, lambda: core.ask([*PROMPT, *first, *FOLLOW], 24))
    assert core.scheduler.flush_cache(), "what was restored can be forgotten"
    return first, reply, seen


@pytest.mark.parametrize("form", ["hidden", "kv", "hidden:2,kv:2"])
def test_the_front_is_computed_and_the_end_restored(
    wanted: dict, profile: str, tmp_path: Path, form: str
) -> None:
    first, reply, seen = run_in_child(meet, form, str(tmp_path / "d"), profile)
    assert (first, reply.tokens) == wanted[form]
    assert seen["meetings"] == seen["meetings_restored"] == 1
    assert 0 < reply.cached == reply.storage == seen["restored_tokens"] < BLOCKS * 64
    assert "hole" not in seen and "gap" not in seen, "the state behind the meeting is saved"


def faults_at_every_block(folder: str, profile: str) -> list[tuple]:
    """(outcome, block from the end, reply, counts), then the reply once the disk is well again."""
    core, first = start("hidden:2,kv:2", folder, profile)
    disk = HeldDisk(core)
    history = [*PROMPT, *first, *FOLLOW]
    results = []
    for outcome in (Outcome.DAMAGED, Outcome.IO_ERROR, Outcome.LOST, Outcome.TIMED_OUT):
        for block in range(7):
            disk.asked.clear()
            disk.verdicts = {block: outcome}
            reply, seen = counted(core, lambda: core.ask(history, 24))
            results.append((outcome, block, len(disk.asked), reply, seen))
            disk.verdicts = {}
            forget(core)
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
    assert reached >= 4 * 4


def stalls_at_every_block(folder: str, profile: str) -> list[tuple]:
    """The source stands still behind so many blocks, until the request is over."""
    core, first = start("hidden", folder, profile)
    disk = HeldDisk(core)
    results = []
    for come in range(8):
        disk.left = come
        rid = core.submit([*PROMPT, *first, *FOLLOW], 24)

        def resume(_: int, rid: str = rid) -> None:
            if rid in core.requests and core.requests[rid].finished():
                disk.left = None  # what was under way ends well, too late

        def ask(rid: str = rid, resume: Callable[[int], None] = resume) -> Reply:
            run(core, resume)
            disk.left = None
            return core.reply(rid)

        reply, seen = counted(core, ask)
        results.append((come, reply, seen))
        forget(core)
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

    history = [*PROMPT, *first, *FOLLOW]
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
                seen.append((event, core.tree.tiers.queue.meeting_of(rid) is not None))
                if event == "abort":
                    core.abort(rid)
                elif event == "pause":
                    core.inbox.append(PauseGenerationReqInput(mode="retract"))
                elif event == "weights":
                    core.tree.tiers.clear()
                else:
                    names.append(core.submit(history, 24))

            counted(core, lambda happen=happen: run(core, happen))
            for name in names:
                assert core.reply(name).tokens == WANTED[0], (event, when)
            forget(core)
            assert core.ask(history, 24).tokens == WANTED[0], "and it is served as before"
            forget(core)
    return seen


WANTED: list[list[int]] = []


def test_requests_that_leave_or_share_their_history_in_the_middle_of_it(
    wanted: dict, profile: str, tmp_path: Path
) -> None:
    WANTED[:] = [wanted["hidden:2,kv:2"][1]]  # inherited by the fork
    seen = run_in_child(disturbed, str(tmp_path / "d"), profile)
    for event in ("abort", "pause", "same prompt", "weights"):
        assert (event, True) in seen, f"{event} met a meeting"


def beside(folder: str, profile: str, chunk: str) -> tuple:
    """Passes between the tokens of a decoding request, with a meeting and with a plain prefill."""
    core, first = start("hidden", folder, profile, "--chunked-prefill-size", chunk)
    history = [*PROMPT, *first, *FOLLOW]
    widest = {}
    batches = core.scheduler.run_batch
    for salt in (None, "nobody's"):
        computed, gaps, asked = [0], [0], []

        def run_batch(batch: Any, *args: Any, computed=computed, gaps=gaps, **kwargs: Any) -> Any:
            if batch.forward_mode.is_extend():
                computed[0] += sum(batch.extend_lens)
            else:
                gaps.append(computed[0])
                computed[0] = 0
            return batches(batch, *args, **kwargs)

        def arrive(number: int, salt=salt, asked=asked) -> None:
            if number == 6:
                asked.append(core.submit(history, 4, salt=salt))

        core.scheduler.run_batch = run_batch
        core.submit(FOLLOW, 60)
        run(core, arrive)
        core.scheduler.run_batch = batches
        widest[salt] = max(gaps), core.reply(asked[0])
        forget(core)
    return widest[None], widest["nobody's"], core.tree.stats().get("meetings", 0)


@pytest.mark.parametrize("chunk", ["4096", "100"])
def test_beside_a_decoding_request_no_gap_is_longer_than_a_plain_prefill(
    wanted: dict, profile: str, tmp_path: Path, chunk: str
) -> None:
    """Counted in tokens that are computed between two steps of the request that decodes."""
    met, plain, meetings = run_in_child(beside, str(tmp_path / "d"), profile, chunk)
    assert met[1].tokens == plain[1].tokens == wanted["hidden"][1][:4]
    assert met[0] <= plain[0] and plain[0] > 0
    assert meetings <= 1


def exact(folder: str, profile: str) -> tuple[Any, bool]:
    core, first = start("kv", folder, profile, "--hc-exact")
    _, seen = counted(core, lambda: core.ask([*PROMPT, *first, *FOLLOW], 24))
    return seen, core.tree.tiers.restorer.path.recomputer is not None


def test_exactness_lets_a_computed_front_in_only_where_it_was_proven(
    profile: str, tmp_path: Path
) -> None:
    seen, proven = run_in_child(exact, str(tmp_path / "d"), profile)
    assert ("meetings" in seen) == proven


def pid_of(core: Core) -> int:
    return core.tree.tiers.capture.filing.executor.supervisor.pid


def killed(folder: str, profile: str, when: int) -> tuple[Reply, list[bool]]:
    """The I/O process dies at the top of this pass of the request."""
    core, first = start("hidden:2,kv:2", folder, profile, "--hc-io", "process")
    rid, met = core.submit([*PROMPT, *first, *FOLLOW], 24), []

    def happen(number: int) -> None:
        if number == 2:  # the reads are surely under way when it dies
            os.kill(pid_of(core), signal.SIGSTOP)
        if number == when:
            met.append(core.tree.tiers.queue.meeting_of(rid) is not None)
            os.kill(pid_of(core), signal.SIGKILL)

    def ask() -> Reply:
        run(core, happen)
        return core.reply(rid)

    return counted(core, ask)[0], met


@pytest.mark.parametrize("when", [2, 3, 4, 5])
def test_an_io_process_that_dies_in_the_middle_costs_the_rest_of_the_history(
    wanted: dict, profile: str, tmp_path: Path, when: int
) -> None:
    reply, met = run_in_child(killed, str(tmp_path / "d"), profile, when)
    assert reply.tokens == wanted["hidden:2,kv:2"][1]
    assert len(met) == 1


def whole(folder: str, profile: str) -> dict[str, int]:
    flags = "--chunked-prefill-size", "-1", "--mem-fraction-static", "0.5"
    core, first = start("kv", folder, profile, *flags)
    return counted(core, lambda: core.ask([*PROMPT, *first, *FOLLOW], 24))[1]


def test_without_chunks_there_is_no_meeting(profile: str, tmp_path: Path) -> None:
    assert "meetings" not in run_in_child(whole, str(tmp_path / "d"), profile)
