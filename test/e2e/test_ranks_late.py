"""Two ranks, tensor-parallel or stages of a pipeline, of which one's I/O is late, or answers
nothing: nobody hangs, tokens are the same, and both ranks take the same decisions, line by line.
And what agreeing costs.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.store.outcome import Outcome
from support import profiles
from support.branching_talks import FLAGS, talk
from support.ranked_core import CORES, RankedCore, StagedCore, run_ranks

TALKS = 6
MORE_AT_ONCE = ("--max-running-requests", "6")
"""A pipeline divides them by its stages."""

LATE = 1
"""The rank whose I/O is late."""


class Late:
    """An executor or a disk whose answers come `seconds` late; every third read's is lost, and a
    deadline makes a no of it."""

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
        now = time.monotonic()
        for done in self._inner.poll():
            if self._loses and self._reads.get(done.ticket, 1) % 3 == 0:
                late = done._replace(outcome=Outcome.TIMED_OUT)
                self._held.append((now + 3 * self._seconds, late))
            else:
                self._held.append((now + self._seconds, done))
        due = [done for at, done in self._held if at <= now]
        self._held = [held for held in self._held if held[0] > now]
        return due

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


def run(
    rank: int, port: int, kind: str, folder: str, scatter: float, disk: float, loses: bool
) -> tuple:
    core = CORES[kind](
        rank, port, *FLAGS, "--hc-forms", "hidden:2,kv:2", "--hc-disk", f"{folder}/disk:1",
        "--hc-trace", f"{folder}/t.jsonl", *(MORE_AT_ONCE if kind == "pp" else ()),
    )  # fmt: skip
    ranks = core.tree.tiers.ranks
    if rank == LATE:
        ranks._executor._inner = Late(ranks._executor._inner, scatter)
        ranks._blocks._inner = Late(ranks._blocks._inner, disk, loses=loses)

    def forget(turn: int) -> None:
        if turn == 1:
            core.settle()
            assert core.scheduler.flush_cache()

    rids = talk(core, TALKS, forget)
    core.settle()
    counts = core.tree.tiers.counts()
    core.tree.release_host_resources()
    return [core.reply(rid).tokens for rid in rids], counts


def decisions(folder: Path, kind: str, rank: int) -> list[dict[str, Any]]:
    """The trace of a rank. Token ids are made unreadable by a secret of each file; a stage of a
    pipeline has layers of its own."""
    lines = [json.loads(line) for line in (folder / f"t.jsonl.{kind}{rank}").open()]
    for line in lines:
        line.pop("tokens", None)
    if kind == "pp":
        del lines[0]["slot_bytes"], lines[0]["layer_plan"]
    return lines


@pytest.mark.parametrize(
    ("kind", "scatter", "disk", "loses"),
    [
        pytest.param("tp", 0.0, 2.0, False, marks=pytest.mark.slow),
        pytest.param("tp", 2.0, 0.0, False, marks=pytest.mark.slow),
        ("tp", 0.3, 0.5, True),
        pytest.param("pp", 0.0, 2.0, False, marks=pytest.mark.slow),
        pytest.param("pp", 2.0, 0.0, False, marks=pytest.mark.slow),
        pytest.param("pp", 0.3, 0.5, True, marks=pytest.mark.slow),
    ],
)
def test_one_late_rank(
    models: None, tmp_path: Path, kind: str, scatter: float, disk: float, loses: bool
) -> None:
    tokens = []
    for name, (late_scatters, late_disk, lost) in {
        "in-time": (0.0, 0.0, False),
        "late": (scatter, disk, loses),
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (said, counts), (same, others) = run_ranks(
            run, kind, str(folder), late_scatters, late_disk, lost
        )
        tokens.append(said)
        assert said == same
        trace = decisions(folder, kind, 0)
        assert trace == decisions(folder, kind, 1)
        assert len(trace) > 300 and counts["restored_tokens"] > 0
        failed = {key: count for key, count in counts.items() if key.startswith("rank")}
        assert set(failed) <= ({f"rank{LATE}_block_timed_out"} if lost else set())
        if lost:
            assert counts["disk_read_timed_out"] == others["disk_read_timed_out"] > 0
            assert failed
    assert tokens[0] == tokens[1]


PROMPT = random.Random(3).choices(range(3, 900), k=700)
FOLLOW = random.Random(4).choices(range(3, 900), k=20)


def meet(rank: int, port: int, folder: str, profile: str, loses: bool) -> tuple:
    """A long history that only the disks have is computed from its front while its end is read."""
    core = RankedCore(
        rank, port, "--hc-forms", "hidden:2,kv:2", "--hc-disk", f"{folder}:1", "--dtype", "float32",
        "--max-total-tokens", "4000", "--hc-host-size-gb", "0.2", "--chunked-prefill-size", "512",
        profile=profile,
    )  # fmt: skip
    first = core.ask(PROMPT, 30).tokens
    core.settle()
    assert core.scheduler.flush_cache()
    if rank == LATE:
        ranks = core.tree.tiers.ranks
        blocks = ranks._blocks._inner
        ranks._blocks._inner = Late(blocks, 0.1, loses=True) if loses else OneByOne(blocks)
    history = [*PROMPT, *first, *FOLLOW]
    reply = core.ask(history, 24)
    core.settle()
    assert core.ask(PROMPT, 30, "kept").tokens == first
    kept = core.ask(history, 24, "kept")
    assert kept.device > len(PROMPT) and kept.tokens == reply.tokens
    counts = core.tree.tiers.counts()
    return reply, {name: n for name, n in counts.items() if not name.startswith("rank")}


@pytest.mark.slow
@pytest.mark.parametrize("loses", [False, True])
def test_a_history_is_met_by_both_ranks_at_one_point(
    models: None, tmp_path: Path, loses: bool
) -> None:
    cost = profiles.cost_model(host=1e-6, disk=2e-4, prefill=1e-3)  # nearly all is read
    profile = profiles.write(cost, tmp_path)
    one, two = run_ranks(meet, str(tmp_path / "d"), profile, loses)
    assert one == two
    _, counts = one
    assert counts["meetings"] == 1
    if not loses:
        assert counts["meetings_restored"] == 1
        assert 0 < counts["early_restored_tokens"] <= counts["restored_tokens"]


def count_collectives(rank: int, port: int, *flags: str) -> tuple[list[Counter[str]], float]:
    """Collectives in each of the passes in which one request decodes and nothing else happens, and
    the mean seconds of a pass."""
    import torch.distributed as dist

    core = RankedCore(
        rank, port, "--max-total-tokens", "1200", "--dtype", "float32", "--random-seed", "1", *flags
    )
    made: Counter[str] = Counter()
    for name in ("broadcast", "all_reduce", "all_gather", "all_gather_into_tensor", "barrier"):
        original = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kw: Any) -> Any:
            made[_name] += 1
            return _original(*args, **kw)

        setattr(dist, name, counted)
    core.submit(PROMPT[:100], 150)
    core.run(10)
    passes: list[Counter[str]] = []
    began = time.perf_counter()
    for _ in range(12):
        made.clear()
        core.run(10)
        passes.append(made.copy())
    return passes, (time.perf_counter() - began) / 120


def test_a_quiet_pass_has_no_collective_more_than_sglangs_own(models: None) -> None:
    """Of passes in tens: those in which a snapshot's scatter ended have one broadcast more each."""
    plain, _ = run_ranks(count_collectives, "--hc-disable")[0]
    ours, _ = run_ranks(count_collectives, "--hc-forms", "hidden:2,kv:2")[0]
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

    def while_it_runs() -> list[Any]:
        if next(passes) == 12:
            core.inbox.extend([weights, io_struct.ClearHiCacheReqInput()])
        received: list[Any] = receive()
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


MESSAGES = ("isend", "irecv", "send", "recv", "broadcast", "all_reduce", "all_gather", "barrier")


def count_messages(rank: int, port: int, *flags: str) -> list[Counter[str]]:
    """Messages of each pass of the event loop, from the first to the last of one request."""
    import torch.distributed as dist

    core = StagedCore(
        rank, port, "--max-total-tokens", "1200", "--dtype", "float32", "--random-seed", "1", *flags
    )
    made: Counter[str] = Counter()
    for name in MESSAGES:
        original = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kw: Any) -> Any:
            made[_name] += 1
            return _original(*args, **kw)

        setattr(dist, name, counted)
    passes: list[Counter[str]] = []
    receive = core.scheduler.request_receiver.recv_requests

    def noted() -> Any:
        passes.append(made.copy())
        made.clear()
        return receive()

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
