"""The half of the tree that keeps: what requests compute on the device becomes blocks below it."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.srt.engine.guard import SglangTree
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.engine.passes import prefilled, segments_of
from sglang_hc.srt.engine.scheduler import OwnScheduler
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.srt.requests.forgetting import Forgetter
from sglang_hc.srt.requests.namespaces import keeps_state
from sglang_hc.srt.requests.pins import pin_request_of
from sglang_hc.srt.requests.scheduler_queue import SchedulerQueue
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.identity import Prefix, pack_tokens


class CapturingTree(SglangTree):
    """SGLang's tree with capture. Its attributes are made by `HcRadixCache`."""

    tiers: Tiers
    scheduler: OwnScheduler
    compute_stream: ComputeStream
    waiting: SchedulerQueue
    forgetter: Forgetter
    stopped: bool

    def before_forward(self, forward_batch: Any) -> None:
        """A pass is about to run: if it only prefills, its time tells what prefill costs."""
        if forward_batch.forward_mode == ForwardMode.EXTEND:
            self.tiers.restorer.gate.prefill_begins(prefilled(forward_batch))

    def after_forward(self, forward_batch: Any, requests: list[Any]) -> None:
        """A pass was submitted on the compute stream, which is current."""
        capture, mode = self.tiers.capture, forward_batch.forward_mode
        if capture.hidden is None or mode.is_target_verify():
            self.tiers.after_pass(())  # rows of a verify pass are taken when they are accepted
            return
        segments = segments_of(forward_batch, requests)
        if mode.is_extend():
            for req, segment in zip(requests, segments, strict=True):
                if not capture.is_open(segment.request) and self._keeps(req):
                    before = pack_tokens(req.full_untruncated_fill_ids[: segment.position])
                    capture.open(segment.request, Prefix(req.extra_key, before))
        self.tiers.after_pass(segments)

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        """A prompt, or a chunk of one, is in the tree: keep its blocks.

        After a chunk only full blocks: the tail would be replaced by the next chunk's.
        """
        if self._keeps(req):
            tokens = req.get_fill_ids()
            length = len(tokens) // self.page_size * self.page_size
            if chunked:
                length = length // BLOCK_TOKENS * BLOCK_TOKENS
            self.commit(req, tokens, length, final=False)
        super().cache_unfinished_req(req, chunked=chunked)

    def cache_finished_req(
        self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        """A request is over, or gives its slots up and is queued again (retraction): what it has
        computed is kept. Of one that was aborted only what the tree has is."""
        if self._keeps(req):
            retracted = not is_insert and not req.finished()
            keeps_all = (is_insert or retracted) and not self.disable_finished_insert
            keep = kv_len_to_handle  # what lies behind has no slots in the request's row yet
            if not keeps_all:
                keep = min(keep, req.cache_protected_len)
            tokens = (req.origin_input_ids + req.output_ids)[:keep]
            length = len(tokens) // self.page_size * self.page_size
            left = self.commit(req, tokens, length, final=True)
            self.tiers.used(left)
            if retracted:
                self.tiers.capture.counters["retracted_tokens"] += length
            else:
                self._pin(req, left)
                self.waiting.answered(req)
        self.waiting.finished(req, -(-kv_len_to_handle // BLOCK_TOKENS))
        super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)

    def _pin(self, req: Any, left: Prefix) -> None:
        """A request is over; if it asks for it, `left`, what it leaves behind, stays."""
        pin = pin_request_of(req)
        if pin is not None:
            session = pin.session or req.rid
            if pin.session is None and self.scheduler.has_another(req):
                session = f"{req.rid}#{serial_of(req)}"  # the other's pin takes the name itself
            self.tiers.retention.pin_if_possible(left, session, pin.ttl_s)

    def commit(self, req: Any, tokens: array[int], length: int, final: bool) -> Prefix:
        kept = Prefix(req.extra_key, pack_tokens(tokens[:length]))
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, :length]
        # SGLang gives the row to another request while the forward stream is still busy.
        slots = row.to(torch.int64, copy=True)
        self.compute_stream.will_read(slots)
        with self.compute_stream.entered():
            self.tiers.capture.commit(serial_of(req), kept, slots, final=final)
        return kept

    def _keeps(self, req: Any) -> bool:
        """Whether what the request leaves is kept below the device."""
        if self.disable or self.stopped or not keeps_state(req):
            return False
        return not self.forgetter.covers(req.extra_key)
