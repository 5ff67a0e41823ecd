"""Two ranks, tensor-parallel or stages of a pipeline, of which one's I/O is late, or answers
nothing: nobody hangs, tokens are the same, and both ranks take the same decisions, line by line.
And what agreeing costs.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.policy.correction import Resource
from sglang_hc.ranks.agreement import Agreement
from sglang_hc.store.outcome import Outcome
from support import profiles
from support.core import Core
from support.decisions import note_decisions
from support.prompts import in_store, on_disk
from support.ranked_core import CORES, RankedCore, StagedCore, run_ranks

TALKS = 6
MORE_AT_ONCE = ("--max-running-requests", "6")
"""A pipeline divides them by its stages."""

FLAGS = (
    "--max-total-tokens", "1200", "--dtype", "float32", "--hc-host-size-gb", "0.008",
    "--max-running-requests", "3", "--random-seed", "1",
)  # fmt: skip
"""For a device that holds the requests that run, and a host tier that holds two or three of
the conversations."""


def talk(core: Core, after_turn: Callable[[int], None]) -> list[str]:
    """Three turns of `TALKS` conversations, every fifth with a salt of its own, and in each turn a
    request that is aborted while it waits. Returns the names of the answered requests."""
    rng = random.Random(5)
    system = rng.choices(range(3, 900), k=100)
    histories = [system + rng.choices(range(3, 900), k=90) for _ in range(TALKS)]
    salts = ["other" if number % 5 == 0 else None for number in range(TALKS)]
    answered: list[str] = []
    for turn in range(3):
        now = [core.submit(h, 8, s) for h, s in zip(histories, salts, strict=True)]
        core.abort(core.submit(histories[0][:150], 8))
        core.run()
        after_turn(turn)
        answered += now
        histories = [
            h + core.reply(rid).tokens + [7, 8, 9 + turn]
            for h, rid in zip(histories, now, strict=True)
        ]
    return answered


LATE = 1
"""The rank whose I/O is late."""


class Late:
    """An executor, a disk or a store whose answers come `seconds` late; every fourth one to a read
    or a look-up is lost, and a deadline makes a no of it. Of three blocks of a path some come."""

    def __init__(self, inner: Any, seconds: float, *, loses: bool = False) -> None:
        self._inner = inner
        self._seconds = seconds
        self._loses = loses
        self._held: list[tuple[float, Any]] = []
        self._reads: dict[int, int] = {}

    def read(self, ticket: int, *others: Any) -> None:
        self._reads[ticket] = len(self._reads)
        self._inner.read(ticket, *others)

    def poll(self) -> list[Any]:
        now, held = time.monotonic(), self._held
        for done in self._inner.poll():
            if self._loses and self._is_lost(done.ticket):
                late = done._replace(outcome=Outcome.TIMED_OUT)
                held.append((now + 3 * self._seconds, late))
            else:
                held.append((now + self._seconds, done))
        self._held = [late for late in held if late[0] > now]
        return [done for at, done in held if at <= now]

    def _is_lost(self, ticket: int) -> bool:
        """Those of look-ups are below zero."""
        return ticket % 4 == 1 if ticket < 0 else self._reads.get(ticket, 0) % 4 == 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class OneByOne:
    """A disk that answers one read in each poll, however fast it is."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._read: set[int] = set()
        self._held: deque[Any] = deque()

    def read(self, ticket: int, *others: Any) -> None:
        self._read.add(ticket)
        self._inner.read(ticket, *others)

    def poll(self) -> list[Any]:
        done = self._inner.poll()
        self._held.extend(one for one in done if one.ticket in self._read)
        others = [one for one in done if one.ticket not in self._read]
        return [*others, self._held.popleft()] if self._held else others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def wrap_below(ranks: Agreement, wrap: Callable[[Any], Any]) -> None:
    """Put something around what this rank has below its host tier."""
    for blocks in ranks._blocks.values():
        blocks._inner = wrap(blocks._inner)


