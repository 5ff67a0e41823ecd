"""Speculative decoding with models whose layers do not all have full attention, and a conversation
with them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from support import (
    retractions,
    sparse_core,
    sparse_kernels,
    state_core,
    state_kernels,
    window_core,
    window_kernels,
)
from support.core import Core
from support.prompts import SMALL
from support.speculation import SpeculativeCore
from support.speculative_talks import SAID

ROOMY = ("--max-total-tokens", "4096", "--hc-disable")
NEW = 72
"""Tokens of a reply: each passes a multiple of 64 in passes that verify."""


class Kept(NamedTuple):
    """A conversation. cached: per turn tokens from device, host and disk. accepted, proposed: in
    each verify pass so many tokens, and which. draft_kv: what a draft model has of all of it, per
    layer and part; nothing without one."""

    history: list[int]
    tokens: list[list[int]]
    cached: list[tuple[int, int, int]]
    accepted: list[int]
    proposed: list[list[int]]
    draft_kv: list[Any]
    stats: dict[str, Any]


Start = Callable[..., Core]
"""Starts an engine with a model and flags; with `taught` and `overlap` as `SpeculativeCore`."""


def with_windows(model: str, *flags: str, **options: Any) -> SpeculativeCore:
    """model: path of one of `window_model`."""
    window_kernels.use()
    return SpeculativeCore(*window_core.flags_of(model), *SMALL, *flags, model=model, **options)


def with_index(model: str, *flags: str, **options: Any) -> SpeculativeCore:
    """model: path of one of `sparse_model`. A layer that proposes has no experts, as the others."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2DecoderLayer

    sparse_kernels.use()
    DeepseekV2DecoderLayer._is_layer_sparse = staticmethod(lambda *_, **__: False)
    return SpeculativeCore(*sparse_core.FLAGS, *SMALL, *flags, model=model, **options)


def with_states(model: str, *flags: str, **options: Any) -> SpeculativeCore:
    """model: path of one of `state_model`."""
    state_kernels.use()
    return SpeculativeCore(*SMALL, *state_core.STATES, *flags, model=model, **options)


class Layer(NamedTuple):
    """What a published checkpoint has to propose tokens with (MTP), by the names of its weights.

    like: of which layer it is a copy here. norms: with a weight that does nothing. product: of the
    token's embedding and the state of the model, here with random numbers.
    """

    like: str
    own: str
    norms: tuple[str, ...]
    nothing: float
    product: str


