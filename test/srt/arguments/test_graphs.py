"""Prefill graphs that run no Python at the layers: refused, or switched off where SGLang chose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, Phase, PhaseConfig

from sglang_hc.config import ConfigError
from sglang_hc.srt.arguments.graphs import check_prefill_graphs
from sglang_hc.srt.binding.arguments import asked

SAFE = (Backend.BREAKABLE, Backend.DISABLED)


def resolved(
    backend: str, by_flag: bool = False, by_model: bool = False, locked: bool = False
) -> Any:
    """SGLang's arguments behind the step that chooses graphs. by_flag: the user gave
    `--cuda-graph-backend-prefill`; by_model: SGLang put its own choice there."""
    graphs = CudaGraphConfig(prefill=PhaseConfig(backend=backend))
    chosen = {"cuda_graph_backend_prefill": backend} if by_model else {}
    return SimpleNamespace(
        cuda_graph_config=None,
        cuda_graph_backend_prefill=backend if by_flag else None,
        _cuda_graph_config_locked={(Phase.PREFILL, "backend")} if locked else set(),
        _resolved_overrides=[("SGLang", chosen), ("SGLang", {"cuda_graph_config": graphs})],
    )


@pytest.mark.parametrize("by_flag", [True, False], ids=["flag", "json"])
def test_what_the_user_asked_for_is_refused_in_one_sentence(by_flag: bool) -> None:
    with pytest.raises(ConfigError) as refused:
        check_prefill_graphs(resolved(Backend.FULL, by_flag, locked=True))
    said = str(refused.value)
    for words in ("--cuda-graph-backend-prefill full", "breakable", "--hc-disable"):
        assert words in said


@pytest.mark.parametrize("by_model", [True, False], ids=["for one architecture", "by default"])
def test_what_sglang_chose_is_switched_off(by_model: bool) -> None:
    args = resolved(Backend.FULL, by_model=by_model, locked=by_model)
    decode = asked(args, "cuda_graph_config").decode
    check_prefill_graphs(args)
    graphs = asked(args, "cuda_graph_config")
    assert graphs.prefill.backend == Backend.DISABLED and graphs.decode == decode


@pytest.mark.parametrize("backend", SAFE)
@pytest.mark.parametrize("by_flag", [True, False], ids=["asked", "default"])
def test_what_is_safe_stays(backend: str, by_flag: bool) -> None:
    args = resolved(backend, by_flag, locked=by_flag)
    check_prefill_graphs(args)
    assert asked(args, "cuda_graph_config").prefill.backend == backend


def test_every_back_end_of_this_sglang_is_known() -> None:
    """A new one would be neither refused nor known to run Python at every layer."""
    assert {Backend.FULL, *SAFE} == set(Backend.ALL)
