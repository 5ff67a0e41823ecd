"""How long a read may take, and what is learned from those that came."""

from __future__ import annotations

import pytest

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store import lower_tier
from sglang_hc.store.block import Block
from sglang_hc.store.chain import Chain
from sglang_hc.store.disk.format import LABEL_MAX
from sglang_hc.store.lower_tier import LENIENCE, READ_DEADLINE_S, LowerTier
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.read_watch import ReadWatch
from sglang_hc.tree.block_tree import BlockNode
from support.clock import Clock
from support.fake_io import FakeIo
from support.host import host_tier, keep, path_of, tokens_of

BLOCK_SECONDS = 3.0
WORDS = ("ab", "cd", "ef", "gh")
BLOCKS = sum(map(len, WORDS))

Reads = list[tuple[SourceTier, int, float]]


class World:
    """A remote store that brings one block after the other."""

    def __init__(self, expected: float) -> None:
        """expected: seconds per block; 0 while nothing is known."""
        self.clock, self.expected, self.seen = Clock(0.0), expected, Reads()
        self.host = host_tier(3 * BLOCKS)
        self.io = FakeIo(clock=self.clock)
        self.disk = LowerTier(
            self.io, self.host, self.clock, self.read, block_seconds=lambda tier: self.expected
        )

    def read(self, tier: SourceTier, blocks: int, seconds: float) -> None:
        self.seen.append((tier, blocks, seconds))
        self.expected = seconds / blocks

    def fetch(self, words: tuple[str, ...]) -> None:
        for word in words:
            path = path_of(word)
            self.io.hold(path.block_ids)
            self.io.far.update(path.block_ids)
            assert self.disk.fetch(path, 0, len(word)) == len(word)

    def serve(self, seconds: float) -> tuple[int, int]:
        """Each block takes so long. Returns how many came, and how many were late."""
        before = self.disk.counters.copy()
        while self.io.moves:
            self.clock.pass_time(seconds)
            self.disk.poll()
            self.io.step(at=self.clock.now)
            self.disk.poll()
        new = self.disk.counters - before
        return new["remote_loaded_blocks"], new["remote_read_timed_out"]


