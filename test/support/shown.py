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

    sent = sent_along(core.scheduler.model_config.hf_config, parts)
    rid = core.submit(tokens_of(parts), new, salt)
    if sent is not None:
        name_by_content(sent)
        core.inbox[-1].mm_inputs = sent
    return rid


def tokens_of(parts: Parts) -> list[int]:
    """With SGLang's placeholder in the place of images."""
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            tokens += [VISION_START, *[IMAGE_PAD] * part.tokens, VISION_END]
    return tokens


def sent_along(config: Any, parts: Parts) -> Any:
    """What the processor sends beside the tokens; None for no pictures. config: the model's."""
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
    from sglang.srt.managers.schedule_batch import (
        Modality,
        MultimodalDataItem,
        MultimodalProcessorOutput,
    )

    items: list[Any] = []
    for place, part in enumerate(parts):
        if isinstance(part, int):
            continue
        start = len(tokens_of(parts[:place])) + 1
        row = 2 * 3 * config.vision_config.patch_size**2
        generator = torch.Generator().manual_seed(part.seed)
        items.append(
            MultimodalDataItem(
                modality=Modality.IMAGE,
                feature=torch.randn(part.grid[0] * part.grid[1], row, generator=generator),
                offsets=[(start, start + part.tokens - 1)],
                model_specific_data={"image_grid_thw": torch.tensor([[1, *part.grid]])},
            )
        )
    if not items:
        return None
    tokens = tokens_of(parts)
    positions, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=MERGE,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        model_type=config.model_type,
        tokens_per_second=2,
        input_ids=torch.tensor([tokens]),
        image_grid_thw=torch.cat([item.image_grid_thw for item in items]),
    )
    return MultimodalProcessorOutput(
        mm_items=items,
        input_ids=tokens,
        im_start_id=VISION_START,
        im_end_id=VISION_END,
        im_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        mrope_positions=positions.squeeze(1),
        mrope_position_delta=delta,
    )
