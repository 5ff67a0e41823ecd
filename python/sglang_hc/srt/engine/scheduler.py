"""The scheduler that a tree belongs to, as far as the tree asks it."""

from __future__ import annotations

import contextvars
import weakref
from functools import cached_property
from typing import Any

from sglang_hc.metrics import Exporter
from sglang_hc.srt.binding import fields, parallel


class OwnScheduler:
    """SGLang's scheduler. It builds its tree before it is complete itself; what is asked here
    exists by the first scheduling pass. Held weakly, because the scheduler holds the tree."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = weakref.ref(scheduler)

    @property
    def waiting_queue(self) -> list[Any]:
        """The waiting requests; SGLang makes a new list in most passes."""
        queue: list[Any] = self._scheduler().waiting_queue  # type: ignore[union-attr]
        return queue

    @property
    def requests(self) -> list[Any]:
        """All requests that were queued, with whose last pass is being looked at."""
        scheduler: Any = self._scheduler()
        batches = [scheduler.running_batch, scheduler.last_batch]
        if parallel.pp_size() > 1:
            batches = [*scheduler.running_mbs, *scheduler.mbs]
        batches += [batch for batch, *_ in getattr(scheduler, "result_queue", ())]
        found = [*scheduler.waiting_queue]
        found += [req for batch in batches if batch is not None for req in batch.reqs]
        if scheduler.chunked_req is not None:
            found.append(scheduler.chunked_req)
        return list({id(req): req for req in found}.values())

    @property
    def is_between_stages(self) -> bool:
        """Whether a batch may be on its way through a pipeline. Then stages cannot wait for each
        other, and nothing may be cleared."""
        scheduler: Any = self._scheduler()
        if parallel.pp_size() == 1:
            return False
        return not scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused)

    @property
    def replying(self) -> list[Any]:
        """Requests that decode."""
        found: list[Any] = self._scheduler().running_batch.reqs  # type: ignore[union-attr]
        return found

    @property
    def decoding(self) -> int:
        """How many they are."""
        return len(self.replying)

    def has_another(self, req: Any) -> bool:
        """Whether another request with the `rid` of this one waits or runs."""
        others = (one for one in self.requests if one is not req and not fields.is_over(one))
        return any(fields.name_of(one) == fields.name_of(req) for one in others)

    @property
    def draft_runner(self) -> Any:
        """The model runner of a draft model; None without one. Built before the tree."""
        worker = self._scheduler().draft_worker  # type: ignore[union-attr]
        draft = worker.draft_worker if worker is not None else None
        return draft.draft_runner if draft is not None else None

    @property
    def event_publisher(self) -> Any:
        """SGLang's, of KV events."""
        return self._scheduler().kv_events_publisher.kv_event_publisher  # type: ignore[union-attr]

    @cached_property
    def exporter(self) -> Exporter | None:
        """Where the tiers' numbers go with --enable-metrics, labelled as SGLang's own are."""
        reporter = self._scheduler().metrics_reporter  # type: ignore[union-attr]
        if not reporter.current_scheduler_metrics_enabled:
            return None
        return Exporter(reporter.metrics_collector.labels)


BUILDING: contextvars.ContextVar[OwnScheduler] = contextvars.ContextVar("hc_scheduler")
"""The scheduler that is being built in this process: SGLang's tree factories are not given it."""
