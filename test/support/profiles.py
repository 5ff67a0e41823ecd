"""Profiles for tests: decisions that depend on costs are made from costs the test states."""

from __future__ import annotations

from pathlib import Path

from benchmark.harness import core
from sglang_hc.policy.cost_model import CostModel, SourceTier, TierCopy
from sglang_hc.policy.fit import Fit
from sglang_hc.profile_file import ANY_SERVER, encode

FREE_LOADING = core.FREE_LOADING


def cost_model(
    host: float = 0.0,
    disk: float = 0.0,
    project: float = 0.0,
    prefill: float = 1.0,
    hidden_share: float = 0.5,
    overlap: bool = True,
    remote: float | None = None,
) -> CostModel:
    """Costs in seconds per token and layer; a hidden state costs `hidden_share` of K and V.
    remote: None for a store whose speed is not known."""

    def copy(seconds: float) -> TierCopy:
        return TierCopy(Fit(0.0, seconds), Fit(0.0, hidden_share * seconds))

    copies = {SourceTier.HOST: copy(host), SourceTier.DISK: copy(disk)}
    if remote is not None:
        copies[SourceTier.REMOTE] = copy(remote)
    return CostModel(
        ANY_SERVER,
        "measured",
        copies,
        Fit(0.0, prefill, 0.0),
        Fit(0.0, project),
        overlap,
    )


def write(cost: CostModel, folder: Path) -> str:
    """A profile file of `cost`; returns its path."""
    path = folder / "profile.json"
    path.write_text(encode(cost))
    return str(path)
