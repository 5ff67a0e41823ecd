"""Which tensors of a layer may leave the device: none that another one shares, and no vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_hc.srt.model import offload


def layer() -> Any:
    made = torch.nn.Module()
    made.first = torch.nn.Linear(6, 4)
    made.second = torch.nn.Linear(6, 4, bias=False)
    made.second.weight = torch.nn.Parameter(torch.zeros(6, 4).t())  # as quantised weights are
    made.experts = torch.nn.Parameter(torch.zeros(2, 4, 6))
    made.norm = torch.nn.LayerNorm(4)
    return made


def movable(module: Any) -> set[str]:
    shared = offload._shared_memory(module)
    return {name for name, p in module.named_parameters() if offload._is_matrix(p, shared)}


EVERY = {"first.weight", "second.weight", "experts"}


def test_matrices_leave_and_vectors_stay() -> None:
    assert movable(layer()) == EVERY


def tie(made: Any) -> None:
    made.second.weight = made.first.weight


def alias(made: Any) -> None:
    made.first.weight = torch.nn.Parameter(made.second.weight.data)


def view(made: Any) -> None:
    """As MLA's w_kc may be one of kv_b_proj."""
    made.first.part = made.first.weight.data[:2]
    made.second.part = made.second.weight.data[1:]


def gaps(made: Any) -> None:
    made.first.weight = torch.nn.Parameter(torch.zeros(4, 12)[:, ::2])
    made.second.weight = torch.nn.Parameter(torch.zeros(4, 1).expand(4, 6))


@pytest.mark.parametrize("change", [tie, alias, view, gaps])
def test_what_cannot_be_moved_alone_stays(change: Any) -> None:
    made = layer()
    change(made)
    assert movable(made) == {"experts"}
