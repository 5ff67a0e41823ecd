"""Real text for real weights: histories that a model has read and written, and what follows.

The texts are those of benchmark/texts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmark import ROOT
from benchmark.harness.core import MODELS, Core

TEXTS = ROOT / "benchmark" / "texts"


class Drift(NamedTuple):
    """How far restored K/V rows are from the originals, over all layers, K and V.

    worst: largest difference relative to the largest value of that layer's K or V. mean: average
    difference relative to the average value there, the worst layer. outliers: largest value over
    average value, of the layer where that is most.
    """

    worst: float
    mean: float
    outliers: float


def tokens_of(model: str, name: str) -> list[int]:
    """The ids of one text of benchmark/texts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODELS / model)
    text = (TEXTS / name).read_text(encoding="utf-8")
    return list(tokenizer.encode(text, add_special_tokens=False))


def drift(originals: list[Any], restored: list[Any]) -> Drift:
    """Compares what `Core.kv` gave before and after. The rows must be equally many."""
    worst = mean = outliers = 0.0
    for before, after in zip(originals, restored, strict=True):
        a, b = before.float(), after.float()
        assert a.shape == b.shape, "not all rows are on the device"
        size, off = a.abs(), (a - b).abs()
        worst = max(worst, float(off.max() / size.max()))
        mean = max(mean, float(off.mean() / size.mean()))
        outliers = max(outliers, float(size.max() / size.mean()))
    return Drift(worst, mean, outliers)


def read_and_reply(core: Core, text: list[int], reply: int, salt: str) -> list[int]:
    """A first turn. Returns the history whose state is kept: the reply without its last token."""
    return text + core.ask(text, reply, salt).tokens[:-1]


def push_out(core: Core) -> None:
    """Everything leaves the device, once all of it is in the host tier."""
    core.settle()
    core.evict()
