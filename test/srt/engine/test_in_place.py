"""What the plugin has to put in place is looked for in SGLang itself."""

from __future__ import annotations

import pytest
import sglang
from sglang.srt.arg_groups import resolution_hooks
from sglang.srt.mem_cache import registry
from sglang.srt.plugins.hook_registry import HookRegistry

from benchmark import ROOT
from benchmark.harness import arms
from sglang_hc.srt import plugin
from sglang_hc.srt.arguments import server_args
from sglang_hc.srt.engine import in_place
from support.core import import_engine


@pytest.fixture(autouse=True)
def engine() -> None:
    import_engine()


def test_all_is_in_place_after_the_plugins_were_loaded() -> None:
    assert in_place.missing() == []


def test_each_hook_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for target in {hook.target for hook in plugin.all_hooks()}:
        with monkeypatch.context() as patch:
            patch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
            assert in_place.missing() == [target]


def test_the_page_of_seams_names_each_hook() -> None:
    page = (ROOT / "docs/structure.md").read_text()
    for hook in plugin.all_hooks():
        name = hook.target.rpartition(".")[2]
        listed = f"`{name}`" in page or f".{name}`" in page
        assert listed or ("SchedulerWeightUpdaterManager" in hook.target), hook.target
        starred = f"{name}`\\*" in page
        assert starred == (hook.proof is not None), hook.target


def test_each_step_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's arguments would be resolved without us."""
    for name in server_args.STEPS:
        with monkeypatch.context() as patch:
            patch.setitem(resolution_hooks._HOOKS, name, [])
            assert in_place.missing() == [name]


def test_a_plugin_that_failed_on_the_way_left_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree is registered last."""
    monkeypatch.setattr(in_place, "_expected", {})
    monkeypatch.setattr(in_place, "_steps", {})
    monkeypatch.delitem(registry._RADIX_CACHE_REGISTRY, in_place.BACKEND)
    assert in_place.missing() == ["radix cache backend 'hc'"]


def test_another_sglang_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "__version__", "0.5.22")
    assert in_place.missing() == [f"sglang=={in_place.SGLANG_VERSION} (found 0.5.22)"]


def test_sglangs_attention_stays_where_a_comparison_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attention() -> list[str]:
        return [hook.target for hook in plugin.all_hooks() if "sdpa" in hook.target]

    assert len(attention()) == 1
    monkeypatch.setenv(arms.SGLANGS_ATTENTION_ENV, "1")
    assert attention() == []
