"""The server checks itself while it is idle (`--hc-audit`): restored blocks are computed again.

    restored   a share of the blocks of a restoration is sampled, and pinned until it is audited
    step       in an idle pass: a chunk of their history runs through the model, into device slots
               of its own, and the sampled blocks in it are compared
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
from sglang_hc.device.exactness import relative_error
from sglang_hc.forms import BLOCK_TOKENS, Form
from sglang_hc.policy.audit import (
    MOST_SAMPLES,
    MOST_TOKENS,
    PINNED_SHARE,
    Findings,
    Sampler,
    bound,
)
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.srt.model.kv_pool import KvPoolRows
from sglang_hc.srt.model.recompute import COARSE, RECOMPUTED, LayerRecomputer
from sglang_hc.srt.model.startup_checks import TOLERANCE
from sglang_hc.srt.requests.namespaces import keeps_state
from sglang_hc.srt.tree.device_tree import DeviceTree
from sglang_hc.store.host_pool import HostPool
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.identity import root_id, unpack_tokens
from sglang_hc.tree.namespaces import Namespace

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 256
"""Most tokens of one pass, whole blocks: a request that comes waits for one pass."""


class _Sample(NamedTuple):
    """Places in one path and the blocks there, root first, each pinned. adapter: SGLang's id of the
    LoRA with which they were computed."""

    blocks: list[tuple[int, BlockNode]]
    adapter: str | None


@dataclass
class _Pass:
    """An audit under way. tokens: (n,) int64 ids up to the end of the last block. slots: (n,) int64
    device slots, and those that fill the last page. done: tokens that are computed."""

    sample: _Sample
    tokens: torch.Tensor
    slots: torch.Tensor
    done: int = 0
    compared: int = 0


class _Difference(NamedTuple):
    """A layer whose state is not what the tokens give. error: relative, as `relative_error`."""

    form: Form
    layer: int
    error: float


class Audit:
    """Samples of restored blocks, and their audits. Belongs to the scheduler thread.

    stopped: a form was wrong too often. Counts audited_blocks, audit_differences,
    audit_skipped_blocks and audit_stops in `counters`.
    """

    def __init__(
        self, tiers: Tiers, stored: HostPool, on_device: KvPoolRows, taps: TapBuffer | None,
        runner: Any, compute: ComputeStream, counters: Counter[str], share: float,
    ) -> None:  # fmt: skip
        """stored: where blocks lie in host memory. on_device: what the model writes. share: of the
        restored blocks, above 0."""
        self._tiers, self._host, self._pool = tiers, tiers.host, stored
        self._kv_rows, self._taps = on_device.rows, taps
        self._counters, self._compute = counters, compute
        self._model = LayerRecomputer(runner, None)  # so the taps take what it computes
        self._kv_dtype: torch.dtype = runner.kv_cache_dtype
        self._free = runner.token_to_kv_pool_allocator.free
        self.stopped = False
        most = min(CHUNK_TOKENS, self._model.chunk, self._taps.rows if self._taps else CHUNK_TOKENS)
        self._chunk = max(1, most // BLOCK_TOKENS) * BLOCK_TOKENS
        self._sampler, self._findings = Sampler(share), Findings()
        self._samples: deque[_Sample] = deque()
        self._pass: _Pass | None = None
        self._is_off = False

    @property
    def tokens(self) -> int:
        """Device slots in use."""
        return 0 if self._pass is None else len(self._pass.slots)

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
        if keeps_state(req) and not any(map(_has_moved, path[:last])):
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

    def release(self) -> int:
        """End the audit under way. Returns how many device slots are free again."""
        ended, self._pass = self._pass, None
        if ended is None:
            return 0
        # Whoever gets them next writes behind what is still written, on the same stream.
        self._free(ended.slots)
        self._give_up(ended.sample, ended.compared)
        return len(ended.slots)

    def _give_up(self, sample: _Sample, compared: int = 0) -> None:
        self._host.unpin(node for _, node in sample.blocks)
        self._counters["audit_skipped_blocks"] += len(sample.blocks) - compared

    # -- idle passes -----------------------------------------------------------------------------

    def step(self, tree: DeviceTree) -> bool:
        """One chunk of an audit. The server is idle. Returns whether there was one. tree: gives
        device slots, and loses what is wrong."""
        if self._pass is None:
            self._begin(tree)
        if self._pass is None:
            return False
        try:
            with self._compute.entered():
                self._advance(self._pass, tree)
        except Exception:
            logger.exception("sglang-hc: an audit failed; there are none until a restart")
            self._is_off = True
            self.clear()
        return True

    def _begin(self, tree: DeviceTree) -> None:
        """Begin with the oldest sample that can be audited."""
        while self._samples and self._pass is None:
            sample = self._samples.popleft()
            there = [node for _, node in sample.blocks if node.ready]
            slots = None
            if there and self._model.has_adapter(sample.adapter):
                tokens = unpack_tokens(b"".join(node.tokens for node in there[-1].path()))
                slots = tree.allocate(-(-len(tokens) // tree.page_size) * tree.page_size)
            if slots is None:
                self._give_up(sample)
            else:
                self._compute.will_read(slots)
                self._pass = _Pass(sample, torch.from_numpy(tokens), slots)

    def _advance(self, audit: _Pass, tree: DeviceTree) -> None:
        start, stop = audit.done, min(audit.done + self._chunk, len(audit.tokens))
        layers, adapter = self._pool.layout.plan.num_layers, audit.sample.adapter
        tokens, slots = audit.tokens[start:stop], audit.slots[:stop]
        self._model.recompute(tokens, slots, layers, adapter=adapter)
        audit.done = stop
        for place, node in audit.sample.blocks:
            first = place * BLOCK_TOKENS
            if not start <= first < stop or not node.ready:
                continue
            found = self._differences(node, first - start, audit.slots[first:])
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

    def _differences(self, node: BlockNode, row: int, slots: torch.Tensor) -> list[_Difference]:
        """Of each form the first layer that is wrong. row: of the block in the last pass. slots:
        those of the block, and others behind them."""
        plan, rows = self._pool.layout.plan, node.num_tokens
        wrong: dict[Form, _Difference] = {}

        def compare(form: Form, layer: int, again: torch.Tensor, stored: Any) -> None:
            kept = torch.from_numpy(stored).view(again.dtype)
            error = relative_error(again.cpu(), kept)
            if not error <= bound(TOLERANCE.get(again.dtype, COARSE), layer):
                wrong.setdefault(form, _Difference(form, layer, error))

        for index, layer in enumerate(plan.hidden_layers):
            assert self._taps is not None
            again = self._taps.states[index, row : row + rows]
            compare(Form.HIDDEN, layer, again, self._pool.hidden[node.slot, index, :rows])
        for index, layer in enumerate(plan.kv_layers):
            for part, kept in zip(self._kv_rows(layer), self._pool.kv, strict=True):
                again = part[slots[:rows]].view(self._kv_dtype)
                compare(Form.KV, layer, again, kept[node.slot, index, :rows])
        return list(wrong.values())

    def _found(self, node: BlockNode, place: int, found: Sequence[_Difference]) -> None:
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
    if model not in RECOMPUTED:
        return f"{model} is not among the models that were checked to run on their own"
    if getattr(runner.model_config.hf_text_config, "n_routed_experts", None):
        return "a router near a tie chooses other experts, which looks like other tokens"
    if taps is not None and taps.rows < BLOCK_TOKENS:
        return f"--chunked-prefill-size is below {BLOCK_TOKENS} tokens"
    return None


def _has_moved(node: BlockNode) -> bool:
    """Whether a block, or one before it, may come from another place (`--hc-overflow reembed`)."""
    return node.moved is not None or Namespace.of(node.namespace).cut is not None
