"""What goes below host memory with `--hc-write`, and how often."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang_hc.policy.writing import WriteAdmission, WriteRule
from sglang_hc.store import lower_tier
from sglang_hc.store.block_io import BlockIo
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.tree.identity import Prefix
from support.clock import Clock
from support.fake_io import FakeIo
from support.fake_store import FakeStoreIo
from support.host import host_tier, keep, path_of, tokens_of


class Writing:
    """A tier under `--hc-write`; each kept path is one that a request has used."""

    def __init__(
        self, rule: str, io: FakeIo | None = None, wrap: Callable[..., BlockIo] | None = None
    ) -> None:
        """io: what is below. wrap: what stands before it, which gets the clock too."""
        parsed = WriteRule.parse(rule)
        assert parsed is not None
        self.host, self.io, self.clock = host_tier(32), io or FakeIo(), Clock(0.0)
        self.disk = LowerTier(
            self.io if wrap is None else wrap(self.io, self.clock), self.host, self.clock,
            admission=WriteAdmission(parsed, 1, 0.0), is_kept=lambda namespace: namespace is None,
        )  # fmt: skip

    def use(self, word: str) -> None:
        for node in keep(self.host, tokens_of(word)):
            self.disk.write_through(node)
        self.disk.path_used(self.host.tree.match(Prefix(None, tokens_of(word))).nodes)
        self.disk.poll()

    def begun(self) -> str:
        """Letters of the blocks that are being written, in their order."""
        letters = {node.block_id: chr(node.tokens[3]) for node in self.host.tree.nodes()}
        return "".join(letters[move.block_id] for move in self.io.moves)

    def end_all(self) -> None:
        self.io.end_all()
        self.disk.poll()

    def written(self, word: str) -> int:
        return self.io.contains(path_of(word).block_ids)


def test_a_path_is_written_when_it_is_used_again() -> None:
    world = Writing("second-use")
    world.use("abc")
    assert not world.io.held()
    world.use("abcde")
    assert world.written("abcde") == 3
    world.host.clear()
    world.use("abcdef")
    assert world.written("abcdef") == 5, "computed again, so it would have been used"


def test_a_budget_ends_a_path_where_it_ends() -> None:
    """What is behind a block that is not there could not be found."""
    world = Writing(str(24 * 4))
    world.use("abcdef")
    assert world.written("abcdef") == 4
    world.use("xy")
    assert world.written("xy") == 0
    world.clock.pass_time(1800.0)
    world.use("abcdef")
    assert world.written("abcdef") == 6


def test_what_is_not_kept_below_is_not_written_by_use() -> None:
    world = Writing("1e9")
    nodes = keep(world.host, tokens_of("ab"), namespace="a test's")
    world.disk.path_used(nodes)
    assert not world.io.held() and not world.disk.keeps_end_of(nodes[-1])


def test_a_path_that_is_used_while_it_is_written_is_written_once() -> None:
    """Each use of a path whose writes took their time wrote all of it again."""
    world = Writing("second-use", FakeIo(writes_wait=True))
    for word in ("abc", "abc", "abcd", "abcd"):
        world.use(word)
    assert world.begun() == "abcd"


def test_what_a_remote_store_took_is_not_written_again_at_each_use() -> None:
    """What is there is believed for a minute only; after that each turn wrote its whole history."""
    world = Writing("second-use", FakeStoreIo(), KnownBlocks)
    world.use("ab")
    world.use("ab")
    assert world.begun() == "ab"
    world.end_all()
    world.clock.pass_time(3600.0)
    world.use("abc")
    assert world.begun() == "" and world.disk.keeps_end_of(next(iter(world.host.tree.nodes())))
    world.use("abc")
    assert world.begun() == "c"


def test_of_a_long_path_so_much_is_written_at_once_as_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest was dropped, and taken from the budget."""
    monkeypatch.setattr(lower_tier, "WRITE_QUEUE", 3)
    world = Writing("second-use", FakeIo(writes_wait=True))
    world.use("abcde")
    world.use("abcde")
    assert world.begun() == "abc"
    world.end_all()
    world.use("abcde")
    assert world.begun() == "de"


def test_a_store_that_takes_nothing_is_tried_with_one_block() -> None:
    world = Writing("second-use")
    world.io.up = False
    for _ in range(4):
        world.use("abc")
    assert world.disk.counters["disk_save_dropped"] == 3 + 1 + 1
    world.io.up = True
    world.use("abc")
    world.use("abc")
    assert world.written("abc") == 3
