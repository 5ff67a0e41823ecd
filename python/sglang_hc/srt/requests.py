"""Checks of requests in the HTTP process, before they can reach a scheduler."""

from __future__ import annotations

from typing import Any


def check_input_ids(self: Any, obj: Any, input_ids: list[int] | None) -> None:
    """BEFORE TokenizerManager._validate_one_request: token ids must be in the vocabulary.

    SGLang looks an id up in the embedding unchecked, which ends the scheduler process. ValueError
    becomes HTTP status 400.
    """
    if not input_ids or getattr(obj, "input_embeds", None) is not None:
        return
    if not isinstance(input_ids[0], int):
        return  # embeddings or pairs: not token ids
    vocabulary = self.model_config.vocab_size
    low, high = min(input_ids), max(input_ids)
    if low < 0 or (high >= vocabulary and not getattr(obj, "contains_mm_input", bool)()):
        wrong = low if low < 0 else high
        raise ValueError(
            f"input_ids contains the token id {wrong}, which is not in the model's vocabulary; "
            f"valid ids are 0 to {vocabulary - 1}"
        )
