"""What a store below tells of blocks that came and left (`BlockIo.news`)."""

from __future__ import annotations

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockIo, Change
from sglang_hc.store.chain import Chain
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.outcome import Outcome
from support.fake_io import FakeIo
from support.fake_store import FakeStoreIo

DISK, REMOTE = SourceTier.DISK, SourceTier.REMOTE
A, B = bytes(15) + b"a", bytes(15) + b"b"


def block(block_id: bytes) -> Block:
    return Block(block_id, bytes(16), "", 0, b"")


def told(io: BlockIo, *, anew: bool = False) -> set[Change]:
    news = io.news(anew=anew)
    assert len(set(news)) == len(news)
    return set(news)


def test_of_a_disk_all_that_comes_and_leaves_is_told_once() -> None:
    disk = FakeIo()
    io = KnownBlocks(disk)
    disk.hold([A])
    assert told(io, anew=True) == {Change(DISK, A, True)}
    assert told(io) == set()
    io.write(1, block(B), 0, 9.0)
    io.poll()
    assert told(io) == {Change(DISK, B, True)}
    disk.evict(B)
    assert told(io) == {Change(DISK, B, False)}
    io.write(2, block(B), 0, 9.0)
    io.poll()
    assert told(io) == {Change(DISK, B, True)}, "it came again"
    disk.lose()
    assert told(io) == {Change(DISK, A, False), Change(DISK, B, False)}
    disk.back()
    assert (
        told(io, anew=True) == {Change(DISK, A, True), Change(DISK, B, True)} == told(io, anew=True)
    )


def test_of_a_store_without_a_record_what_was_seen_here_is_told() -> None:
    remote = FakeStoreIo()
    io = KnownBlocks(remote)
    assert told(io) == set()
    remote.hold([A])
    io.read(1, A, 0, 9.0)
    io.write(2, block(B), 0, 9.0)
    remote.end_all()
    io.poll()
    assert told(io) == {Change(REMOTE, A, True), Change(REMOTE, B, True)}
    remote.evict(B)
    assert told(io) == set(), "nobody has asked for it since"
    io.read(3, B, 0, 9.0)
    remote.end_all()
    io.poll()
    assert told(io) == {Change(REMOTE, B, False)}
    assert told(io, anew=True) == {Change(REMOTE, A, True)}
    io.erase(4, None, ())
    remote.answer()
    io.poll()
    assert told(io) == {Change(REMOTE, A, False)}


def test_a_write_that_failed_is_no_news() -> None:
    disk, remote = FakeIo(writes_wait=True), FakeStoreIo()
    io = Chain(KnownBlocks(disk), KnownBlocks(remote))
    assert told(io) == set()
    io.write(1, block(A), 0, 9.0)
    disk.end_all(Outcome.IO_ERROR)
    remote.end_all()
    io.poll()
    assert told(io) == {Change(REMOTE, A, True)}
