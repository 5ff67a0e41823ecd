"""SGLang's images of a request: the only place that knows where they are kept.

`sent`: a `MultimodalProcessorOutput` on its way to the scheduler; `req`: a `Req` there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import MultimodalDataItem

from sglang_hc.srt.binding.fields import OTHER_INPUTS


class Shown(NamedTuple):
    """Tokens [start, stop) of a request stand for an image. content: digest of it (`name`).
    positions: packed, of the tokens behind the image before up to the one behind this."""

    start: int
    stop: int
    content: bytes
    positions: bytes


class Named(NamedTuple):
    """What SGLang knows an image, a video or a sound by: its first id, and a hash. Two of one name
    are one to it. content: digest of an image (`name`); empty where there is none."""

    names: tuple[int | None, int | None]
    content: bytes


def sent_images(sent: Any) -> list[Any]:
    """Images, videos and sounds that are sent along."""
    return [] if sent is None else [item for item in sent.mm_items]


def sent_along(made: Any) -> Any:
    """What a tokenized request has beside its tokens; None for nothing."""
    return getattr(made, "mm_inputs", None)


def content_of(item: Any) -> tuple[object, dict[str, object]] | None:
    """What the model makes an image's embeddings of: its features, and what else the processor says
    of it. None for other things, and for embeddings that somebody has made already."""
    if not isinstance(item, MultimodalDataItem) or not item.is_image():
        return None
    if item.feature is None or item.precomputed_embeddings is not None:
        return None
    return item.feature, item.model_specific_data


def name(sent: Any, contents: Iterable[bytes | None]) -> None:
    """Tell SGLang how what is sent along is called. contents: 32 bytes for each; None leaves it
    SGLang's own name. SGLang makes its ids of them."""
    for item, content in zip(sent.mm_items, contents, strict=True):
        if content is not None:
            item.set_identity(content)
        elif isinstance(item, MultimodalDataItem):
            item.identity = None
    if sent.padded_input_ids is not None:
        sent.padded_input_ids = sent.build_padded_input_ids(sent.input_ids, sent.mm_items)


def images_of(req: Any) -> list[Shown] | None:
    """The images of a request, in their order. None where it has other inputs too, an image whose
    content is not known, or ids that are not where they should be."""
    given = getattr(req, "multimodal_inputs", None)
    if given is None:
        return None
    others = [getattr(req, one, None) for one in OTHER_INPUTS if one != "multimodal_inputs"]
    others += [given.vision_position_ids, given.media_nums_per_sample, given.visible_frame_counts]
    if any(other is not None for other in others) or not given.mm_items:
        return None
    ids, places = req.origin_input_ids, given.mrope_positions
    found: list[Shown] = []
    for item in sorted(given.mm_items, key=lambda item: item.offsets or [(0, 0)]):
        if not item.is_image() or item.identity is None or len(item.offsets or ()) != 1:
            return None
        start, stop = item.offsets[0][0], item.offsets[0][1] + 1
        if not set(ids[start:stop]) <= set(item.padding_values()):
            return None
        before = found[-1].stop if found else 0
        positions = b""
        if places is not None:
            if not found and not _plain(places[:, :start]):
                return None
            positions = places[:, before : stop + 1].to(torch.int64).cpu().numpy().tobytes()
        found.append(Shown(start, stop, item.identity, positions))
    return found


def named(req: Any) -> list[Named]:
    """All that a request shows."""
    given = getattr(req, "multimodal_inputs", None)
    return [
        Named((item.padding_values()[0], item.hash), item.identity or b"")
        for item in (given.mm_items if given is not None else ())
    ]


def _plain(positions: torch.Tensor) -> bool:
    """Whether tokens have the positions of text without images before it. positions: (3, n)."""
    return bool((positions == torch.arange(positions.shape[1], device=positions.device)).all())
