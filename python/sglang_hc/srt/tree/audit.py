"""The server checks itself while it is idle (`--hc-audit`): restored blocks are computed again.

    restored   a share of the blocks of a restoration is sampled, and pinned until it is audited
    step       in an idle pass: a chunk of their history runs through the model, into device slots
               of its own, and the sampled blocks in it are compared, with what they have of ends
    wrong      the block and what was computed behind it leave every tier; when a form was wrong too
               often, nothing is restored or saved any more

A request that comes waits for one chunk at most. The rest of the audit waits until the server is
idle again, and SGLang sees its device slots as evictable meanwhile. There is no request of SGLang's
behind it, so nothing is answered, counted or kept.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sglang_hc.capture.taps import TapBuffer
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.audit import (
    MOST_SAMPLES,
    MOST_TOKENS,
    PINNED_SHARE,
    Findings,
    Sampler,
)
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.served import RECOMPUTED
from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.srt.model.recompute import LayerRecomputer
from sglang_hc.srt.model.state_pool import StatePool
from sglang_hc.srt.tree.audit_compare import Comparison, Difference
from sglang_hc.srt.tree.audit_room import AuditRoom, Freed
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.identity import root_id, unpack_tokens
from sglang_hc.tree.namespaces import Namespace

logger = logging.getLogger(__name__)

AUDITED = RECOMPUTED | {
    "DeepseekV32ForCausalLM", "Gemma4ForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM",
    "GraniteMoeHybridForCausalLM", "KimiLinearForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
}  # fmt: skip
"""Model classes that were checked to compute on their own what they compute in a request."""

CHUNK_TOKENS = 256
"""Most tokens of one pass, whole blocks: a request that comes waits for one pass."""


class _Sample(NamedTuple):
    """Places in one path and the blocks there, root first, each pinned. adapter: SGLang's id of the
    LoRA with which they were computed."""

    blocks: list[tuple[int, BlockNode]]
    adapter: str | None


@dataclass
class _Pass:
    """An audit under way. tokens: (n,) int64 ids up to the end of the last block. done: tokens that
    are computed."""

    sample: _Sample
    tokens: torch.Tensor
    room: AuditRoom
    done: int = 0
    compared: int = 0


class Audit:
    """Samples of restored blocks, and their audits. Belongs to the scheduler thread.

    stopped: a form was wrong too often. Counts audited_blocks, audit_differences,
    audit_skipped_blocks and audit_stops in `counters`.
    """

    def __init__(
        self, tiers: Tiers, comparison: Comparison, states: StatePool | None,
        taps: TapBuffer | None, runner: Any, compute: ComputeStream, counters: Counter[str],
        share: float,
    ) -> None:  # fmt: skip
        """states: of recurrent layers; None without them. share: of the restored blocks, above
        0."""
        self._tiers, self._host = tiers, tiers.host
        self._comparison, self._states = comparison, states
        self._counters, self._compute = counters, compute
        self._model = LayerRecomputer(runner, None)  # so the taps take what it computes
        self.stopped = False
        most = min(CHUNK_TOKENS, self._model.chunk, taps.rows if taps else CHUNK_TOKENS)
        self._chunk = max(1, most // BLOCK_TOKENS) * BLOCK_TOKENS
        self._sampler, self._findings = Sampler(share), Findings()
        self._samples: deque[_Sample] = deque()
        self._pass: _Pass | None = None
        self._is_off = False

    @property
    def held(self) -> Freed:
        """Device slots in use."""
        return Freed() if self._pass is None else self._pass.room.held

    @property
    def waiting(self) -> int:
        """Samples whose audit is not over."""
        return len(self._samples) + (self._pass is not None)

    # -- samples ---------------------------------------------------------------------------------

    def restored(self, req: Any, path: Sequence[BlockNode], start: int, stop: int) -> None:
        """Tokens [start, stop) of a request are restored from a path of the tree."""
        first, last = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        picked = [first + number for number in self._sampler.picks(last - first)]
        if self._is_off or not picked:
            return
        blocks: list[tuple[int, BlockNode]] = []
        room = max(1, int(self._host.num_slots * PINNED_SHARE))
        if not fields.has_other_inputs(req) and not any(map(_has_moved, path[:last])):
            blocks = [(n, path[n]) for n in picked if (n + 1) * BLOCK_TOKENS <= MOST_TOKENS][:room]
        self._counters["audit_skipped_blocks"] += len(picked) - len(blocks)
        if not blocks:
            return
        while self._samples and (
            len(self._samples) >= MOST_SAMPLES or self._pinned + len(blocks) > room
        ):
            self._give_up(self._samples.popleft())
        self._host.pin(node for _, node in blocks)
        self._samples.append(_Sample(blocks, fields.adapter_of(req)))

    @property
    def _pinned(self) -> int:
        return sum(len(sample.blocks) for sample in self._samples)

    def clear(self) -> None:
        """Audit nothing of what was sampled, and hold nothing."""
        self.release()
        while self._samples:
            self._give_up(self._samples.popleft())

    def release(self) -> Freed:
        """End the audit under way. Returns which device slots are free again."""
        ended, self._pass = self._pass, None
        if ended is None:
            return Freed()
        self._give_up(ended.sample, ended.compared)
        return ended.room.give_back()

    def _give_up(self, sample: _Sample, compared: int = 0) -> None:
        self._host.unpin(node for _, node in sample.blocks)
        self._counters["audit_skipped_blocks"] += len(sample.blocks) - compared

    # -- idle passes -----------------------------------------------------------------------------

    def step(self, tree: Any) -> bool:
        """One chunk of an audit. The server is idle. Returns whether there was one. tree: the
        `HcRadixCache`, which gives device slots, and loses what is wrong."""
        try:
            if self._pass is None:
                self._begin(tree)
            if self._pass is None:
                return False
            audit, stop = self._pass, self._end_of_pass(self._pass)
            audit.room.pair(audit.done, stop)
            with self._compute.entered():
                self._advance(audit, stop, tree)
        except Exception:
            logger.exception("sglang-hc: an audit failed; there are none until a restart")
            self._is_off = True
            self.clear()
        return True

    def _begin(self, tree: Any) -> None:
        """Begin with the oldest sample that can be audited."""
        while self._samples and self._pass is None:
            sample, room = self._samples[0], None
            there = [node for _, node in sample.blocks if node.ready]
            if there and self._model.has_adapter(sample.adapter):
                tokens = unpack_tokens(b"".join(node.tokens for node in there[-1].path()))
                room = AuditRoom.taken(tree, len(tokens), self._chunk)
            self._samples.popleft()
            if room is None:
                self._give_up(sample)
            else:
                self._compute.will_read(*room.tensors)
                self._pass = _Pass(sample, torch.from_numpy(tokens), room)

    def _advance(self, audit: _Pass, stop: int, tree: Any) -> None:
        start, room, adapter = audit.done, audit.room, audit.sample.adapter
        if self._states is not None and room.state is not None and not start:
            self._states.clear(room.state)
        with room.entered():
            self._model.recompute(
                audit.tokens[start:stop], room.slots[:stop], None, adapter=adapter
            )
        audit.done = stop
        for place, node in audit.sample.blocks:
            first = place * BLOCK_TOKENS
            if not start <= first < stop or not node.ready:
                continue
            found = self._comparison.differences(node, first - start, room, first)
            audit.compared += 1
            self._counters["audited_blocks"] += 1
            if found:
                self.release()
                for path in self._tiers.drop_branch(node):
                    tree.drop_last_block(path)
                self._found(node, place, found)
                return
        if stop == len(audit.tokens):
            self.release()

    def _end_of_pass(self, audit: _Pass) -> int:
        """A chunk later, or behind the next sampled block: there are the states of recurrent
        layers, which a pass has at its end alone."""
        stop = min(audit.done + self._chunk, len(audit.tokens))
        if self._states is not None:
            ends = (node.num_tokens + place * BLOCK_TOKENS for place, node in audit.sample.blocks)
            stop = min([stop, *(end for end in ends if end > audit.done)])
        return stop

    def _found(self, node: BlockNode, place: int, found: Sequence[Difference]) -> None:
        self._counters["audit_differences"] += 1
        namespace = root_id(self._host.tree.fingerprint, node.namespace).hex()
        for form, layer, error in found:
            logger.error(
                "sglang-hc: audit: a restored block is not what its tokens give: %s form, layer %d "
                "differs by %.1e of its largest value. Block %d of a path in namespace %s, %s. It "
                "was dropped, with all that was computed behind it",
                *(form.value, layer, error, place, namespace, _ORIGIN[node.source]),
            )
        stopped = self._findings.note(difference.form for difference in found)
        if stopped is not None:
            self._counters["audit_stops"] += 1
            self.stopped = True
            self.clear()
            logger.error(
                "sglang-hc: audits keep finding wrong blocks of %s form: until a restart nothing "
                "is restored or saved any more",
                stopped.value,
            )


_ORIGIN = {
    SourceTier.HOST: "computed by this server",
    SourceTier.DISK: "read from disk",
    SourceTier.REMOTE: "read from the remote store",
}


def can_audit(tiers: Tiers, runner: Any, taps: TapBuffer | None) -> bool:
    """Whether blocks can be audited with this model and these flags; if not, the log says why."""
    reason = _excluded(tiers, runner, taps)
    if reason is not None:
        logger.info("sglang-hc: --hc-audit is off: %s", reason)
    return reason is None


def _excluded(tiers: Tiers, runner: Any, taps: TapBuffer | None) -> str | None:
    model = type(runner.model).__name__
    if not tiers.decides_alone:
        return "several ranks would have to run each pass together"
    if not runner.spec_algorithm.is_none():
        return "what a draft model keeps is not computed by the model"
    if model not in AUDITED:
        return f"{model} is not among the models that were checked to run on their own"
    if taps is not None and taps.rows < BLOCK_TOKENS:
        return f"--chunked-prefill-size is below {BLOCK_TOKENS} tokens"
    return None


def _has_moved(node: BlockNode) -> bool:
    """Whether a block, or one before it, may come from another place (`--hc-overflow reembed`)."""
    return node.moved is not None or Namespace.of(node.namespace).cut is not None
