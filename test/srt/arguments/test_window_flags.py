"""Step 3.5 is served with the pools that SGLang alone would give it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from sglang.srt import server_args as stock
from sglang.srt.plugins import load_plugins

from sglang_hc.srt.binding.arguments import asked
from support import window_configs

POOLS = "disable_hybrid_swa_memory", "swa_full_tokens_ratio"


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    load_plugins()
    monkeypatch.delenv("SGLANG_HC_ENABLE", raising=False)
    monkeypatch.delenv("SGLANG_HC_CONFIG", raising=False)
    before = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:], logging.root.level = before  # SGLang's parser sets its own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("step")
    window_configs.make(folder, "step3.5")
    return str(folder / "step3.5")


@pytest.mark.parametrize(
    ("flags", "pools"),
    [
        ((), (False, None)),
        (("--swa-full-tokens-ratio", "0.3"), (False, 0.3)),
        (("--disable-hybrid-swa-memory",), (True, None)),
    ],
    ids=["default", "a ratio", "one pool"],
)
def test_windows_keep_their_pool_beside_the_tiers(
    model: str, flags: tuple[str, ...], pools: tuple[bool, float | None]
) -> None:
    """SGLang takes it away beside HiCache, whose place the tiers take."""
    for ours in (("--hc-disable",), ("--hc-host-size-gb", "1")):
        words = ["--model-path", model, "--device", "cpu", *flags, *ours]
        args = stock.prepare_server_args(words)
        args.resolve_once()
        assert tuple(asked(args, name) for name in POOLS) == pools
    assert asked(args, "enable_hierarchical_cache"), "SGLang calls our tree"