DEEPSEEK = Layer(
    "model.layers.3.", "model.layers.4.",
    tuple(f"model.layers.4.{name}.weight" for name in ("enorm", "hnorm", "shared_head.norm")), 1.0,
    "model.layers.4.eh_proj.weight",
)  # fmt: skip
QWEN = Layer(
    "model.layers.1.", "mtp.layers.0.",
    tuple(f"mtp.{name}.weight" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
    0.0, "mtp.fc.weight",
)  # fmt: skip
NEXTN = (
    *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1"),
)


def with_a_layer(model: Path, folder: Path, layer: Layer) -> tuple[str, ...]:
    """Write a checkpoint to `folder` that has this layer beside those of `model`. Returns the flags
    that name it."""
    shutil.copytree(model, folder)
    weights = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    width = config["hidden_size"]
    added = {
        name.replace(layer.like, layer.own): weight.clone()
        for name, weight in weights.items()
        if name.startswith(layer.like)
    }
    added |= {name: torch.full((width,), layer.nothing) for name in layer.norms}
    generator = torch.Generator().manual_seed(1)
    added[layer.product] = torch.randn((width, 2 * width), generator=generator) / width**0.5
    save_file(weights | added, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return *NEXTN, "--speculative-draft-model-path", str(folder)


def plainly(start: Start, model: str, *flags: str) -> Kept:
    """Without speculation and tiers, on a device that never evicts."""
    return talk(start(model, *ROOMY, *flags), evict=False)


def talk(
    core: Core, evict: bool, told: Sequence[int] = (), turns: range = range(len(SAID))
) -> Kept:
    """told: before these turns. evict: others write over everything on the device between two."""
    history, tokens, cached = list(told), list[list[int]](), list[tuple[int, int, int]]()
    for turn in turns:
        history += SAID[turn]
        if turn > turns[0] and evict:
            core.settle()
            core.evict()
            core.flood(random.Random(turn), 2 * core.scheduler.max_total_num_tokens)
        reply = core.ask(history, NEW)
        tokens.append(reply.tokens)
        cached.append((reply.device, reply.host, reply.storage))
        history += reply.tokens
    accepted, proposed = list[int](), list[list[int]]()
    if isinstance(core, SpeculativeCore):
        accepted = [sum(row >= 0 for path in batch for row in path) for batch in core.accepted]
        proposed = core.proposed
    if evict:
        core.settle()
    drafts = core.scheduler.draft_worker
    has_rows = drafts is not None and drafts.draft_worker is not None
    draft_kv = core.draft_kv(history) if has_rows else []
    stats = core.tree.stats() if evict else {}
    return Kept(history, tokens, cached, accepted, proposed, draft_kv, stats)


def speculating(
    start: Start, model: str, taught: list[int], evict: bool, overlap: bool, *flags: str,
    plant: Callable[[], None] | None = None,
) -> Kept:  # fmt: skip
    """plant: an error, before there is an engine."""
    if plant is not None:
        plant()
    return talk(start(model, *flags, taught=[taught], overlap=overlap), evict)


def retracted(
    start: Start, model: str, taught: Sequence[list[int]], often: bool, *flags: str
) -> dict[str, Any]:
    """As `retractions.serve`. often: requests are retracted every few passes."""
    if often:
        retractions.retract_often(every=4)
    options = {"taught": taught} if taught else {}
    return retractions.serve(start(model, *flags, **options))


# -- two servers, one after the other -------------------------------------------------------------


def first_turn(start: Start, model: str, taught: list[int], *flags: str) -> Kept:
    core = start(model, *flags, taught=[taught])
    told = talk(core, evict=False, turns=range(1))
    core.settle()
    return told


def later_turns(start: Start, model: str, taught: list[int], told: list[int], *flags: str) -> Kept:
    """Those behind `told`."""
    core = start(model, *flags, taught=[taught])
    return talk(core, True, told, range(1, len(SAID)))


# -- planted errors -------------------------------------------------------------------------------


def with_a_rejected_row() -> None:
    """Of the last token before a reply's end, the row of a window is that of a token behind all
    that was accepted, which a verify pass proposed and rejected."""
    from sglang_hc.capture.ends import EndRows
    from sglang_hc.srt.binding import fields
    from sglang_hc.srt.tree.tree_backend import HcRadixCache

    end_rows = HcRadixCache.end_rows

    def another(self: HcRadixCache, req: Any, length: int) -> EndRows | None:
        found = end_rows(self, req, length)
        if found is None or not fields.is_over(req):
            return found
        row = self.req_to_token_pool.req_to_token[fields.row_of(req)]
        rejected = fields.committed_tokens(req)
        found.slots[-1:] = self._second(row[rejected : rejected + 1])
        return found

    HcRadixCache.end_rows = another  # type: ignore[method-assign]


def with_a_rejected_state() -> None:
    """Where a reply passes a multiple of 64, the state behind another row of the pass is kept,
    which may have been rejected."""
    keep = state_kernels.keep_accepted

    def another(
        caches: Any, slots: Any, steps: Any, kept: Any, kept_steps: torch.Tensor, **more: Any
    ) -> None:
        rows = caches.intermediate_ssm.shape[2]
        moved = torch.where(kept_steps < 0, kept_steps, (kept_steps + 1) % rows)
        keep(caches, slots, steps, kept, moved, **more)

    state_kernels.keep_accepted = another


def without_draft_rows() -> None:
    """The layers of a draft model do not come back."""
    from sglang_hc.srt.model.kv_pool import KvPoolRows

    write = KvPoolRows.write_kv

    def partly(self: KvPoolRows, layer: int, *rest: Any) -> None:
        if layer < self.num_layers:
            write(self, layer, *rest)

    KvPoolRows.write_kv = partly  # type: ignore[method-assign]
