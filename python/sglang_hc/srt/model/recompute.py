"""RECOMPUTE form: the model's own first layers run over history tokens (HCache section 4.1).

The model's forward is called with a batch made by hand and left as soon as the attention of the
last wanted layer has run: by then that layer's K/V are in the pool, and its output, like everything
behind it, is not needed. So every family keeps its own embedding step, residuals and norms, and r
layers cost r - 1 layers and one attention.

The pass needs a row of SGLang's table of device slots per request. It uses row 0, which SGLang
keeps for the padding of CUDA graphs, and leaves it as it was; all readers of the table are ordered
by the compute stream. It replaces the attention backend's metadata, which a batch makes anew when
it runs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_model

from sglang_hc.capture.taps import TapBuffer
from sglang_hc.config import HcConfig
from sglang_hc.device.exactness import relative_error
from sglang_hc.errors import ConfigError
from sglang_hc.forms import LayerPlan
from sglang_hc.policy.served import RECOMPUTED
from sglang_hc.restore.path import Restoration
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.model.families import held_layers
from sglang_hc.srt.model.kv_pool import KvPoolRows
from sglang_hc.srt.model.startup_checks import TOLERANCE
from sglang_hc.srt.ranks.start_group import StartGroup

logger = logging.getLogger(__name__)

ROW = 0
"""Row of the slot table that no request owns."""


def recompute_excluded(args: Any, model_class: str) -> str | None:
    """Why no layer can be recomputed with this model and these arguments; None when it can."""
    if model_class not in RECOMPUTED:
        return f"{model_class} is not among the families whose first layers are run on their own"
    if arguments.may_have_adapters(args):
        return "adapters change the layers per request"
    return None


def cannot_recompute(forms: str, reason: str) -> str:
    """The error for a plan with layers that cannot be recomputed."""
    return (
        f"--hc-forms {forms}: layers cannot be recomputed here: {reason}; use hidden and kv counts"
    )


def not_exact(forms: str, what: str, reason: str) -> str:
    """The error for a plan with layers that do not come back bit by bit."""
    return (
        f"--hc-forms {forms} and --hc-exact exclude each other here: {what} are not bit-exact "
        f"({reason}); leave one of the two out, or use kv counts"
    )


COARSE = 0.15
"""Tolerance where the pool rounds to 8 bits: a last place is an eighth of the value."""


class _Enough(Exception):
    """The wanted layers are in the pool; nothing after them is run."""


class LayerRecomputer:
    """Recomputes the first layers of a restoration. Implements `restore.path.Recomputer`. Belongs
    to the scheduler thread, on the compute stream."""

    def __init__(self, runner: Any, taps: TapBuffer | None) -> None:
        self._runner = runner
        self._taps = taps
        self._table = runner.req_to_token_pool.req_to_token
        sizes = arguments.pass_sizes(arguments.of(runner))
        self.chunk: int = sizes.chunk or sizes.uncut
        """Tokens per pass: what SGLang sized the activations of a prefill for."""
        self._attention: dict[int, list[RadixAttention]] = {}
        modules = list(runner.model.modules())
        self._logits = [module for module in modules if isinstance(module, LogitsProcessor)]
        for module in modules:
            if isinstance(module, RadixAttention):
                self._attention.setdefault(module.layer_id, []).append(module)

    def has_adapter(self, adapter: str | None) -> bool:
        """Whether the model can run with this LoRA, or with none."""
        return adapter is None or adapter in self._runner.lora_manager.loras

    def run(self, restoration: Restoration, between: Callable[[], None]) -> None:
        assert restoration.prefix_slots is not None, "layers cannot attend to what came before"
        slots = torch.cat([restoration.prefix_slots, restoration.device_slots])
        tokens = torch.from_numpy(restoration.tokens())
        self.recompute(tokens, slots, restoration.recompute, between=between)

    def recompute(
        self, tokens: torch.Tensor, slots: torch.Tensor, layers: int | None,
        chunk: int | None = None, between: Callable[[], None] = lambda: None, decode: bool = False,
        adapter: str | None = None,
    ) -> None:  # fmt: skip
        """Write K/V of layers [0, layers) of the last len(tokens) tokens of a sequence; None: all
        that the layers of the model keep of them.

        tokens: (n,) int64 ids. slots: (m,) int64 device slots of the sequence, m >= n; the layers
        read the first m - n. chunk: tokens per pass. between: called from one pass to the next.
        decode: run decode steps instead of prefills; for chunks of one token. adapter: SGLang's id
        of the LoRA to run with.
        """
        row = self._table[ROW, : slots.numel()]
        tokens = _on_device(tokens, slots.device)
        first, stop = slots.numel() - tokens.numel(), slots.numel()
        chunk = chunk or self.chunk
        try:
            row.copy_(slots)
            with torch.no_grad(), self._taps_paused(), self._leaving_after(layers):
                for start in range(first, stop, chunk):
                    if start > first:
                        between()
                    end = min(start + chunk, stop)
                    piece = tokens[start - first : end - first]
                    self.forward_pass(piece, slots[start:end], start, decode, adapter)
        finally:
            row.zero_()

    def forward_pass(
        self, tokens: torch.Tensor, slots: torch.Tensor, start: int, decode: bool,
        adapter: str | None,
    ) -> None:  # fmt: skip
        """One forward pass over tokens at positions [start, start + n), up to the last layer."""
        runner = self._runner
        batch = _batch(tokens, slots, start, runner.spec_algorithm)
        if decode:
            batch.forward_mode = ForwardMode.DECODE
        runner.kv_index_translator.bind_own_plan(batch)
        if arguments.runs_adapters(arguments.of(runner)):
            batch.lora_ids = [adapter]
            runner.lora_manager.fetch_new_loras({adapter})
            runner.lora_manager.prepare_lora_batch(batch)
        context = ForwardContext(attn_backend=runner.attn_backend)
        experts = runner.model.shared_experts_config
        with (
            get_model().override(shared_experts=experts),
            forward_context(context, forward_batch=batch),
        ):
            runner.attn_backend.init_forward_metadata(batch)
            try:
                runner.model.forward(batch.input_ids, batch.positions, batch)
            except _Enough:
                return
        raise RuntimeError("the model ran to its end without the layer that was to be its last")

    def _taps_paused(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._taps is None else self._taps.paused()

    @contextlib.contextmanager
    def _leaving_after(self, layers: int | None) -> Iterator[None]:
        """End the model's forward when the attention of the last of so many layers, of whichever
        kind, has run; None: when all layers have."""

        def leave(*_: Any) -> None:
            raise _Enough

        if layers is None:
            hooks = [one.register_forward_pre_hook(leave) for one in self._logits]
        else:
            last = self._attention[layers - 1]
            hooks = [module.register_forward_hook(leave) for module in last]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class Pieces(NamedTuple):
    """What running a few tokens in several ways showed.

    wrong: why layers must not be recomputed; None: the ways agree but for rounding. bit: they agree
    bit by bit, decode steps included. difference: the largest one, relative to the largest
    magnitude of a layer's K and V.
    """

    wrong: str | None
    bit: bool
    difference: float


def compare_pieces(
    recomputer: LayerRecomputer, pool: KvPoolRows, slots: torch.Tensor, dtype: torch.dtype,
    layers: int, group: StartGroup,
) -> Pieces:  # fmt: skip
    """At start: are K/V of the first `layers` layers the same whether tokens are run in one piece,
    in two, or with the second half one by one, as decode steps first wrote them?

    With two layers the second depends on the attention of the first, with a prefix in the pool in
    one case and without in the other. slots: (n,) int64 unused device slots; they are written.
    dtype: of the pool's elements. group: the ranks that run the layers together and go by the
    largest difference of any.
    """
    tokens = torch.arange(slots.numel())
    half = len(tokens) // 2

    def written() -> list[torch.Tensor]:
        found = []
        for layer in range(layers):
            rows = [part[slots].view(dtype).float() for part in pool.rows(layer)]
            found.append(torch.cat(rows, dim=1))
        return found

    recomputer.recompute(tokens, slots, layers, len(tokens))
    whole = written()
    recomputer.recompute(tokens, slots, layers, half)
    error = group.most(max(map(relative_error, whole, written())))
    if not error <= TOLERANCE.get(dtype, COARSE):
        return Pieces(f"tokens run in one piece and in two differ by {error:.2e}", False, error)
    try:
        recomputer.recompute(tokens[:half], slots[:half], layers)
        recomputer.recompute(tokens[half:], slots, layers, 1, decode=True)
    except Exception:
        # Nothing serves by this way; where it does not run, nothing is proven.
        logger.warning(
            "sglang-hc: decode steps could not be compared with a prefill", exc_info=True
        )
        return Pieces(None, False, error)
    error = group.most(max(error, *map(relative_error, whole, written())))
    return Pieces(None, error == 0.0, error)


def _on_device(tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that nothing waits for: the compute stream may be busy with the batch before."""
    if device.type != "cuda":
        return tokens
    return tokens.pin_memory().to(device, non_blocking=True)


