"""Speculative decoding: of the rows that a verify pass computes, only accepted ones are saved.

A verify pass runs the model over proposed tokens of each request. SGLang samples behind it, moves
the K and V of the accepted path to the front of the request's slots, and counts the accepted rows
as committed once the host knows the result; the others it frees or writes again. KV is read from
committed slots only, so it needs nothing of this. Hidden states are copied from the taps along the
accepted path and saved with the result.

The KV of a draft model is kept as further layers of each block: SGLang gives it the same slots as
the model's own, fills it in a pass behind each prefill and each verify pass, and reads it in the
next. What a request restores of it is in place when the pass of the model is over, and so before
the draft model's.

What layers without full attention keep at ends needs nothing of this either. SGLang moves accepted
rows of windows with the others and counts them alike; the state behind an accepted row goes to the
slot that a tree's node gets of it, and the other states of a verify pass to none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_hc.capture.capture import Segment
from sglang_hc.capture.verified import Held
from sglang_hc.forms import NO_DRAFT, DraftLayers
from sglang_hc.srt.binding import arguments, fields
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.model.identity import model_identity
from sglang_hc.srt.model.window_pool import full_attention
from sglang_hc.srt.ranks.start_group import StartGroup
from sglang_hc.srt.tree.tree_backend import HcRadixCache

HELD = "_hc_held"
"""Attribute of a batch's result: the hidden states that wait for it (`Held`)."""


def sampled(
    result: tuple[torch.Tensor, ...], verify_input: Any, batch: Any, *_: Any, **__: Any
) -> None:
    """AFTER eagle_sample, which all algorithms that are served verify with: a verify pass was
    submitted, and the device knows what it accepts."""
    tree = batch.tree_cache
    if not isinstance(tree, HcRadixCache) or batch.forward_mode.is_idle():
        return
    tree.capture.hold(result[2], verify_input.draft_token_num)


def hand_over(tree: HcRadixCache, result: Any) -> None:
    """A batch was run: what was held of it goes with its result."""
    held = tree.capture.take_held()
    if held is not None:
        setattr(result, HELD, held)


def accepted(tokens: list[list[int]], self: Any, result: Any, batch: Any) -> None:
    """AFTER SchedulerBatchResultProcessor._resolve_spec_v2_tokens: the host knows what a verify
    pass accepted, and has counted it as committed.

    tokens: per request, one for each row that is kept. A request that is over or retracted since
    gets nothing more.
    """
    held: Held | None = getattr(result, HELD, None)
    if held is None:
        return
    tree = self.tree_cache
    segments = [
        Segment(
            serial_of(req), fields.committed_tokens(req) - len(kept), index * held.width, len(kept)
        )
        for index, (req, kept) in enumerate(zip(batch.reqs, tokens, strict=True))
        if kept and fields.is_served(req)
    ]
    with tree.compute_stream.entered():
        tree.capture.take(segments, held.states)


def draft_layers(draft: Any, eagle: bool, group: StartGroup) -> tuple[DraftLayers, list[str]]:
    """The layers of a draft model, and what their state depends on beside that of the model's own.

    draft: SGLang's model runner; None without one. eagle: it computes a position from the token
    behind it as well, and SGLang's tree compares that token too. With recurrent layers the tree
    does not: of a node's last position it keeps the row of whoever computed it first, and so do
    blocks. A row of another token's changes what is proposed, and no token.
    """
    if draft is None:
        return NO_DRAFT, []
    layers = DraftLayers(full_attention(draft.token_to_kv_pool).layer_num, lag=int(eagle))
    return layers, [
        "draft",
        str(arguments.draft_algorithm(arguments.of(draft))),
        *model_identity(draft, group),
    ]


def register_draft(original: Callable[..., None], *, tree_cache: Any, **kwargs: Any) -> None:
    """AROUND maybe_register_hicache_draft: our tree knows of the draft model since it was built."""
    if not isinstance(tree_cache, HcRadixCache):
        original(tree_cache=tree_cache, **kwargs)
