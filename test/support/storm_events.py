"""Somebody who reads the KV events of a storm's engine, and knows what it holds when it is quiet.

What is on the device and in host memory he knows to the page. Below, a block counts when its tokens
and those of all before it are known: no read may have failed, and what lies between may have left.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.disk import DiskStore
from sglang_hc.tiers.ledger import MEDIA, Medium, Paged
from sglang_hc.tiers.residence import Came, Named, Note
from sglang_hc.tree.forgetting import FORGOTTEN
from support.kv_events import Ports, Subscriber, publish
from support.waiting import HANGS_S, until

LIMIT_S = HANGS_S / 3
"""What the reader does not know after so long he never will; less than a storm's engine has."""


class Range(NamedTuple):
    """What somebody must know of a medium, and what he may know."""

    least: set[int]
    most: set[int]


class Listener:
    """ports: where the engine of the core publishes. It begins with what there is."""

    def __init__(self, core: Any, ports: Ports) -> None:
        self._core = core
        self._reader = Subscriber(ports)
        self._known: dict[bytes, Named] = {}
        """Whatever was in host memory, or on a disk at a quiet point."""
        residence = core.tree.tiers.residence
        self._tells_tiers = residence is not None
        if residence is not None:
            tell = residence._tell

            def told(note: Note) -> None:
                if isinstance(note, Came):
                    self._known[note.block.block_id] = note.block
                tell(note)

            residence._tell = told

    def agrees(self, *, below: bool) -> None:
        """Wait until the reader knows what there is; nothing else happens meanwhile. below: no disk
        was at fault, so what lies there is known too."""
        wrong: Mapping[str, str] = {}

        def agree() -> bool:
            nonlocal wrong
            publish(self._core)
            self._reader.catch_up()
            wrong = self._differences(below)
            return not wrong

        until(agree, pause=0.005, show=lambda: f"of KV events: {wrong}", limit=LIMIT_S)
        counts = self._core.tree.stats()
        assert not counts.get("kv_event_errors"), "KV events were lost by an error of ours"

    def media(self) -> dict[str, int]:
        """1 for each medium that the reader knows pages of."""
        return {f"told {medium}": int(bool(held)) for medium, held in self._reader.held.items()}

    def _differences(self, below: bool) -> dict[str, str]:
        """By medium: how many pages are not there, and how many are not known to be."""
        held, found = self._reader.held, {}
        for medium, (least, most) in self._truth(below):
            name = medium.value
            if not least <= held[name] <= most:
                found[name] = f"{len(held[name] - most)} gone, {len(least - held[name])} unknown"
        return found

    def _truth(self, below: bool) -> Iterator[tuple[Medium, Range]]:
        tree = self._core.tree
        yield Medium.DEVICE, Range(*[self._on_device()] * 2)
        if not self._tells_tiers:
            return
        memory = {node.block_id for node in tree.tiers.host.tree.nodes()}
        own = self._hashes(name for name in memory if name in self._known)
        yield Medium.HOST, Range(own, own)
        if not below:
            return
        stores = dict(stores_of(tree.tiers.disk))
        there = {tier: set(self._learn(store)) for tier, store in stores.items()}
        anywhere = memory.union(*there.values())
        for tier, names in there.items():
            whole = {name for name in names if anywhere.issuperset(self._path(name) or [b""])}
            yield MEDIA[tier], Range(self._hashes(whole), self._hashes(names))

    def _on_device(self) -> set[int]:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tree, names = self._core.tree, self._names
        found: set[int] = set()
        for node in tree.nodes():
            space = node.key.extra_key
            if not tree.weights.made(space) or (space or "").startswith(FORGOTTEN):
                continue
            tokens: list[int] = []
            above = node
            while len(above.key):
                tokens, above = [*above.key, *tokens], above.parent
            tokens = tokens[: len(tokens) // names.page_size * names.page_size]
            seed = names.published(space).seed
            chain = names.chain(RadixKey(array("q", tokens), space), None) if tokens else ()
            found |= {names.number(digest, seed) for digest in chain}
        return found

    def _learn(self, store: DiskStore) -> Iterator[bytes]:
        """Names of the blocks of a store, and whose they are."""
        for name in store.block_ids():
            block = store.named(name) if name not in self._known else None
            if block is not None:
                parent = block.parent_id if block.position else None
                self._known[name] = Named(name, parent, block.namespace or None, block.tokens)
            yield name

    def _path(self, block_id: bytes) -> list[bytes] | None:
        """A block and all before it; None where one of them was never known."""
        found, name = list[bytes](), block_id
        while True:
            block = self._known.get(name)
            if block is None:
                return None
            found.append(name)
            if block.parent_id is None:
                return found[::-1]
            name = block.parent_id

    def _hashes(self, block_ids: Iterable[bytes]) -> set[int]:
        """Pages of those blocks whose paths are known, and that are of the weights of now."""
        found: set[int] = set()
        for name in block_ids:
            path = self._path(name) or ()
            if path and self._core.tree.weights.made(self._known[name].namespace):
                found |= self._pages(path)
        return found

    def _pages(self, path: Sequence[bytes]) -> set[int]:
        paged: Paged | None = None
        for name in path:
            block = self._known[name]
            paged = self._names.pages(block.namespace, paged, block.tokens)
        return set() if paged is None else {page.hash for page in paged.pages}

    @property
    def _names(self) -> Any:
        return self._core.tree.events._announcer._names


def stores_of(lower: Any) -> Iterator[tuple[SourceTier, DiskStore]]:
    """Directories below host memory, under all that stands around them."""
    if lower is None:
        return
    io = lower._io
    parts = (io._near, io._far) if len(io.tiers) == 2 else (io,)
    for part in parts:
        store: Any = part
        while not isinstance(store, DiskStore):
            around = vars(store)
            store = next(around[name] for name in ("_io", "_inner", "_store") if name in around)
        yield part.tiers[0], store