def below(what: str, folder: str) -> tuple[str, ...]:
    """Flags of a disk, a store of files, or both, in this folder."""
    disk = on_disk(f"{folder}/disk") if "disk" in what else ()
    return (*disk, *(in_store(f"{folder}/store") if "store" in what else ()))


def run(
    rank: int, port: int, kind: str, what: str, folder: str, scatter: float, io: float, loses: bool
) -> tuple:
    core = CORES[kind](
        rank, port, *FLAGS, "--hc-forms", "hidden:2,kv:2", *below(what, folder),
        *(MORE_AT_ONCE if kind == "pp" else ()),
    )  # fmt: skip
    ranks, notes = core.tree.tiers.ranks, []
    note_decisions(core.tree.tiers, notes)
    if rank == LATE:
        ranks._executor._inner = Late(ranks._executor._inner, scatter)
        wrap_below(ranks, lambda inner: Late(inner, io, loses=loses))

    def forget(turn: int) -> None:
        if turn == 1:
            core.forget()

    rids = talk(core, forget)
    core.settle()
    counts = core.tree.tiers.counts()
    core.tree.release_host_resources()
    return [core.reply(rid).tokens for rid in rids], counts, notes


@pytest.mark.parametrize(
    ("kind", "what", "scatter", "io", "loses"),
    [
        pytest.param("tp", "disk", 0.0, 2.0, False, marks=pytest.mark.slow),
        pytest.param("tp", "disk", 2.0, 0.0, False, marks=pytest.mark.slow),
        ("tp", "disk", 0.3, 0.5, True),
        pytest.param("tp", "store", 0.0, 1.0, False, marks=pytest.mark.slow),
        pytest.param("tp", "store", 0.3, 0.5, True, marks=pytest.mark.slow),
        pytest.param("tp", "disk+store", 0.3, 0.5, True, marks=pytest.mark.slow),
        pytest.param("pp", "disk", 0.0, 2.0, False, marks=pytest.mark.slow),
        pytest.param("pp", "disk", 2.0, 0.0, False, marks=pytest.mark.slow),
        pytest.param("pp", "disk", 0.3, 0.5, True, marks=pytest.mark.slow),
        pytest.param("pp", "store", 0.3, 0.5, True, marks=pytest.mark.slow),
    ],
)
def test_one_late_rank(
    models: None, tmp_path: Path, kind: str, what: str, scatter: float, io: float, loses: bool
) -> None:
    tokens = []
    for name, (late_scatters, late_io, lost) in {
        "in-time": (0.0, 0.0, False),
        "late": (scatter, io, loses),
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (said, counts, notes), (same, others, noted) = run_ranks(
            run, kind, what, str(folder), late_scatters, late_io, lost
        )
        tokens.append(said)
        assert said == same
        assert notes == noted and len(notes) > 300
        assert counts["restored_tokens"] > 0
        failed = {key: count for key, count in counts.items() if key.startswith("rank")}
        may_fail = {f"rank{LATE}_{kind}_timed_out" for kind in ("block", "remote", "lookup")}
        assert set(failed) <= (may_fail if lost else set())
        if lost:
            assert without_ranks(counts) == without_ranks(others)
            ends = ["disk_read"] if "disk" in what else ["remote_read", "remote_lookup"]
            assert sum(counts.get(f"{end}_timed_out", 0) for end in ends) > 0
            assert failed
    assert tokens[0] == tokens[1]


def without_ranks(counts: dict[str, int]) -> dict[str, int]:
    """What ranks count alike: only the first one counts whose part of a block failed."""
    return {name: n for name, n in counts.items() if not name.startswith("rank")}


PROMPT = random.Random(3).choices(range(3, 900), k=700)
FOLLOW = random.Random(4).choices(range(3, 900), k=20)


def meet(rank: int, port: int, what: str, folder: str, profile: str, loses: bool) -> tuple:
    """A long history that only the disks or the store have is computed from its front while its end
    is read."""
    core = RankedCore(
        rank, port, "--hc-forms", "hidden:2,kv:2", *below(what, folder), "--dtype", "float32",
        "--max-total-tokens", "4000", "--hc-host-size-gb", "0.2", "--chunked-prefill-size", "512",
        profile=profile,
    )  # fmt: skip
    first = core.ask(PROMPT, 30).tokens
    core.forget()
    costs = core.tree.tiers.restorer.planner.costs
    costs.observe({Resource.REMOTE: 1.0}, 2e-4)  # as the profile says of the disk
    core.believe_profile()
    if rank == LATE:
        wrap = partial(Late, seconds=0.1, loses=True) if loses else OneByOne
        wrap_below(core.tree.tiers.ranks, wrap)
    history = [*PROMPT, *first, *FOLLOW]
    reply = core.ask(history, 24)
    core.settle()
    assert core.ask(PROMPT, 30, "kept").tokens == first
    kept = core.ask(history, 24, "kept")
    assert kept.device > len(PROMPT) and kept.tokens == reply.tokens
    return reply, without_ranks(core.tree.tiers.counts())


@pytest.mark.slow
@pytest.mark.parametrize("what", ["disk", "store"])
@pytest.mark.parametrize("loses", [False, True])
def test_a_history_is_met_by_both_ranks_at_one_point(
    models: None, tmp_path: Path, what: str, loses: bool
) -> None:
    cost = profiles.cost_model(host=1e-6, disk=2e-4, prefill=1e-3)  # nearly all is read
    profile = profiles.write(cost, tmp_path)
    one, two = run_ranks(meet, what, str(tmp_path), profile, loses)
    assert one == two
    _, counts = one
    assert counts["meetings"] == 1
    if not loses:
        assert counts["meetings_restored"] == 1
        assert 0 < counts["early_restored_tokens"] <= counts["restored_tokens"]


COLLECTIVES = ("broadcast", "all_reduce", "all_gather", "all_gather_into_tensor", "barrier")
MESSAGES = ("isend", "irecv", "send", "recv", "broadcast", "all_reduce", "all_gather", "barrier")


def count_calls(names: Sequence[str]) -> Counter[str]:
    """Of `torch.distributed` in this process, from now on."""
    import torch.distributed as dist

    made: Counter[str] = Counter()
    for name in names:
        original = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kw: Any) -> Any:
            made[_name] += 1
            return _original(*args, **kw)

        setattr(dist, name, counted)
    return made


