"""Turns what the tiers tell into KV events: which pages of tokens came to a medium, and which left.

A page is what SGLang publishes: so many tokens, named by a hash over its path. A block has several,
or one. Blocks that share their first tokens share pages, and so may namespaces; a page leaves a
medium with the last block that has it. What is below is named by identity alone, so its tokens are
asked for, unless they are known from above; a block whose parent is not known waits for it, because
nobody could find it either.

    Came, or Change with tokens known      Stored
    Change without                         asks; `named` answers later
    left                                   Removed, of the pages that nobody else has
    Anew, or the device forgot everything  Cleared, and Stored of what there is

Pure: whoever has it brings the notes, and sends what is said. Belongs to one thread.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block_io import Change
from sglang_hc.tiers.residence import Anew, Came, Named, Note


class Medium(enum.Enum):
    """Where pages are, under the names that events have for it."""

    DEVICE = "GPU"
    HOST = "CPU_PINNED"
    DISK = "DISK"
    EXTERNAL = "EXTERNAL"


MEDIA = {
    SourceTier.HOST: Medium.HOST,
    SourceTier.DISK: Medium.DISK,
    SourceTier.REMOTE: Medium.EXTERNAL,
}


Tokens = bytes | tuple[int, ...] | tuple[tuple[int, int], ...]
"""Packed; where an id stands for an image and is too large, ids; with a draft model pairs of
them."""


class Page(NamedTuple):
    """hash, parent: of the page and of the one before it, None for the first of a path. salt,
    adapter: names of whom it belongs to."""

    hash: int
    parent: int | None
    tokens: Tokens
    salt: str | None = None
    adapter: str | None = None


class Paged(NamedTuple):
    """A block as pages. chain: what the hashes of pages behind it begin with; empty for nothing."""

    pages: tuple[Page, ...]
    chain: bytes


class Paging(Protocol):
    """How tokens become pages."""

    def pages(self, namespace: str | None, above: Paged | None, tokens: bytes) -> Paged:
        """Those of a block of packed tokens behind the block `above`; without a last one that is
        not full."""


class Stored(NamedTuple):
    """One behind the other, each continues the one before. session: that they were stored for."""

    medium: Medium
    pages: Sequence[Page]
    session: str | None = None


class Removed(NamedTuple):
    medium: Medium
    hashes: Sequence[int]


class Cleared(NamedTuple):
    """Nothing is anywhere."""


Said = Stored | Removed | Cleared


@dataclass(slots=True)
class _Block:
    paged: Paged
    media: set[Medium]


@dataclass(slots=True)
class _Held:
    page: Page
    count: int = 0


class Ledger:
    """What was said to be where. asked: blocks whose tokens are wanted, see `take_asked`."""

    def __init__(self, paging: Paging) -> None:
        self._paging = paging
        self._start()

    def _start(self) -> None:
        """Nothing is known."""
        self._held: dict[Medium, dict[int, _Held]] = {medium: {} for medium in Medium}
        self._blocks: dict[bytes, _Block] = {}
        self._unnamed: dict[bytes, set[Medium]] = {}
        """Blocks of which only the identity is known, or whose parent is not known."""
        self._orphans: dict[bytes, Named] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}
        """Orphans by their parents."""
        self._asked: list[bytes] = []

    def apply(self, note: Note | Said) -> Iterator[Said]:
        """What a note of the tiers, or of the device, makes known. To be used up."""
        match note:
            case Came(tier, block):
                yield from self._arrived(MEDIA[tier], block.block_id, block)
            case Change(tier, block_id, here=True):
                yield from self._arrived(MEDIA[tier], block_id)
            case Change(tier, block_id):
                yield from self._left(MEDIA[tier], block_id)
            case Stored(medium, pages, session):
                yield from self._hold(medium, pages, session)
            case Removed(medium, hashes):
                yield from self._release(medium, hashes)
            case Cleared():
                self._held[Medium.DEVICE].clear()
                yield from self.everything()
            case Anew():
                self._start()
                yield Cleared()

    def take_asked(self) -> list[bytes]:
        """Identities of blocks below whose tokens are not known, since the last call."""
        asked, self._asked = self._asked, []
        return asked

    def named(self, block: Named) -> Iterator[Said]:
        """The answer to one that was asked for; it may have left meanwhile."""
        if block.block_id in self._unnamed:
            yield from self._learn(block)

    def everything(self) -> Iterator[Said]:
        """All that there is, from nothing; parents before children."""
        yield Cleared()
        for medium, held in self._held.items():
            said: set[int] = set()
            for last in held.values():
                path = []
                page: Page | None = last.page
                while page is not None and page.hash not in said:
                    said.add(page.hash)
                    path.append(page)
                    above = None if page.parent is None else held.get(page.parent)
                    page = None if above is None else above.page
                if path:
                    yield Stored(medium, path[::-1])

    def held(self) -> dict[Medium, set[int]]:
        """Hashes of the pages in each medium."""
        return {medium: set(pages) for medium, pages in self._held.items()}

    # -- inner parts -----------------------------------------------------------------------------

    def _arrived(
        self, medium: Medium, block_id: bytes, named: Named | None = None
    ) -> Iterator[Said]:
        known = self._blocks.get(block_id)
        if known is not None:
            if medium not in known.media:
                known.media.add(medium)
                yield from self._hold(medium, known.paged.pages)
            return
        self._unnamed.setdefault(block_id, set()).add(medium)
        if named is not None:
            yield from self._learn(named)
        elif block_id not in self._orphans:
            self._asked.append(block_id)

    def _left(self, medium: Medium, block_id: bytes) -> Iterator[Said]:
        known = self._blocks.get(block_id)
        if known is not None and medium in known.media:
            known.media.remove(medium)
            if not known.media:
                del self._blocks[block_id]
            yield from self._release(medium, [page.hash for page in known.paged.pages])
        elif block_id in self._unnamed:
            self._unnamed[block_id].discard(medium)
            if not self._unnamed[block_id]:
                del self._unnamed[block_id]
                self._adopt(block_id)

    def _learn(self, block: Named) -> Iterator[Said]:
        """Its tokens are known: say where it is, and where those are that waited for it."""
        ready = [block]
        for one in ready:  # which grows meanwhile
            above = None if one.parent_id is None else self._blocks.get(one.parent_id)
            if one.parent_id is not None and above is None:
                self._orphans[one.block_id] = one
                self._children.setdefault(one.parent_id, {})[one.block_id] = None
                continue
            self._adopt(one.block_id)
            paged = self._paging.pages(
                one.namespace, None if above is None else above.paged, one.tokens
            )
            media = self._unnamed.pop(one.block_id)
            self._blocks[one.block_id] = _Block(paged, media)
            for medium in sorted(media, key=lambda one: one.value):
                yield from self._hold(medium, paged.pages)
            ready += [self._orphans[name] for name in self._children.get(one.block_id, ())]

    def _adopt(self, block_id: bytes) -> None:
        """A block waits for its parent no more."""
        one = self._orphans.pop(block_id, None)
        if one is not None and one.parent_id is not None:
            siblings = self._children[one.parent_id]
            del siblings[block_id]
            if not siblings:
                del self._children[one.parent_id]

    def _hold(
        self, medium: Medium, pages: Sequence[Page], session: str | None = None
    ) -> Iterator[Stored]:
        held = self._held[medium]
        for page in pages:
            held.setdefault(page.hash, _Held(page)).count += 1
        if pages:
            yield Stored(medium, pages, session)

    def _release(self, medium: Medium, hashes: Iterable[int]) -> Iterator[Removed]:
        held, gone = self._held[medium], []
        for name in hashes:
            if name in held:
                held[name].count -= 1
                if not held[name].count:
                    del held[name]
                    gone.append(name)
        if gone:
            yield Removed(medium, gone)
