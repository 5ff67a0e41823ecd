"""The same requests at the same times under another policy, and the clairvoyant bound.

A run's events fix when each request arrived, was admitted and finished. Replayed, every policy sees
the same accesses; the clairvoyant policy (Belady's MIN on block reuse) also knows those to come and
so bounds what any eviction order could hit with the same tiers.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hc.policy.eviction import B, Entry, EvictionPolicy, Key
from sglang_hc.tools.simulator.costs import GpuCosts
from sglang_hc.tools.simulator.disk import ReadQueue
from sglang_hc.tools.simulator.engine import Event
from sglang_hc.tools.simulator.jobs import Conversation, Overflow
from sglang_hc.tools.simulator.measures import Measures
from sglang_hc.tools.simulator.prompts import Prompt
from sglang_hc.tools.simulator.tiers import TieredCache
from sglang_hc.tools.workloads.sessions import Workload


class Oracle:
    """Knows which admission needs a block next."""

    def __init__(self, workload: Workload, overflow: Overflow, events: Sequence[Event]) -> None:
        self._uses: dict[bytes, list[int]] = {}
        self._now = -1
        talks = [Conversation(i, s, overflow) for i, s in enumerate(workload.sessions)]
        waiting = {}
        admissions = []
        for event in events:
            talk = talks[event.session]
            if event.kind == "arrive":
                waiting[event.session] = talk.next_job(0)
            elif event.kind == "admit":
                admissions.append(waiting[event.session].needs)
            elif event.kind == "finish":
                talk.answered(waiting.pop(event.session))
        for index in range(len(admissions) - 1, -1, -1):  # soonest use last, ready to be popped
            for identity in admissions[index]:
                self._uses.setdefault(identity, []).append(index)

    def admitted(self) -> None:
        """The next admission of the record is made."""
        self._now += 1

    def next_use(self, block_id: bytes) -> int | None:
        """Index of the next admission that needs the block; None if none ever will."""
        uses = self._uses.get(block_id)
        while uses and uses[-1] <= self._now:
            uses.pop()
        return uses[-1] if uses else None


class BeladyPolicy(EvictionPolicy[B]):
    """What is never needed again leaves first, then what is needed last."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__()
        self._oracle = oracle

    def _key(self, entry: Entry[B]) -> Key:
        use = self._oracle.next_use(entry.block.block_id)
        return (float("-inf") if use is None else -use, entry.used)


def replay(
    workload: Workload,
    overflow: Overflow,
    events: Sequence[Event],
    cache: TieredCache,
    costs: GpuCosts,
    oracle: Oracle | None = None,
) -> Measures:
    """Drive `cache` through the recorded events and count what it hits.

    Times of transfers are simulated; everything else happens when the record says, and all that is
    found counts as restored.
    """
    talks = [Conversation(i, s, overflow) for i, s in enumerate(workload.sessions)]
    measures = Measures()
    queue: list[int] = []
    jobs = {}
    disk = ReadQueue(costs)
    served, numbers = 0, 0
    prompts: dict[int, Prompt] = {}
    for event in events:
        for time, transfer in disk.through(event.time):
            cache.fetched(transfer, time)
        talk = talks[event.session]
        if event.kind == "arrive":
            job = talk.next_job(numbers)
            numbers += 1
            job.arrived = event.time
            jobs[event.session] = job
            cache.arrive(job)
            queue.append(job.number)
        elif event.kind == "admit":
            job = jobs[event.session]
            served += 1
            if oracle is not None:
                oracle.admitted()
            found = cache.find(job, event.time)
            prompt = Prompt(job, found, None, found.host + found.disk, admitted=event.time)
            prompt.reusable = cache.reusable(job)
            if served > workload.warmup_turns:
                prompts[event.session] = prompt
            cache.admit(job, found, event.time, load=event.loaded and bool(found.disk_blocks))
            cache.prefetcher.admitted([job.number], event.time)
            queue.remove(job.number)
        elif event.kind == "first":
            if event.session in prompts:
                measures.answered(prompts.pop(event.session), event.time)
            measures.output_tokens += jobs[event.session].output_tokens
            continue
        else:
            job = jobs.pop(event.session)
            talk.answered(job)
            cache.look_ahead(queue)
            cache.finish(job, talk.known, talk.chain, event.time)
        if event.kind != "arrive" or len(queue) < 256:
            cache.look_ahead(queue)
            cache.prefetch(event.time)
            disk.begin(cache.take_started(), event.time)
    return measures
