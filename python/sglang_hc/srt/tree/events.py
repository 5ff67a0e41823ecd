"""KV events (`--kv-events-config`) of the device and of the tiers, in one order.

    scheduler thread  notes what the device tree and the tiers did, and hands the notes over
    announcer         makes pages and events of them, and gives these to SGLang's publisher
    reader            finds the tokens of blocks that somebody else left on a disk

The scheduler never waits: where the announcer is so far behind that its queue is full, a batch is
dropped, and what follows begins with `AllBlocksCleared` and everything that is there. So does what
follows a start, and a replay that asks for more than SGLang's publisher remembers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple

from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.srt.binding import fields
from sglang_hc.srt.tree.event_names import EventNames
from sglang_hc.store.block import Block
from sglang_hc.store.disk.format import LABEL_MAX
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.store.workers import Workers
from sglang_hc.tiers.ledger import Cleared, Ledger, Medium, Removed, Said, Stored, Tokens
from sglang_hc.tiers.residence import Anew, Came, Named, Note, Residence
from sglang_hc.tree.forgetting import FORGOTTEN
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import pack_tokens, unpack_tokens
from sglang_hc.tree.namespaces import weights_of

logger = logging.getLogger(__name__)

WAITING_BATCHES = 1024
"""Handed over and not announced yet; each is of one scheduling pass, or of some."""

EVENTS_AT_ONCE = 256
"""Most events in one batch of SGLang's."""

READING_SHARE = 0.25
"""Most of its time that the reader takes, so that requests do not wait for the interpreter."""

AFTER_ERROR_S = 10.0
"""After an error of ours all is told anew, but only so often: looking at all takes its time."""

CLIPPED_BYTES = LABEL_MAX - 4
"""A label that is longer may have been cut off, so nobody knows whose the block is."""

COUNTS = ("kv_event_batches_dropped", "kv_event_errors", "kv_event_snapshots")


class _Node(NamedTuple):
    """Pages that came to the device or left it. before: hash of the page before them."""

    stored: bool
    namespace: str | None
    before: str | None
    chain: list[str]
    tokens: list[Any]
    """Ids, of which those that stand for an image are large; or pairs of ids."""
    session: str | None = None


_Told = Note | Named | _Node | Cleared

FOUND_AT_ONCE = 64
"""Blocks whose tokens the reader tells together."""


class Recorder:
    """Stands in SGLang's tree for its recorder of events, and takes the notes of the tiers too.
    Belongs to the scheduler thread."""

    def __init__(self, names: EventNames) -> None:
        self._names = names
        self._notes: list[_Told] = []

    def tell(self, note: _Told) -> None:
        self._notes.append(note)

    def take(self) -> list[_Told]:
        """Notes since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def record_store(
        self, node: Any, medium: object = None, *, session_id: str | None = None
    ) -> None:
        """A node has device slots. SGLang's tree has no other medium here."""
        self._record(node, stored=True, session=session_id)

    def record_remove(self, node: Any, medium: object = None) -> None:
        """A node has lost them."""
        self._record(node, stored=False)

    def record_all_cleared(self) -> None:
        self.tell(Cleared())

    def _record(self, node: Any, *, stored: bool, session: str | None = None) -> None:
        namespace = fields.namespace_of(node.key)
        if namespace is not None and namespace.startswith(FORGOTTEN):
            return  # it was told gone when it was forgotten
        chain, tokens = self._chain(node), list(node.key) if stored else []
        above = node.parent.event_hash_value
        before = above[-1] if above else None
        self.tell(_Node(stored, namespace, before, list(chain), tokens, session))

    def _chain(self, node: Any) -> list[str]:
        """The node's hashes, kept where SGLang's tree divides them when it divides the node."""
        missing = []
        while node.event_hash_value is None and len(node.key):
            missing.append(node)
            node = node.parent
        for below in reversed(missing):
            above = below.parent.event_hash_value
            below.event_hash_value = self._names.chain(below.key, above[-1] if above else None)
        return list(missing[0].event_hash_value if missing else node.event_hash_value)


