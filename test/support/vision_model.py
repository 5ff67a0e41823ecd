"""A small random Qwen2.5-VL with its processors: tokens of images have positions of three parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from scripts.make_tiny_models import (
    BOS,
    EOS,
    FAMILIES,
    PAD,
    build_tokenizer,
    fill_weights,
    whole_words,
)

WORDS = 1024
"""Of the vocabulary before the ids that stand beside and in the place of images."""

VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(WORDS, WORDS + 4)

PATCH, MERGE = 14, 2
"""Pixels of a patch, and patches of a token, in each direction."""

_TEXT: dict[str, Any] = FAMILIES["qwen2"].arguments | dict(
    vocab_size=WORDS + 8, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[8, 12, 12]),
)  # fmt: skip

_VISION: dict[str, Any] = dict(
    depth=2, hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=256,
    patch_size=PATCH, spatial_merge_size=MERGE, window_size=56, fullatt_block_indexes=[1],
)  # fmt: skip


def make(folder: Path) -> Path:
    """Write the checkpoint; returns its folder."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    tokenizer = build_tokenizer(WORDS, 4096)
    words = whole_words(tokenizer)
    beside = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": beside}, False)
    config = transformers.Qwen2_5_VLConfig(
        text_config=_TEXT, vision_config=_VISION, dtype="float32", tie_word_embeddings=False,
        vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
        image_token_id=IMAGE_PAD, video_token_id=VIDEO_PAD,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    config.vocab_size = config.text_config.vocab_size
    model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(config)
    fill_weights(model, "qwen2.5-vl", 0, words)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    size = dict(min_pixels=(PATCH * MERGE) ** 2, max_pixels=(PATCH * MERGE) ** 2 * 256)
    pictures = transformers.Qwen2VLImageProcessor(patch_size=PATCH, merge_size=MERGE, **size)
    moving = transformers.Qwen2VLVideoProcessor(patch_size=PATCH, merge_size=MERGE)
    template = tokenizer.chat_template
    transformers.Qwen2_5_VLProcessor(
        pictures, tokenizer, moving, chat_template=template
    ).save_pretrained(folder)
    return folder


def pixels(seed: int, grid: tuple[int, int]) -> torch.Tensor:
    """Features of an image as the processor gives them: (patches, 2 * 3 * PATCH ** 2) float32.
    grid: patches of its height and width, even numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(grid[0] * grid[1], 2 * 3 * PATCH * PATCH, generator=generator)