def count_collectives(rank: int, port: int, *flags: str) -> tuple[list[Counter[str]], float]:
    """Collectives in each of the passes in which one request decodes and nothing else happens, and
    the mean seconds of a pass."""
    core = RankedCore(
        rank, port, "--max-total-tokens", "1200", "--dtype", "float32", "--random-seed", "1", *flags
    )
    made = count_calls(COLLECTIVES)
    core.submit(PROMPT[:100], 150)
    core.run(10)
    passes: list[Counter[str]] = []
    began = time.perf_counter()
    for _ in range(12):
        made.clear()
        core.run(10)
        passes.append(made.copy())
    return passes, (time.perf_counter() - began) / 120


def test_a_quiet_pass_has_no_collective_more_than_sglangs_own(models: None, tmp_path: Path) -> None:
    """Of passes in tens: those in which a snapshot's scatter or a save ended have one broadcast
    more each."""
    plain, _ = run_ranks(count_collectives, "--hc-disable")[0]
    store = below("store", str(tmp_path))
    ours, _ = run_ranks(count_collectives, "--hc-forms", "hidden:2,kv:2", *store)[0]
    assert len({tuple(sorted(some.items())) for some in plain}) == 1
    more = [some - plain[0] for some in ours]
    assert all(set(some) <= {"broadcast"} for some in more)
    assert sum(not some for some in more) >= 10, more


