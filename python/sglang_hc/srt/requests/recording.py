"""What `--hc-trace` says of a server; and the load of one without tiers (`--hc-disable`), which
has no tree of ours that is told of its requests.
"""

from __future__ import annotations

import time
from typing import Any

from sglang_hc.config import HcConfig
from sglang_hc.forms import LayerPlan
from sglang_hc.srt.arguments.server_args import options_of
from sglang_hc.srt.binding import arguments, fields
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.model.calibrate import model_and_device
from sglang_hc.srt.ranks.replicas import place_of
from sglang_hc.srt.requests.namespaces import keeps_state
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.tiers.recording import recorder_of
from sglang_hc.tiers.trace import Recorder, Served
from sglang_hc.tree.identity import Prefix, pack_tokens
from sglang_hc.tree.namespaces import client_namespace

OWN = "_hc_recorded"
"""Attribute of a Scheduler without tiers that records: our `Recorded`."""

NOBODYS = bytes(16)
"""What identities of blocks begin with where none are stored."""


def served_with(
    config: HcConfig, runner: Any, plan: LayerPlan, pool: HostPool, disk: LowerTier | None
) -> Served:
    """How a server with tiers runs. plan: of the model. pool: of the host tier."""
    return _served(
        runner,
        host_slots=pool.num_slots,
        disk_slots=0 if disk is None else disk.capacity,
        slot_bytes=pool.layout.slot_bytes,
        layer_plan=str(plan),
        eviction=config.eviction,
        prefetch=config.prefetch,
        schedule=config.schedule,
        restore=config.restore,
        write=config.write,
        remote=config.remote is not None,
    )


def _served(runner: Any, **tiers: Any) -> Served:
    sizes = arguments.pass_sizes(arguments.of(runner))
    return Served(
        model=", ".join(model_and_device(runner)),
        context=int(runner.model_config.context_len),
        kv_tokens=int(runner.max_total_num_tokens),
        page_size=int(runner.page_size),
        running=int(runner.max_running_requests),
        chunk=sizes.chunk or 0,
        mixed=sizes.is_mixed,
        overlap=arguments.has_overlap(arguments.of(runner)),
        **tiers,
    )


class Recorded:
    """The requests of a server without tiers, but for those with images and the like, whose ids
    are no tokens."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def queued(self, req: Any) -> None:
        """A request comes, or comes again."""
        if keeps_state(req):
            self._recorder.arrived(serial_of(req), _path(req, fields.told_tokens(req)))

    def processed(self, req: Any) -> None:
        """A pass of a request is over. SGLang asks again for those that were over before."""
        request = serial_of(req)
        if not self._recorder.is_open(request):
            return
        if fields.has_answer(req):
            self._recorder.answered(request)
        if fields.is_over(req):
            self._recorder.finished(request, _path(req, fields.told_tokens(req) - 1))


def _path(req: Any, tokens: int) -> Prefix:
    namespace = client_namespace(fields.salt_of(req), fields.namespace_of(req))
    return Prefix(namespace, pack_tokens(fields.first_ids(req, tokens)))


def attach(scheduler: Any) -> None:
    """Behind Scheduler.__init__. Raises ConfigError."""
    args = arguments.of(scheduler)
    config = options_of(args)
    if config is None or not config.disable:
        return
    runner = scheduler.tp_worker.model_runner
    suffix = place_of(runner).suffix
    recorder = recorder_of(config, suffix, _served(runner), NOBODYS, time.monotonic)
    if recorder is not None:
        setattr(scheduler, OWN, Recorded(recorder))


def queued(self: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE Scheduler._add_request_to_queue."""
    recorded: Recorded | None = getattr(self, OWN, None)
    if recorded is not None and not fields.is_probe(req):
        recorded.queued(req)


def processed(result: None, self: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER Scheduler.process_batch_result."""
    recorded: Recorded | None = getattr(self, OWN, None)
    if recorded is not None:
        for req in batch.reqs:
            recorded.processed(req)
