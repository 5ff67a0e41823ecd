"""The half of the tree that keeps: what requests compute on the device becomes blocks below it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_hc.capture.capture import Capture
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.away import AwaySessions
from sglang_hc.restore.restorer import Restorer
from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine import in_place
from sglang_hc.srt.engine.guard import SglangMethod, method, nothing
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.engine.passes import prefilled, segments_of
from sglang_hc.srt.engine.scheduler import OwnScheduler
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.srt.model.weight_versions import WeightVersions
from sglang_hc.srt.requests import agents
from sglang_hc.srt.requests.images import packed
from sglang_hc.srt.requests.namespaces import keeps_state
from sglang_hc.srt.requests.pins import pin_request_of
from sglang_hc.srt.requests.scheduler_queue import SchedulerQueue
from sglang_hc.srt.requests.tools import called_by
from sglang_hc.srt.tree.audit import Audit
from sglang_hc.srt.tree.states import TreeStates
from sglang_hc.srt.tree.window_tree import WindowTree
from sglang_hc.tiers.forgetting import Answer, Forgetter
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tiers.trace import Recorder
from sglang_hc.tree.forgetting import Forgetting, hidden_namespace
from sglang_hc.tree.identity import Prefix


class CapturingTree(WindowTree):
    """The device tree with capture. Its attributes are made by `HcRadixCache`."""

    weights: WeightVersions

    tiers: Tiers
    capture: Capture
    restorer: Restorer
    scheduler: OwnScheduler
    compute_stream: ComputeStream
    waiting: SchedulerQueue
    forgetter: Forgetter
    audit: Audit | None
    states: TreeStates | None
    _recorder: Recorder | None
    _away: AwaySessions | None

    @property
    def version(self) -> str | None:  # type: ignore[override]
        return self.weights.name

    @property
    def stopped(self) -> bool:
        """Audits found what was restored wrong too often, or the weights have no version."""
        return self.weights.changing or (self.audit is not None and self.audit.stopped)

    @method(answer=nothing)
    def before_forward(self, forward_batch: Any) -> None:
        """A pass is about to run: if it only prefills, its time tells what prefill costs."""
        if forward_batch.forward_mode == ForwardMode.EXTEND:
            self.restorer.prefill_begins(prefilled(forward_batch))

    def _abandon_pass(self, forward_batch: Any, requests: list[Any]) -> None:
        """The pass was submitted; its restorations are over whatever became of its rows."""
        for req in requests:
            self.drop(req)
        self.tiers.after_pass(())

    @method(_abandon_pass, answer=nothing)
    def after_forward(self, forward_batch: Any, requests: list[Any]) -> None:
        """A pass was submitted on the compute stream, which is current."""
        if self._recorder is not None:
            for req in requests:
                host, storage = fields.tokens_from_tiers(req)
                self._recorder.admitted(serial_of(req), host + storage, storage)
        capture, mode = self.capture, forward_batch.forward_mode
        if capture.hidden is None or mode.is_target_verify():
            self.tiers.after_pass(())  # rows of a verify pass are taken when they are accepted
            return
        segments = segments_of(forward_batch, requests)
        if mode.is_extend():
            for req, segment in zip(requests, segments, strict=True):
                if not capture.is_open(segment.request) and self._keeps(req):
                    before = packed(req, fields.prompt_of(req)[: segment.position])
                    capture.open(segment.request, Prefix(fields.namespace_of(req), before))
        self.tiers.after_pass(segments)

    def give_up(self, req: Any, *_: Any, **__: Any) -> None:
        """Nothing more is saved of a request, and nothing fetched for it."""
        self.drop(req)
        self.waiting.give_up(req)

    @method(give_up)
    def checkpoint(self, theirs: SglangMethod, req: Any, *, up_to: int) -> None:
        """A prompt, or a chunk of one, is in the tree, or all of a request that is over: keep its
        blocks.

        After a chunk only full blocks: the tail would be replaced by the next chunk's.
        """
        if self._recorder is not None and fields.has_answer(req):
            self._recorder.answered(serial_of(req))
        if fields.is_over(req):
            self._keep_last(req, up_to, up_to)
            if fields.generates(req):
                in_place.answered()
        elif self._keeps(req):
            tokens = fields.chunk_end_ids(req)
            length = len(tokens) // self.page_size * self.page_size
            if len(tokens) < len(fields.prompt_of(req)):
                length = length // BLOCK_TOKENS * BLOCK_TOKENS
            self.commit(req, tokens, length, final=False)
        before = fields.tokens_in_tree(req)
        theirs(req, up_to=up_to)
        if self.states is not None and self._keeps(req):
            self.states.keep_of_tree(self, req, before)

    def _released_without(self, req: Any, **_: Any) -> None:
        self._freed = None
        self.drop(req)
        self.waiting.finished(req, 0)

    @method(_released_without)
    def on_release(self, theirs: SglangMethod, req: Any, *, checkpointed: bool) -> None:
        """A request has given its slots up: it is over, or is queued again (retraction), and what
        it has computed is kept. Of one that was aborted only what the tree has is. Its slots are
        free, and nothing that the model runs has written to them yet."""
        owned = fields.owned_tokens(req)
        if not checkpointed:
            retracted = not fields.is_over(req)
            keep = owned if retracted else min(owned, fields.tokens_in_tree(req))
            self._keep_last(req, keep, owned)
            if retracted and self.states is not None and self._keeps(req):
                self.states.keep_of_request(self, req)
        self._freed = None
        self.waiting.finished(req, -(-owned // BLOCK_TOKENS))
        theirs(req, checkpointed=checkpointed)

    def _keep_last(self, req: Any, keep: int, computed: int) -> None:
        """Keep the first `keep` of the tokens that a request has computed, which computes none any
        more; what lies behind has no slots in its row."""
        told = self._recorder is not None or self._away is not None
        tool = called_by(req) if told else ""
        if self._recorder is not None:
            recorded = self._recorder.is_open(serial_of(req))
            tokens = packed(req, fields.first_ids(req, computed)) if recorded else b""
            self._recorder.finished(serial_of(req), Prefix(fields.namespace_of(req), tokens), tool)
        if not self._keeps(req):
            return
        retracted = not fields.is_over(req)
        tokens = fields.first_ids(req, keep)
        length = len(tokens) // self.page_size * self.page_size
        left = self.commit(req, tokens, length, final=True)
        pin = None if retracted else self._pin_of(req)
        retains = [] if retracted else agents.retains_of(req)
        session = agents.session_of(req, retains)
        self.tiers.used(left, pin, is_over=not retracted, session=session)
        agents.apply(self.tiers.retention, left, retains, session)
        if self._away is not None and not retracted:
            self._away.answered(serial_of(req), left, fields.prompt_tokens(req), tool)
        if retracted:
            self.capture.counters["retracted_tokens"] += length
        else:
            self.waiting.answered(req)

    def _pin_of(self, req: Any) -> tuple[str, float] | None:
        """The session and the seconds for which a request asks to hold what it leaves behind."""
        pin = pin_request_of(req)
        if pin is None:
            return None
        session = pin.session or fields.name_of(req)
        if pin.session is None and self.scheduler.has_another(req):
            session = f"{session}#{serial_of(req)}"  # the other's pin takes the name itself
        return session, pin.ttl_s

    def commit(self, req: Any, tokens: array[int], length: int, final: bool) -> Prefix:
        kept = Prefix(fields.namespace_of(req), packed(req, tokens[:length]))
        row = self.req_to_token_pool.req_to_token[fields.row_of(req), :length]
        # SGLang gives the row to another request while the forward stream is still busy.
        slots = row.to(torch.int64, copy=True)
        self.compute_stream.will_read(slots)
        end = self.end_rows(req, length)
        if end is not None:
            self.compute_stream.will_read(end.slots)
        with self.compute_stream.entered():
            self.capture.commit(serial_of(req), kept, slots, final=final, end=end)
        return kept

    def drop(self, req: Any) -> None:
        """Nothing of a request that was not committed is kept."""
        with self.compute_stream.entered():  # a snapshot leaves the device behind the running batch
            self.capture.drop(serial_of(req))

    def forget(self, what: Forgetting, ended: Callable[[Answer], object]) -> None:
        """Forget namespaces in every tier. ended: told of it, perhaps at once."""
        self.forgetter.forget(what, self._forget_above, ended)

    def _forget_above(self, what: Forgetting, hidden: str) -> tuple[int, list[bytes]]:
        """On the device and in host memory; see `forgetting.ForgetAbove`."""
        for req in self.scheduler.requests:
            namespace = fields.namespace_of(req)
            if what.names(namespace):
                self.give_up(req)
                fields.set_namespace(req, hidden_namespace(hidden, namespace))
        with self.compute_stream.entered():
            block_ids = self.tiers.forget(what)
        return self.forget_namespaces(what.names, hidden), block_ids

    def _keeps(self, req: Any) -> bool:
        """Whether what the request leaves is kept below the device."""
        if self.disable or self.stopped or not keeps_state(req):
            return False
        return not self.forgetter.covers(fields.namespace_of(req))