class Announcer:
    """Makes events of notes on a thread of its own. publisher: SGLang's, set before the first
    offer. failed: an error of ours lost notes."""

    def __init__(
        self, names: EventNames, named: Callable[[bytes], Block | None], counters: Counter[str]
    ) -> None:
        """named: what a store says of one of its blocks; it reads. counters: get what happened."""
        self.publisher: Any = None
        self.failed = False
        self._names, self._named, self._counters = names, named, counters
        self._ledger = Ledger(names)
        self._queue: queue.Queue[list[_Told] | None] = queue.Queue(WAITING_BATCHES)
        self._wants_all = False
        self._weights: str | None = None
        """Of which state is told, as the last `Anew` says."""
        self._reader: Workers[list[bytes]] = Workers("hc-event-tokens", self._read)
        self._thread = threading.Thread(target=self._run, name="hc-events", daemon=True)
        self._thread.start()

    def offer(self, notes: list[_Told]) -> bool:
        """Announce these behind what was offered before. False where too much waits."""
        try:
            self._queue.put_nowait(notes)
        except queue.Full:
            return False
        return True

    @property
    def is_full(self) -> bool:
        return self._queue.full()

    def tell_all(self) -> None:
        """Announce from nothing what there is. Any thread, at any time."""
        self._wants_all = True
        self.offer([])

    def close(self) -> None:
        """Announce what was offered, for a second at most."""
        try:
            self._queue.put(None, timeout=1.0)
        except queue.Full:
            return
        self._thread.join(1.0)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._announce(item)
            except Exception:
                self.failed = True
                self._counters["kv_event_errors"] += 1
                logger.exception("sglang-hc: KV events could not be announced")

    def _announce(self, notes: list[_Told]) -> None:
        said = [one for note in notes for one in self._said_of(note)]
        if self._wants_all:
            self._wants_all = False
            self._counters["kv_event_snapshots"] += 1
            said = [*said, *self._ledger.everything()]
        for events in _batches(events_of(said, self._names.page_size)):
            self.publisher.publish(KVEventBatch(ts=time.time(), events=events))
        if any(isinstance(note, Anew) for note in notes):
            self._reader.withdraw()  # it is asked for again
        asked = self._ledger.take_asked()
        for first in range(0, len(asked), FOUND_AT_ONCE):
            self._reader.submit(asked[first : first + FOUND_AT_ONCE])

    def _said_of(self, note: _Told) -> Iterator[Said]:
        names, ledger = self._names, self._ledger
        if isinstance(note, Anew):
            self._weights = note.weights
        made = note.block if isinstance(note, Came) else note
        if isinstance(made, Named | _Node) and weights_of(made.namespace) != self._weights:
            return iter(())
        if isinstance(note, Named):
            return ledger.named(note)
        if not isinstance(note, _Node):
            return ledger.apply(note)
        if note.stored:
            tokens = _packed(note.tokens)
            pages = names.pages_of(note.namespace, note.before, note.chain, tokens)
            return ledger.apply(Stored(Medium.DEVICE, pages, note.session))
        seed = names.published(note.namespace).seed
        return ledger.apply(Removed(Medium.DEVICE, [names.number(one, seed) for one in note.chain]))

    def _read(self, batch: list[list[bytes]]) -> None:
        for asked in batch:
            began = time.monotonic()
            self._queue.put([*self._found(asked)])
            time.sleep((time.monotonic() - began) * (1 / READING_SHARE - 1))

    def _found(self, block_ids: list[bytes]) -> Iterator[Named]:
        for block_id in block_ids:
            block = self._named(block_id)
            if block is not None and len(block.namespace.encode()) <= CLIPPED_BYTES:
                parent = block.parent_id if block.position else None
                yield Named(block_id, parent, block.namespace or None, block.tokens)


class Events:
    """What the scheduler has of them. recorder: for SGLang's tree. residence: of the tiers; None
    where their blocks are not whole pages."""

    def __init__(
        self, params: Any, host: HostTier, disk: LowerTier | None, counters: Counter[str]
    ) -> None:
        """params: of SGLang's tree."""
        names, self._adapters = EventNames(params), params.kv_event_lora_names
        self.recorder = Recorder(names)
        self.residence: Residence | None = None
        self._counters = counters
        counters.update(dict.fromkeys(COUNTS, 0))  # others read them while the announcer counts
        named = disk.named if disk is not None else lambda block_id: None
        self._announcer = Announcer(names, named, counters)
        if params.is_eagle or BLOCK_TOKENS % names.page_size:
            reason = "speculative decoding" if params.is_eagle else f"--page-size {names.page_size}"
            logger.warning("sglang-hc: with %s KV events tell of the device alone", reason)
        else:
            self.residence = Residence(host, disk, self.recorder.tell)
        self._weights: str | None = None
        self._owes, self._not_before = True, 0.0
        """What follows has to begin anew; not before that time on `time.monotonic`."""

    def begin_anew(self, weights: str | None) -> None:
        """What was told is void: it was of other weights than these."""
        self._weights, self._owes = weights, True

    def renamed(self, req: Any) -> None:
        """A request has another namespace: its adapter keeps its name."""
        if self._adapters is not None:
            self._adapters.register(req)

    def hand_over(self, publisher: Any, device: Iterable[Any]) -> None:
        """Announce what was noted. publisher: SGLang's. device: all nodes of the device tree,
        parents first; looked at where all has to be told."""
        announcer = self._announcer
        if announcer.publisher is None:
            _go_on_after_restarts(publisher, announcer.tell_all)
            announcer.publisher = publisher
        notes = self.recorder.take()
        if announcer.failed:
            announcer.failed, self._owes = False, True
            self._not_before = time.monotonic() + AFTER_ERROR_S
        if self._owes and not announcer.is_full and time.monotonic() >= self._not_before:
            self.recorder.tell(Anew(self._weights))
            for node in device:
                self.recorder.record_store(node)
            if self.residence is not None:
                self.residence.tell_all()
            notes, self._owes = self.recorder.take(), False
        if notes and not self._owes and not announcer.offer(notes):
            self._owes = True
            self._counters["kv_event_batches_dropped"] += 1

    def close(self) -> None:
        self._announcer.close()


