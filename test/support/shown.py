"""Requests with images, as the tokenizer's process sends them, for a `Core` of `vision_model`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from support.core import Core, Reply
from support.vision_model import (
    IMAGE_PAD,
    MERGE,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    pixels,
)


class Picture(NamedTuple):
    """grid: patches of its height and width; a quarter of them are tokens."""

    seed: int
    grid: tuple[int, int] = (8, 8)

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] // MERGE**2


Parts = Sequence[Picture | int]


def text(seed: int, count: int) -> list[Picture | int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 900) for _ in range(count)]


def ask(core: Core, parts: Parts, new: int = 16, salt: str | None = None) -> Reply:
    """One request on its own, to its end."""
    rid = submit(core, parts, new, salt)
    core.run()
    return core.reply(rid)


def submit(core: Core, parts: Parts, new: int = 16, salt: str | None = None) -> str:
    """Hand in a prompt with pictures among its tokens. Returns its id."""
    from sglang_hc.srt.requests.images import name_by_content

    tokens, sent = sent_along(parts)
    rid = core.submit(tokens, new, salt)
    if sent is not None:
        name_by_content(sent)
        core.inbox[-1].mm_inputs = sent
    return rid


def sent_along(parts: Parts) -> tuple[list[int], Any]:
    """Token ids, and what the processor sends beside them; None for no pictures."""
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
    from sglang.srt.managers.schedule_batch import (
        Modality,
        MultimodalDataItem,
        MultimodalProcessorOutput,
    )

    tokens: list[int] = []
    items: list[Any] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        start = len(tokens) + 1
        tokens += [VISION_START, *[IMAGE_PAD] * part.tokens, VISION_END]
        items.append(
            MultimodalDataItem(
                modality=Modality.IMAGE,
                feature=pixels(part.seed, part.grid),
                offsets=[(start, start + part.tokens - 1)],
                model_specific_data={"image_grid_thw": torch.tensor([[1, *part.grid]])},
            )
        )
    if not items:
        return tokens, None
    positions, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=MERGE,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        model_type="qwen2_5_vl",
        tokens_per_second=2,
        input_ids=torch.tensor([tokens]),
        image_grid_thw=torch.cat([item.image_grid_thw for item in items]),
    )
    sent = MultimodalProcessorOutput(
        mm_items=items,
        input_ids=tokens,
        im_start_id=VISION_START,
        im_end_id=VISION_END,
        im_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        mrope_positions=positions.squeeze(1),
        mrope_position_delta=delta,
    )
    return tokens, sent
