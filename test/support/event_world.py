"""The tiers' machine with a disk below, whose KV events somebody mirrors."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sglang_hc.tiers.ledger import Cleared, Ledger, Medium, Page, Paged, Removed, Said, Stored
from sglang_hc.tiers.residence import Anew, Came, Named, Note, Residence
from sglang_hc.tree.identity import TOKEN_BYTES
from support.disk_machine import DiskMachine

PAGE = 16
SEEN: Counter[str] = Counter()
"""Over all runs: what was said, and what happened to it."""


class ToyPaging:
    """Pages named by a hash of their path; those of different namespaces have the same names."""

    def pages(self, namespace: str | None, above: Paged | None, tokens: bytes) -> Paged:
        chain, pages, size = (above.chain if above else b""), [], PAGE * TOKEN_BYTES
        parent = _name(chain) if chain else None
        for end in range(size, len(tokens) + 1, size):
            own = tokens[end - size : end]
            chain = hashlib.blake2b(chain + own, digest_size=8).digest()
            pages.append(Page(_name(chain), parent, own))
            parent = _name(chain)
        return Paged(tuple(pages), chain)


def _name(chain: bytes) -> int:
    return int.from_bytes(chain, "big")


class Mirror:
    """What somebody knows who was told everything."""

    def __init__(self) -> None:
        self.held: dict[Medium, set[int]] = {medium: set() for medium in Medium}

    def take(self, said: Iterable[Said]) -> None:
        for one in said:
            SEEN[type(one).__name__] += 1
            if isinstance(one, Stored):
                assert all(
                    b.parent == a.hash for a, b in zip(one.pages, one.pages[1:], strict=False)
                )
                self.held[one.medium] |= {page.hash for page in one.pages}
            elif isinstance(one, Removed):
                assert set(one.hashes) <= self.held[one.medium], "it was never there"
                self.held[one.medium] -= set(one.hashes)
            else:
                for pages in self.held.values():
                    pages.clear()


class Mirrored(DiskMachine):
    """A machine whose KV events somebody mirrors; notes reach the ledger when `deliver` is called,
    tokens of blocks below when `find` is."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.known: dict[bytes, Named] = {}
        self.told: list[Note | Said] = []
        self.owes = True
        """A batch was lost: everything has to be told anew."""
        self.asked: list[bytes] = []
        self.device: Counter[int] = Counter()
        self.paging, self.mirror = ToyPaging(), Mirror()
        self.ledger = Ledger(self.paging)
        self.tiers.residence = Residence(self.tiers.host, self.tiers.disk, self.tell)

    def tell(self, note: Note | Said) -> None:
        if isinstance(note, Came):
            self.known[note.block.block_id] = note.block
        self.told.append(note)

    def hand_over(self) -> None:
        """What was told reaches the ledger, and what it says reaches the mirror."""
        if self.owes:
            self.told, self.owes = [Anew()], False
            for name, count in self.device.items():
                self.told += [Stored(Medium.DEVICE, [Page(name, None, b"")])] * count
            self.tiers.residence.tell_all()
        notes, self.told = self.told, []
        for note in notes:
            self.mirror.take(self.ledger.apply(note))
        self.asked += self.ledger.take_asked()

    def find(self, count: int) -> None:
        """Tokens of some blocks that were asked for, children first; of one that has left, too
        late."""
        now, self.asked = self.asked[-count:], self.asked[:-count]
        for block_id in reversed(now):
            block = self.known.get(block_id)  # as its file says
            if block is not None and block_id in self.io.written:
                SEEN["found"] += 1
                self.mirror.take(self.ledger.named(block))

    def agree(self) -> None:
        """Nothing changes for a while: the mirror is what there is."""
        self.hand_over()
        while self.asked:
            self.find(99)
        self.compare()
        assert self.ledger.held() == self.mirror.held
        again = Mirror()
        again.take(self.ledger.everything())
        assert again.held == self.mirror.held

    def below(self) -> dict[Medium, set[bytes]]:
        """Identities of the blocks below host memory."""
        return {Medium.DISK: self.io.held() if self.io.up else set()}

    def compare(self) -> None:
        held = self.mirror.held
        in_memory = {node.block_id for node in self.tiers.host.tree.nodes()}
        assert held[Medium.DEVICE] == {name for name, count in self.device.items() if count}
        assert held[Medium.HOST] == self.hashes(in_memory)
        below = self.below()
        there = in_memory.union(*below.values())
        for medium, names in below.items():
            found = {name for name in names if name in self.io.written}
            reachable = {name for name in found if set(self.path(name)) <= there}
            assert self.hashes(reachable) <= held[medium] <= self.hashes(names)
            SEEN[medium.value] += len(held[medium])

    def path(self, block_id: bytes) -> list[bytes]:
        """The block and all before it."""
        found = []
        name: bytes | None = block_id
        while name is not None:
            found.append(name)
            name = self.known[name].parent_id
        return found[::-1]

    def hashes(self, block_ids: Iterable[bytes]) -> set[int]:
        """Of their pages."""
        found: set[int] = set()
        for block_id in block_ids:
            paged = None
            for name in self.path(block_id):
                block = self.known[name]
                paged = self.paging.pages(block.namespace, paged, block.tokens)
            found |= {page.hash for page in paged.pages}
        return found


class EventMachine(Mirrored):
    """Notes reach the ledger late or never, and tokens of blocks on disk are found late."""

    @rule()
    def deliver(self) -> None:
        self.hand_over()

    @rule(count=st.integers(1, 9))
    def find_tokens(self, count: int) -> None:
        self.find(count)

    @rule()
    def lose_batch(self) -> None:
        SEEN["lost batches"] += bool(self.told)
        self.told, self.owes = [], True

    @rule(
        names=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True), more=st.booleans()
    )
    def device_changes(self, names: list[int], more: bool) -> None:
        """Pages of the device, of which several namespaces may have the same."""
        for name in names:
            if more:
                self.device[name] += 1
                self.told.append(Stored(Medium.DEVICE, [Page(name, None, b"")]))
            elif self.device[name]:
                self.device[name] -= 1
                self.told.append(Removed(Medium.DEVICE, [name]))

    @precondition(lambda self: not self.running)
    @rule()
    def device_is_cleared(self) -> None:
        self.device.clear()
        self.told.append(Cleared())

    @precondition(lambda self: self.io.held())
    @rule(which=st.integers(0, 99))
    def evict_on_disk(self, which: int) -> None:
        """Of any place in a path."""
        names = sorted(self.io.held())
        self.io.evict(names[which % len(names)])

    @precondition(lambda self: self.tiers.host.published_blocks)
    @rule(count=st.integers(1, 9))
    def evict_in_memory(self, count: int) -> None:
        self.tiers.host.evict(count, 0.0)

    @rule()
    def quiet(self) -> None:
        self.tiers.poll()
        self.agree()

    @precondition(lambda self: not self.running)
    @rule()
    def restart(self) -> None:
        """The next server has nothing in memory, and has told nobody anything."""
        self.quiet()
        self.forget_memory()
        self.ledger = Ledger(self.paging)
        self.asked = []
        self.lose_batch()
        self.quiet()

    def teardown(self) -> None:
        self.quiet()
        super().teardown()