def events_of(said: Iterable[Said], page_size: int) -> Iterator[Any]:
    """SGLang's events that say it, as few as may be."""
    last: Any = None
    for one in said:
        more = _event(one, page_size)
        if _continues(last, more):
            last.block_hashes += more.block_hashes
            if isinstance(more, BlockStored):
                last.token_ids += more.token_ids
            continue
        if last is not None:
            yield last
        last = more
    if last is not None:
        yield last


def _event(said: Said, page_size: int) -> Any:
    if isinstance(said, Removed):
        return BlockRemoved(block_hashes=list(said.hashes), medium=said.medium.value)
    if isinstance(said, Cleared):
        return AllBlocksCleared()
    first = said.pages[0]
    return BlockStored(
        block_hashes=[page.hash for page in said.pages],
        parent_block_hash=first.parent,
        token_ids=[token for page in said.pages for token in _ids(page.tokens)],
        block_size=page_size,
        lora_id=None,
        medium=said.medium.value,
        cache_salt=first.salt,
        session_id=said.session,
        lora_name=first.adapter,
    )


def _packed(tokens: list[Any]) -> Tokens:
    """As a `Page` has them."""
    if tokens and isinstance(tokens[0], tuple):
        return tuple(tokens)
    try:
        return pack_tokens(tokens)
    except OverflowError:
        return tuple(tokens)


def _ids(tokens: Tokens) -> Iterable[Any]:
    return unpack_tokens(tokens).tolist() if isinstance(tokens, bytes) else tokens


def _continues(last: Any, more: Any) -> bool:
    if isinstance(last, BlockRemoved) and isinstance(more, BlockRemoved):
        return bool(last.medium == more.medium)
    if not (isinstance(last, BlockStored) and isinstance(more, BlockStored)):
        return False
    alike = ("medium", "cache_salt", "session_id", "lora_name")
    return more.parent_block_hash == last.block_hashes[-1] and all(
        getattr(last, name) == getattr(more, name) for name in alike
    )


def _batches(events: Iterable[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for event in events:
        batch.append(event)
        if len(batch) == EVENTS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


class _WatchedReplays:
    """The socket of SGLang's publisher for replays. Says when more is asked for than it has."""

    def __init__(self, publisher: Any, first: int, on_too_old: Callable[[], object]) -> None:
        """first: number of the first batch of all."""
        self._socket, self._buffer = publisher._replay, publisher._buffer
        self._first, self._on_too_old = first, on_too_old

    def recv_multipart(self, *args: Any, **kwargs: Any) -> Any:
        frames = self._socket.recv_multipart(*args, **kwargs)
        asked = max(self._first, int.from_bytes(frames[-1], "big"))
        if self._buffer and asked < self._buffer[0][0]:
            self._on_too_old()
        return frames

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def _go_on_after_restarts(publisher: Any, on_too_old: Callable[[], object]) -> None:
    """Make a restart of the server a gap for those who listen on: batches are numbered from the
    milliseconds since 1970 on, where SGLang begins with 0 again and would be taken for old. Before
    the first batch. publisher: SGLang's, of its kind `zmq`; no other has numbers."""
    if hasattr(publisher, "_seq_gen"):
        first = time.time_ns() // 1_000_000
        publisher._seq_gen = count(first)
        if publisher._replay is not None:
            publisher._replay = _WatchedReplays(publisher, first, on_too_old)