def _batch(tokens: torch.Tensor, slots: torch.Tensor, start: int, algorithm: Any) -> ForwardBatch:
    """A prefill of one request whose first `start` tokens are in the pool."""
    device = tokens.device
    new, length = tokens.numel(), start + tokens.numel()

    def column(value: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full((1,), value, dtype=dtype, device=device)  # a kernel: nothing waits

    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=tokens,
        req_pool_indices=column(ROW),
        seq_lens=column(length),
        out_cache_loc=slots,
        seq_lens_sum=length,
        orig_seq_lens=column(length, torch.int32),
        seq_lens_cpu=torch.tensor([length], dtype=torch.int64),
        is_extend_in_batch=True,
        spec_algorithm=algorithm,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        positions=torch.arange(start, length, dtype=torch.int64, device=device),
        extend_num_tokens=new,
        extend_seq_lens=column(new, torch.int32),
        extend_prefix_lens=column(start, torch.int32),
        extend_start_loc=column(0, torch.int32),
        extend_prefix_lens_cpu=[start],
        extend_seq_lens_cpu=[new],
        extend_logprob_start_lens_cpu=[new],
        global_num_token_non_padded_cpu=new,
    )


def recomputer_for(
    config: HcConfig,
    runner: Any,
    pool: KvPoolRows,
    allocator: Any,
    plan: LayerPlan,
    taps: TapBuffer | None,
    group: StartGroup,
) -> tuple[LayerRecomputer | None, Pieces | None]:
    """Runs the model's first layers, and what was measured of it; None where it cannot, on a
    pipeline stage behind the first, and where --hc-exact demands more than was proven and no layer
    of the plan asks for it.

    plan: of the layers that this rank has. group: the ranks of its stage."""
    if held_layers(runner.model, plan.num_layers).start > 0:
        return None, None
    planned = bool(plan.recompute)
    reason = recompute_excluded(arguments.of(runner), type(runner.model).__name__)
    if reason is None:
        recomputer = LayerRecomputer(runner, taps)
        count = 2 * max(allocator.page_size, 16)
        slots = allocator.alloc(count)
        if slots is None:
            reason = f"the KV pool holds fewer than the {count} tokens of the self-check"
        else:
            layers = pool.num_layers if config.exact else min(2, pool.num_layers)
            dtype = runner.kv_cache_dtype
            pieces = compare_pieces(recomputer, pool, slots, dtype, layers, group)
            allocator.free(slots)
            reason = pieces.wrong
            if reason is None and config.exact and not pieces.bit:
                why = f"a prefill and decode steps differ by {pieces.difference:.1e}"
                if planned:
                    raise ConfigError(not_exact(config.forms, "recomputed layers", why))
                logger.info("sglang-hc: --hc-exact: no layer is recomputed: %s", why)
                return None, None
            if reason is None:
                return recomputer, pieces
        logger.error("sglang-hc: self-check failed, no layer is recomputed: %s", reason)
    if planned:
        raise ConfigError(cannot_recompute(config.forms, reason))
    return None, None
