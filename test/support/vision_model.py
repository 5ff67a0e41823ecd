"""Small random vision models with their processors: tokens of images have positions of three parts.

PYTHONPATH=test:. python -m support.vision_model NAME FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

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

MERGE = 2
"""Patches of a token, in each direction."""

_IDS: dict[str, Any] = dict(
    vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
    image_token_id=IMAGE_PAD, video_token_id=VIDEO_PAD,
)  # fmt: skip
_VISION: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=256,
    spatial_merge_size=MERGE,
)  # fmt: skip


class VisionModel(NamedTuple):
    """name: in the classes of transformers. text, vision: of their configs. patch: pixels of one,
    in each direction."""

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    patch: int


MODELS = {
    "qwen2.5-vl": VisionModel(
        "Qwen2_5_VL",
        FAMILIES["qwen2"].arguments
        | dict(
            rope_parameters=dict(
                rope_type="default", rope_theta=10000.0, mrope_section=[8, 12, 12]
            )
        ),
        _VISION | dict(depth=2, patch_size=14, window_size=56, fullatt_block_indexes=[1]),
        14,
    ),
    "qwen3-vl": VisionModel(
        "Qwen3VL",
        FAMILIES["qwen3"].arguments
        | dict(
            rope_parameters=dict(
                rope_type="default", rope_theta=10000.0, mrope_section=[12, 10, 10],
                mrope_interleaved=True,
            )
        ),
        _VISION
        | dict(
            depth=3, patch_size=16, num_position_embeddings=256, deepstack_visual_indexes=[0, 1]
        ),
        16,
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> Path:
    """Write a checkpoint of MODELS; returns its folder."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    one = MODELS[name]
    tokenizer = build_tokenizer(WORDS, 4096)
    words = whole_words(tokenizer)
    beside = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": beside}, False)
    ends = dict(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    config = getattr(transformers, f"{one.name}Config")(
        text_config=one.text | ends | dict(vocab_size=WORDS + 8), vision_config=one.vision,
        dtype="float32", tie_word_embeddings=False, **_IDS, **ends,
    )  # fmt: skip
    config.vocab_size = config.text_config.vocab_size
    model = getattr(transformers, f"{one.name}ForConditionalGeneration")._from_config(config)
    fill_weights(model, name, 0, words)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    pixels = (one.patch * MERGE) ** 2
    size = dict(patch_size=one.patch, merge_size=MERGE)
    pictures = transformers.Qwen2VLImageProcessor(
        **size, min_pixels=pixels, max_pixels=256 * pixels
    )
    moving = "Qwen2" if one.name == "Qwen2_5_VL" else "Qwen3"
    videos = getattr(transformers, f"{moving}VLVideoProcessor")(**size)
    getattr(transformers, f"{one.name}Processor")(
        pictures, tokenizer, videos, chat_template=tokenizer.chat_template
    ).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
