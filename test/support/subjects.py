"""The policies' two homes behind one face: the server's tiers, and the simulator's.

A path is a word, as in `support.host`. Nothing is decided here: both subjects translate words into
the calls that the scheduler, or the simulator's engine, would make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import partial
from typing import Protocol

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.queue.requests import QueuedPrompt, RequestTable
from sglang_hc.store.read_watch import OnRead
from sglang_hc.tools.simulator.jobs import Job, extend_chain
from sglang_hc.tools.simulator.tiers import Found, TieredCache, TierSizes, Transfer
from sglang_hc.tree.identity import Prefix
from support.fake_io import FakeIo
from support.host import host_queue, identities, keep, tokens_of, words_in
from support.rates import UNKNOWN_COSTS

DISK_BLOCKS = 1000


class Subject(Protocol):
    """Tiers under one policy. `order`: words of the waiting requests, the next first."""

    order: list[str]

    @property
    def requests(self) -> RequestTable: ...

    @property
    def coming(self) -> Collection[bytes]: ...

    @property
    def counters(self) -> Counter[str]: ...

    def serve(self, word: str) -> int:
        """A request that did not wait runs to its end. Returns the blocks hit in host memory."""

    def enqueue(self, word: str) -> None:
        """A request comes to wait at the end of the queue."""

    def abort(self, word: str) -> None:
        """A waiting request leaves the queue."""

    def admit(self) -> int:
        """The head of the queue runs to its end. Returns the blocks hit in host memory."""

    def look(self) -> list[str]:
        """One scheduling pass. Returns the words whose last block starts to come from disk."""

    def ready(self, word: str) -> tuple[bool, list[str]]:
        """A waiting request is asked whether it may be admitted. Also the words whose last block
        starts to come."""

    def arrive_all(self) -> None:
        """What is on its way from disk arrives."""

    def reading(self) -> int:
        """Blocks that are being read from disk, as fetches are timed by."""

    def in_host(self) -> set[str]:
        """Words whose last block is in host memory, ready to be used."""

    def on_disk(self) -> set[str]: ...


class ServerSubject:
    """HostTier, LowerTier and QueueView, called as the scheduler calls them."""

    def __init__(
        self,
        eviction: str,
        prefetch: str,
        host_slots: int,
        costs: RestorePlanner = UNKNOWN_COSTS,
        on_read: OnRead = lambda tier, blocks, seconds: None,
        *,
        can_meet: bool = True,
    ) -> None:
        self.order: list[str] = []
        self.now = 0.0
        self.on_device = 0
        """Tokens of every waiting request that the device is said to hold."""
        self._words: dict[bytes, str] = {}
        self.io = FakeIo(capacity=DISK_BLOCKS)
        _, self.host, self.disk, self.queue = host_queue(
            host_slots,
            self.io,
            eviction,
            prefetch,
            lambda: self.now,
            costs=costs,
            can_meet=can_meet,
            on_read=on_read,
        )

    @property
    def requests(self) -> RequestTable:
        return self.queue.requests

    @property
    def coming(self) -> Collection[bytes]:
        return self.queue.sources.coming

    @property
    def counters(self) -> Counter[str]:
        return self.queue.counters

    def serve(self, word: str) -> int:
        self.now += 1
        tokens = tokens_of(word)
        self._words |= {name: word[:end] for end, name in enumerate(identities(tokens), 1)}
        match = self.host.tree.match(Prefix(None, tokens))
        hit = match.tokens // BLOCK_TOKENS
        if hit:
            self.host.access(match.nodes, self.now)  # restored
        self.host.pin(match.nodes)
        if word in self.order:
            self.queue.admission.asked(word)
            self.order.remove(word)
            # The pass after its admission.
            self.queue.on_schedule_step(self.order)
        for node in keep(self.host, tokens, now=self.now):
            self.disk.write_through(node)
        self.disk.poll()
        self.host.unpin(match.nodes)
        self.host.access(self.host.tree.match(Prefix(None, tokens)).nodes, self.now)
        self.queue.finished(word, len(word))
        return hit

    def enqueue(self, word: str) -> None:
        self.order.append(word)
        self.queue.arrived(word, partial(self._waiting, word))

    def abort(self, word: str) -> None:
        self.order.remove(word)
        self.queue.left(word)

    def admit(self) -> int:
        return self.serve(self.order[0])

    def look(self) -> list[str]:
        self.now += 1
        self.disk.poll()
        self.queue.on_schedule_step(self.order)
        return self._started()

    def ready(self, word: str) -> tuple[bool, list[str]]:
        self.now += 1
        return self.queue.ready(word), self._started()

    def arrive_all(self) -> None:
        self.io.end_all()
        self.disk.poll()

    def reading(self) -> int:
        return self.queue.sources.reading(SourceTier.DISK)

    def in_host(self) -> set[str]:
        self.host.check_integrity()
        return words_in(self.host.tree)

    def on_disk(self) -> set[str]:
        return {self._words[block_id] for block_id in self.io.held()}

    def _started(self) -> list[str]:
        asked, self.io.begun = self.io.begun, []
        return [self._words[block_id] for block_id in asked]

    def _waiting(self, word: str) -> QueuedPrompt:
        return QueuedPrompt(Prefix(None, tokens_of(word)), lambda: self.on_device)


class SimulatorSubject:
    """TieredCache, called as the simulator's engine calls it."""

    def __init__(
        self,
        eviction: str,
        prefetch: str,
        host_slots: int,
        costs: RestorePlanner = UNKNOWN_COSTS,
        *,
        device_slots: int = 0,
    ) -> None:
        self.order: list[str] = []
        self.now = 0.0
        self._numbers: dict[str, int] = {}
        self._count = 0
        self._under_way: list[Transfer] = []
        self._names: list[str] = []
        self._words: dict[bytes, str] = {}
        sizes = TierSizes(device_slots, host_slots, DISK_BLOCKS)
        self.cache = TieredCache(sizes, costs, policy=eviction, prefetch=prefetch)
        self.cache.write_seconds = 0.0
        assert self.cache.host is not None
        self.host = self.cache.host

    @property
    def requests(self) -> RequestTable:
        return self.cache.prefetcher.requests

    @property
    def coming(self) -> Collection[bytes]:
        return self.cache.coming

    @property
    def counters(self) -> Counter[str]:
        return self.cache.prefetcher.counters

    def serve(self, word: str) -> int:
        self.now += 1
        job = self._job(word)
        self.cache.arrive(job)
        return self._run(job, self._begin(job))

    def enqueue(self, word: str) -> None:
        job = self._job(word)
        self._numbers[word] = job.number
        self.order.append(word)
        self.cache.arrive(job)

    def abort(self, word: str) -> None:
        self.order.remove(word)
        self.cache.abort(self._numbers.pop(word))

    def admit(self) -> int:
        self.now += 1
        job = self.cache.jobs[self._numbers.pop(self.order.pop(0))]
        found = self._begin(job)
        self.cache.prefetcher.admitted([job.number], self.now)
        self._look()
        return self._run(job, found)

    def admit_loading(self, word: str) -> None:
        """A request of the queue is admitted, and what is on disk for it is read now."""
        self.order.remove(word)
        job = self.cache.jobs[self._numbers.pop(word)]
        self.cache.admit(job, self.cache.find(job, self.now), self.now, load=True)

    def look(self) -> list[str]:
        self.now += 1
        self._look()
        return self._started()

    def ready(self, word: str) -> tuple[bool, list[str]]:
        self.now += 1
        return self.cache.ready(self._numbers[word], self.now), self._started()

    def arrive_all(self) -> None:
        self._take()
        for transfer in self._under_way:
            self.cache.fetched(transfer, self.now)
        self._under_way = []

    def reading(self) -> int:
        return self.cache.reading(SourceTier.DISK)

    def in_host(self) -> set[str]:
        self.host.check_integrity()
        return words_in(self.host.tree)

    def on_disk(self) -> set[str]:
        assert self.cache.disk is not None
        disk = self.cache.disk
        return {word for block_id, word in self._words.items() if disk.holds(block_id)}

    def _look(self) -> None:
        self.cache.look_ahead([self._numbers[word] for word in self.order])
        self.cache.prefetch(self.now)

    def _take(self) -> None:
        started = self.cache.take_started()
        self._under_way += started
        self._names += [self._words[a.block_id] for transfer in started for a in transfer]

    def _started(self) -> list[str]:
        self._take()
        names, self._names = self._names, []
        return names

    def _begin(self, job: Job) -> Found:
        found = self.cache.find(job, self.now)
        self.host.pin(found.host_nodes)
        self.cache.admit(job, found, self.now, load=False)
        return found

    def _run(self, job: Job, found: Found) -> int:
        self.cache.finish(job, job.prompt, job.chain, self.now)
        self.host.unpin(found.host_nodes)
        return -(-found.host // BLOCK_TOKENS)  # the last token of a prompt is never a hit

    def _job(self, word: str) -> Job:
        self._count += 1
        tokens = tokens_of(word)
        chain = extend_chain([], tokens)
        self._words |= {block_id: word[: end + 1] for end, block_id in enumerate(chain)}
        return Job(self._count, self._count, 0, tokens, chain, chain, b"")


SUBJECTS = {"server": ServerSubject, "simulator": SimulatorSubject}