def test_reads_that_are_given_up_count_for_their_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a remote directory counted as failures of a disk."""
    monkeypatch.setattr(lower_tier, "DRAIN_S", 0.0)
    world = World(BLOCK_SECONDS)
    world.fetch(("ab",))
    world.disk.drain()
    assert world.disk.counters["remote_read_stuck"] == 2
    assert world.disk.counters["disk_read_stuck"] == 0


SLOWEST = LENIENCE * BLOCK_SECONDS + READ_DEADLINE_S / BLOCKS
"""Seconds per block at which the last one comes just when it is late."""


@pytest.mark.parametrize(("seconds", "late"), [(SLOWEST - 0.01, 0), (SLOWEST, 1)])
def test_a_block_is_not_late_because_of_others_that_were_asked_for_before_it(
    seconds: float, late: int
) -> None:
    """A slow store has a long line of blocks to bring, for several requests."""
    world = World(BLOCK_SECONDS)
    world.fetch(WORDS)
    assert world.serve(seconds) == (BLOCKS - late, late)


def test_the_speed_of_a_store_that_is_too_slow_at_first_is_known_then() -> None:
    world = World(0.0)
    world.fetch(WORDS)
    assert world.serve(BLOCK_SECONDS) == (3, BLOCKS - 3)
    assert world.seen == [(SourceTier.REMOTE, 3, 3 * BLOCK_SECONDS)]
    world.fetch(("ijkl", "mnop"))
    assert world.serve(BLOCK_SECONDS) == (8, 0)


def test_a_store_of_which_nothing_came_says_nothing() -> None:
    world = World(0.0)
    world.fetch(WORDS)
    assert world.serve(READ_DEADLINE_S) == (0, BLOCKS)
    assert world.seen == []


def reads() -> tuple[ReadWatch, Reads]:
    found = Reads()
    return ReadWatch(SourceTier.DISK, lambda *seen: found.append(seen)), found


def test_reads_that_overlap_are_one_observation() -> None:
    disk, found = reads()
    disk.asked(2, 100.0, idle=True)
    disk.came(Outcome.OK, 101.0, 101.0)
    disk.asked(1, 101.5, idle=True)
    disk.came(Outcome.OK, 104.0, 104.0)
    assert found == []
    disk.came(Outcome.OK, 103.0, 103.0)
    assert found == [(SourceTier.DISK, 3, 4.0)]
    disk.asked(1, 200.0, idle=True)
    disk.came(Outcome.OK, 200.5, 200.5)
    assert found[1:] == [(SourceTier.DISK, 1, 0.5)]


def test_a_tier_came_last_when_it_last_answered_whatever_it_said() -> None:
    disk, _ = reads()
    disk.asked(5, 0.0, idle=True)
    assert disk.ended == 0.0
    disk.came(Outcome.OK, 3.0, 9.0)
    disk.came(Outcome.OK, 2.0, 9.0)  # another thread's, told later
    assert disk.ended == 3.0
    disk.came(Outcome.TIMED_OUT, 8.0, 9.0)
    assert disk.ended == 3.0, "that is no answer"
    disk.came(Outcome.MISSING, 5.0, 9.0)
    assert disk.ended == 5.0
    disk.came(Outcome.OK, None, 9.0)
    assert disk.ended == 9.0, "when it was told"


def test_what_is_disturbed_says_nothing_and_the_next_reads_do() -> None:
    disk, found = reads()
    disk.asked(1, 0.0, idle=False)
    disk.came(Outcome.OK, 1.0, 1.0)
    disk.asked(1, 2.0, idle=True)
    disk.disturbed()
    disk.came(Outcome.OK, 3.0, 3.0)
    disk.asked(2, 4.0, idle=True)
    disk.came(Outcome.IO_ERROR, 5.0, 5.0)
    disk.came(Outcome.OK, 5.0, 5.0)
    disk.asked(1, 6.0, idle=True)
    disk.came(Outcome.OK, None, 7.0)
    assert found == []
    disk.asked(1, 8.0, idle=True)
    disk.came(Outcome.OK, 9.0, 9.0)
    assert found == [(SourceTier.DISK, 1, 1.0)]


def test_it_is_busy_while_an_answer_is_on_its_way() -> None:
    world = World(0.0)
    assert not world.disk.is_busy
    world.fetch(("ab",))
    assert world.disk.is_busy
    world.serve(1.0)
    assert not world.disk.is_busy
    for asks in (True, False):
        world.io.ask = lambda block_ids, asks=asks: asks  # type: ignore[method-assign]
        found = world.disk.find(path_of("cd").block_ids)
        assert world.disk.is_busy == asks and found == (None if asks else 0)


@pytest.mark.parametrize("outcome", [Outcome.IO_ERROR, Outcome.NO_SPACE, Outcome.TIMED_OUT])
def test_a_write_that_failed_is_done_when_its_path_is_used_and_writes_end_well(
    outcome: Outcome,
) -> None:
    """Blocks stayed in memory alone for as long as they were there, however often they were used,
    and were computed again after that."""
    host, io = host_tier(8), FakeIo(writes_wait=True)
    disk = LowerTier(io, host)
    path, (other,) = keep(host, tokens_of("abc")), keep(host, tokens_of("x"))
    for node in path[:2]:
        disk.write_through(node)
    io.end_all(outcome)
    disk.poll()
    io.up = False
    disk.write_through(path[2])
    disk.poll()
    disk.path_used(path)
    io.up = True
    disk.path_used(path)
    assert not io.moves and disk.counters["disk_save_dropped"] == 1, "nothing has ended well yet"
    disk.write_through(other)
    io.end_all()
    disk.poll()
    disk.path_used([other])
    assert not io.moves, "nobody has used the others"
    disk.path_used(path)
    disk.path_used(path)
    assert [move.block_id for move in io.moves] == [node.block_id for node in path]
    io.end_all()
    disk.poll()
    disk.path_used(path)
    assert not io.moves and io.held() == {node.block_id for node in [*path, other]}
    assert not any(node.pins for node in host.tree.nodes())


@pytest.mark.parametrize("outcome", [None, Outcome.NO_SPACE, Outcome.IO_ERROR])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_only_the_remote_store_took_is_on_disk_too_when_that_is_well_again(
    outcome: Outcome | None, is_first: bool
) -> None:
    """A write counted as it ended last, mostly in the store, and the disk never got the block.
    outcome: of the write to disk; None where it is dropped at once."""
    host, near, far = host_tier(8), FakeIo(writes_wait=True), FakeIo(writes_wait=True)
    disk = LowerTier(Chain(near, far), host)
    path, (other,) = keep(host, tokens_of("ab")), keep(host, tokens_of("x"))
    far.far = {node.block_id for node in [*path, other]}
    near.up = outcome is not None
    for node in path:
        disk.write_through(node)
    near.up = True
    for holder in (near, far) if is_first else (far, near):
        holder.end_all(Outcome.OK if holder is far or outcome is None else outcome)
        disk.poll()
    failed = "disk_save_dropped" if outcome is None else f"disk_write_{outcome.value}"
    assert disk.counters == {"remote_saved_blocks": 2, failed: 2}
    assert not any(node.pins for node in path)
    disk.write_through(other)
    for holder in (near, far):
        holder.end_all()
    disk.poll()
    disk.path_used(path)
    near.end_all()
    disk.poll()
    assert not far.moves and near.held() == far.held() == far.far
    assert not any(node.pins for node in path)


def test_so_many_blocks_are_remembered_as_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_tier, "MOST_UNSAVED", 2)
    host, io = host_tier(8), FakeIo(writes_wait=True)
    disk = LowerTier(io, host)
    path, (other,) = keep(host, tokens_of("abc")), keep(host, tokens_of("x"))
    for node in path:
        disk.write_through(node)
    io.end_all(Outcome.IO_ERROR)
    disk.poll()
    disk.write_through(other)
    io.end_all()
    disk.poll()
    disk.path_used(path)
    assert [move.block_id for move in io.moves] == [node.block_id for node in path[1:]]


def test_a_write_waits_for_half_a_minute() -> None:
    clock, host = Clock(0.0), host_tier(8)
    io = FakeIo(writes_wait=True, clock=clock)
    disk = LowerTier(io, host, clock)
    (node,) = keep(host, tokens_of("a"))
    disk.write_through(node)
    clock.now = 29.9
    disk.poll()
    assert disk.busy and node.pins
    clock.now = 30.0
    disk.poll()
    assert not disk.busy and not node.pins and disk.counters["disk_write_timed_out"] == 1


@pytest.mark.parametrize("salt", ["\ud800" * 5, "s" * 20_000, "ä" * 20_000, None])
def test_a_block_is_sent_with_a_label_that_fits(salt: str | None) -> None:
    host, io = host_tier(2), FakeIo()
    sent: list[Block] = []
    io.write = lambda ticket, block, slot, deadline: sent.append(block)
    disk = LowerTier(io, host)
    (node,) = keep(host, tokens_of("a"), salt)
    disk.write_through(node)
    (block,) = sent
    assert len(block.namespace.encode()) <= LABEL_MAX


def saved(words: tuple[str, ...]) -> tuple[LowerTier, FakeIo, dict[str, BlockNode]]:
    """Paths in host memory and below; the last block of each."""
    host, io = host_tier(16), FakeIo()
    disk, last = LowerTier(io, host), {}
    for word in words:
        keep(host, tokens_of(word))
        path = host.tree.match(path_of(word).prefix).nodes
        for node in path:
            disk.write_through(node)
        last[word] = path[-1]
    disk.drain()
    return disk, io, last


def test_a_dropped_branch_is_removed_and_nothing_behind_it_is_looked_for_or_written() -> None:
    disk, io, last = saved(("ab", "abc", "abd", "xy"))
    b = last["ab"]
    disk.drop_branch(b)
    while disk.busy:
        disk.poll()
    assert [io.contains([path_of(word).block_ids[-1]]) for word in ("a", "ab", "abc", "xy")] == [
        1, 0, 0, 1,
    ]  # fmt: skip
    io.hold(path_of("abz").block_ids)  # a store that others write too
    assert disk.trusted(path_of("abz")) == path_of("a")
    assert disk.trusted(path_of("xyz")) == path_of("xyz")
    assert not disk.holds(b.block_id)
    disk.write_through(last["abc"])
    assert not io.contains([last["abc"].block_id]), "it was written again"
