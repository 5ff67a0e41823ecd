"""Costs of one layer on this machine, for the policies that choose the mix."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from engine import Engine, Stored

from sglang_hc.forms import BLOCK_TOKENS, Form
from sglang_hc.policy.cost_model import CostModel, Samples, SourceTier

ROUNDS = 3


class NoSink:
    """Leaves what was copied where it is."""

    def write_hidden(self, *_: object) -> None:
        return None

    def write_kv(self, *_: object) -> None:
        return None


def cost_model(engine: Engine, kv: Stored, hidden: Stored, histories: Sequence[int]) -> CostModel:
    """Seconds of copies, projection and prefill as functions of tokens, by the arms' own parts."""
    sizes = [BLOCK_TOKENS, *histories]
    copies = {
        (SourceTier.HOST, form): [
            (n, _per_layer(engine, lambda n=n, s=stored: s.restore(n, sink=NoSink())))
            for n in sizes
        ]
        for form, stored in ((Form.KV, kv), (Form.HIDDEN, hidden))
    }
    project = [(n, _per_layer(engine, lambda n=n: _project(engine, n))) for n in sizes]
    longest = max(sizes)
    prefills = [(n, 0) for n in sizes]
    prefills += [(longest // 2, longest // 2), (BLOCK_TOKENS, longest - BLOCK_TOKENS)]
    prefill = [
        (new, context, _per_layer(engine, lambda n=new, c=context: _prefill(engine, kv, n, c)))
        for new, context in prefills
    ]
    overlap = engine.device.type == "cuda"
    return CostModel.from_samples(Samples(copies, prefill, project, overlap), "this benchmark")


def _per_layer(engine: Engine, work: Callable[[], None]) -> float:
    work()
    return statistics.median(engine.seconds(work) for _ in range(ROUNDS)) / engine.layers


def _project(engine: Engine, tokens: int) -> None:
    width = engine.shape.hidden_bytes
    rows = torch.zeros((tokens, width), dtype=torch.uint8, device=engine.device)
    positions = torch.arange(tokens, device=engine.device)
    for layer in range(engine.layers):
        engine.sink.write_hidden(layer, rows, positions, engine.slots[:tokens])


def _prefill(engine: Engine, stored: Stored, new: int, context: int) -> None:
    tokens = torch.tensor(stored.tokens[:new])
    engine.recomputer.recompute(tokens, engine.slots[: context + new], engine.layers)
