"""Prefill graphs that run no Python at the layers: refused, or switched off where SGLang chose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, Phase, PhaseConfig

from sglang_hc.config import ConfigError
from sglang_hc.srt.arguments.graphs import check_prefill_graphs

UNSAFE = (Backend.FULL, Backend.TC_PIECEWISE)
SAFE = (Backend.BREAKABLE, Backend.DISABLED)


def resolved(backend: str, flag: str | None = None, locked: bool = False) -> Any:
    """SGLang's arguments behind its `__post_init__`. flag: `--cuda-graph-backend-prefill`."""
    return SimpleNamespace(
        cuda_graph_config=CudaGraphConfig(prefill=PhaseConfig(backend=backend)),
        cuda_graph_backend_prefill=flag,
        _cuda_graph_config_locked={(Phase.PREFILL, "backend")} if locked else set(),
    )


@pytest.mark.parametrize("backend", UNSAFE)
@pytest.mark.parametrize("by_flag", [True, False], ids=["flag", "json"])
def test_what_the_user_asked_for_is_refused_in_one_sentence(backend: str, by_flag: bool) -> None:
    flag = backend if by_flag else None
    with pytest.raises(ConfigError) as refused:
        check_prefill_graphs(resolved(backend, flag, locked=True), wished=flag)
    said = str(refused.value)
    for words in (f"--cuda-graph-backend-prefill {backend}", "breakable", "--hc-disable"):
        assert words in said


@pytest.mark.parametrize("backend", UNSAFE)
def test_what_sglang_chose_is_switched_off(backend: str) -> None:
    by_default = resolved(backend)
    check_prefill_graphs(by_default, wished=None)
    assert by_default.cuda_graph_config.prefill.backend == Backend.DISABLED
    by_model = resolved(backend, flag=backend, locked=True)  # as it does for one architecture
    check_prefill_graphs(by_model, wished=None)
    assert by_model.cuda_graph_config.prefill.backend == Backend.DISABLED


@pytest.mark.parametrize("backend", SAFE)
@pytest.mark.parametrize("locked", [True, False], ids=["asked", "default"])
def test_what_is_safe_stays(backend: str, locked: bool) -> None:
    args = resolved(backend, backend if locked else None, locked)
    check_prefill_graphs(args, wished=args.cuda_graph_backend_prefill)
    assert args.cuda_graph_config.prefill.backend == backend


def test_every_back_end_of_this_sglang_is_known() -> None:
    """A new one would be neither refused nor known to run Python at every layer."""
    assert set(UNSAFE) | set(SAFE) == set(Backend.ALL)


def test_a_dummy_model_has_nothing_to_check() -> None:
    check_prefill_graphs(SimpleNamespace(cuda_graph_config=None), wished=None)
