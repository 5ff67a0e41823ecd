"""Hooks around SGLang's scheduler, model runner and tokenizer that belong to no one feature.

`plugin.all_hooks` lists every hook. Order of events in one scheduler process: `after_load_model`
(`model_state.py`) decides the layer plan and installs the taps, before any CUDA graph is captured;
SGLang sizes the KV pool and captures; the tree factory (`build.py`) builds the tiers; batches run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from fastapi import HTTPException
from sglang.srt.managers.io_struct import (
    ClearHiCacheReqInput,
    ClearHiCacheReqOutput,
)

from sglang_hc.errors import ConfigError
from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.engine import in_place
from sglang_hc.srt.engine.guard import tree_of
from sglang_hc.srt.engine.scheduler import BUILDING, OwnScheduler
from sglang_hc.srt.ranks import decisions
from sglang_hc.srt.requests import recording
from sglang_hc.srt.requests.overflow import check_window
from sglang_hc.srt.scheduling import streaming, weights
from sglang_hc.srt.scheduling.speculation import hand_over
from sglang_hc.srt.tree.tree_backend import HcRadixCache

logger = logging.getLogger(__name__)

NOT_CLEARED = (
    "the storage back end was not cleared, or not all of it: without --hc-disk and --hc-remote "
    "there is none that is this server's; else see its log, and try again"
)

_running: ContextVar[tuple[HcRadixCache, list[Any]] | None] = ContextVar("hc_running", default=None)
"""The tree and the requests of the batch that is being run."""


def build_scheduler(build: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND Scheduler.__init__: the tree factory learns whose tree it builds, and what cannot be
    served is refused in one line, without the stack that led there. One of several ranks takes part
    in their decisions from then on."""
    token = BUILDING.set(OwnScheduler(self))
    try:
        build(self, *args, **kwargs)
        check_window(self)
        decisions.attach(self)
        streaming.attach(self)
        recording.attach(self)
    except ConfigError as error:
        logger.error("sglang-hc: %s", error)
        logger.debug("refused here", exc_info=True)
        raise error.with_traceback(None) from None
    finally:
        BUILDING.reset(token)


def arrange(result: None, self: Any, waiting_queue: list[Any], *args: Any, **kwargs: Any) -> None:
    """AFTER SchedulePolicy.calc_priority: with `--hc-schedule ready-first` the requests at the head
    of SGLang's order are put into ours, in place.

    The order of arrival, which SGLang leaves as it is where it serves first come, first served, is
    restored at the top of each pass (`SchedulerQueue.on_schedule_step`).
    """
    tree = tree_of(self)
    if tree is not None:
        tree.waiting.arrange(waiting_queue)


def preempt_to_schedule(
    original: Callable[..., bool], self: Any, req: Any, *args: Any, **kwargs: Any
) -> bool:
    """AROUND PrefillAdder.preempt_to_schedule (`--enable-priority-scheduling`): nobody makes room
    for a request that waits for its state."""
    tree = tree_of(self)
    if tree is not None and not tree.waiting.may_run(req):
        return False
    return original(self, req, *args, **kwargs)


def run_batch(
    original: Callable[..., Any], self: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND Scheduler.run_batch: the model runner knows neither the tree nor the requests; it
    finds them in `_running`."""
    tree = tree_of(self)
    if tree is None:
        return original(self, batch, *args, **kwargs)
    in_place.prove()
    token = _running.set((tree, list(batch.reqs)))
    try:
        return original(self, batch, *args, **kwargs)
    finally:
        _running.reset(token)


def batch_ran(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER Scheduler.run_batch: a speculating pass says which rows it accepted. Without tiers
    nobody else writes the metrics."""
    tree = tree_of(self)
    if tree is not None:
        hand_over(tree, result)
    else:
        streaming.publish(self)


def forward(
    original: Callable[..., Any], self: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND ModelRunner.forward: after the pass, take its rows and end its restorations."""
    running = _running.get()
    if running is None or self.is_draft_worker:
        return original(self, forward_batch, *args, **kwargs)
    tree, requests = running
    tree.before_forward(forward_batch)
    output = original(self, forward_batch, *args, **kwargs)
    tree.after_forward(forward_batch, requests)
    return output


def internal_state(result: Any, self: Any, recv_req: Any) -> Any:
    """AFTER Scheduler.get_internal_state: the tiers' numbers in /server_info, and what each rank
    counted. Only the first rank's answer is sent."""
    tree = tree_of(self)
    if tree is not None:
        result.internal_state["hc"] = tree.stats()
    report = streaming.report_of(self)
    if report is not None:
        result.internal_state["hc"] = {"throughput": report.stats()}
    return result


def sleep_on_idle(original: Callable[..., None], self: Any) -> None:
    """AROUND Scheduler.maybe_sleep_on_idle, the end of an idle pass: audits come before sleep."""
    tree = tree_of(self)
    if tree is None or tree.audit is None or not tree.audit.step(tree):
        original(self)


def change_weights(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """AROUND each weight update: see `weights.change`."""
    if weights.in_host_memory(self):
        return weights.refusal(original.__name__)
    tree = tree_of(self.scheduler)
    name = original.__name__
    if tree is None or weights.changes_none(name, self, recv_req):
        return original(self, recv_req)
    if tree.scheduler.is_between_stages:
        return weights.UPDATES[name](
            success=False,
            message="with --pp-size above 1 and sglang-hc weights change while no request runs; "
            "wait for the requests, or abort them, and try again",
        )
    return weights.change(tree, original, self, recv_req)


def clear_storage(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """AROUND Scheduler.clear_hicache_storage_wrapped: answered when what was below host memory is
    gone for good. Nothing is cleared while a batch is between two stages of a pipeline."""
    tree = tree_of(self)
    if tree is None:
        return original(self, recv_req)

    def ended(good: bool) -> None:
        self.send_control_output(ClearHiCacheReqOutput(success=good), recv_req)

    if tree.scheduler.is_between_stages or not tree.clear_storage_backend(ended):
        return ClearHiCacheReqOutput(success=False)
    return None


async def clear_everywhere(original: Callable[..., Any], self: Any) -> Any:
    """AROUND TokenizerManager.clear_hicache_storage: SGLang looks at the first replica's answer
    alone, and its route says that it cleared whatever that was."""
    if config_of(arguments.of(self)) is None:
        return await original(self)
    self.auto_create_handle_loop()
    answers = await self.clear_hicache_storage_communicator(ClearHiCacheReqInput())
    if not all(answer.success for answer in answers):
        raise HTTPException(503, NOT_CLEARED)
    return answers[0]


def check_input_ids(self: Any, obj: Any, input_ids: list[int] | None) -> None:
    """BEFORE TokenizerManager._validate_one_request: token ids must be in the vocabulary.

    SGLang looks an id up in the embedding unchecked, which ends the scheduler process. ValueError
    becomes HTTP status 400.
    """
    if not input_ids or getattr(obj, "input_embeds", None) is not None:
        return
    if not isinstance(input_ids[0], int):
        return  # embeddings or pairs: not token ids
    vocabulary = self.model_config.vocab_size
    low, high = min(input_ids), max(input_ids)
    if low < 0 or (high >= vocabulary and not getattr(obj, "contains_mm_input", bool)()):
        wrong = low if low < 0 else high
        raise ValueError(
            f"input_ids contains the token id {wrong}, which is not in the model's vocabulary; "
            f"valid ids are 0 to {vocabulary - 1}"
        )