def clear(rank: int, port: int, folder: str) -> dict[str, Any]:
    """Requests that clear something, while a request runs and when none does. What the second
    stage saves is in place late."""
    from sglang.srt.managers import io_struct

    core = StagedCore(
        rank, port, "--hc-forms", "hidden:2,kv:2", "--hc-disk", f"{folder}:1", "--dtype", "float32",
        "--max-total-tokens", "1200", "--hc-host-size-gb", "0.2", "--chunked-prefill-size", "256",
    )  # fmt: skip
    ranks = core.tree.tiers.ranks
    if rank == LATE:
        ranks._executor._inner = Late(ranks._executor._inner, 0.3)
    answers: dict[str, list[bool]] = {}
    core.scheduler.ipc_channels.send_to_tokenizer.send_output = lambda answer, _: (
        answers.setdefault(type(answer).__name__, []).append(getattr(answer, "success", True))
    )
    weights = io_struct.UpdateWeightFromDiskReqInput(
        model_path=core.args.model_path, load_format="auto", flush_cache=False
    )
    receive, passes = core.scheduler.request_receiver.recv_requests, itertools.count()

    def while_it_runs(**given: Any) -> list[Any]:
        if next(passes) == 12:
            core.inbox.extend([weights, io_struct.ClearHiCacheReqInput()])
        received: list[Any] = receive(**given)
        return received

    core.scheduler.request_receiver.recv_requests = while_it_runs
    said = core.ask(PROMPT, 30).tokens
    core.inbox.append(io_struct.FlushCacheReqInput())
    core.run()
    again = core.ask([*PROMPT, *said], 8)
    core.inbox.extend([io_struct.ClearHiCacheReqInput(), io_struct.FlushCacheReqInput()])
    core.run()
    cleared = core.ask([*PROMPT, *said], 8)
    core.inbox.append(weights)
    core.run()
    other = core.ask([*PROMPT, *said], 8, "other")
    core.settle()
    return {"again": again, "cleared": cleared, "other": other.tokens, "answers": answers}


def test_a_pipeline_is_cleared_when_nothing_is_between_its_stages(
    models: None, tmp_path: Path
) -> None:
    """Both stages come to the place where they wait for each other's votes, although SGLang hands
    a request on when it was handled; weights and the disk are left alone while a batch runs."""
    first, second = run_ranks(clear, str(tmp_path / "d"))
    assert first == second
    assert first["again"].storage > 600 and first["cleared"].cached == 0
    assert first["again"].tokens == first["cleared"].tokens == first["other"]
    assert first["answers"]["UpdateWeightFromDiskReqOutput"] == [False, True]
    assert first["answers"]["ClearHiCacheReqOutput"] == [False, True]


def count_messages(rank: int, port: int, *flags: str) -> list[Counter[str]]:
    """Messages of each pass of the event loop, from the first to the last of one request."""
    core = StagedCore(
        rank, port, "--max-total-tokens", "1200", "--dtype", "float32", "--random-seed", "1", *flags
    )
    made = count_calls(MESSAGES)
    passes: list[Counter[str]] = []
    receive = core.scheduler.request_receiver.recv_requests

    def noted(**given: Any) -> Any:
        passes.append(made.copy())
        made.clear()
        return receive(**given)

    core.scheduler.request_receiver.recv_requests = noted
    core.submit(PROMPT[:100], 80)
    core.run()
    return passes


def test_a_quiet_pass_of_a_stage_has_no_message_more_than_sglangs_own(models: None) -> None:
    """A pass with verdicts has one more, as one with a request has: SGLang sends the size of what
    it sends first, and nothing behind a size of 0."""
    plain = run_ranks(count_messages, "--hc-disable")
    ours = run_ranks(count_messages, "--hc-forms", "hidden:2,kv:2")
    for own, other, message in zip(ours, plain, ("isend", "irecv"), strict=True):
        quiet = [some for some in own if some in other]
        told = [some for some in own if some not in other]
        assert all(some - Counter([message]) in other for some in told)
        assert len(quiet) > 150 and len(told) < 20
