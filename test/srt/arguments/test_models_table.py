"""The table of docs/models.md: every architecture is SGLang's, and what the page says of it is what
our start decides for it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from sglang.srt.arg_groups import overrides
from sglang.srt.configs import model_config
from sglang.srt.configs.spark2_5 import Spark2_5Config
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool
from sglang.srt.models.registry import ModelRegistry

from scripts.make_tiny_models import Family
from sglang_hc.policy.served import HIDDEN, RECOMPUTED, REFUSED
from sglang_hc.srt.model.families import FAMILIES
from sglang_hc.srt.model.kv_pool import KvPoolRows, UnsupportedPool
from sglang_hc.srt.model.window_pool import full_attention
from sglang_hc.srt.requests.images import WITH_IMAGES
from support import state_model, window_configs, window_model

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "models.md").read_text()
TABLE = PAGE.partition("| kind |")[2].partition("\n\n")[0]


POPULAR = {
    "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM",
    "DeepseekOCRForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM",
    "Glm4vMoeForConditionalGeneration", "GptOssForCausalLM", "KimiK25ForConditionalGeneration",
    "MiniMaxM2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
    "Llama4ForConditionalGeneration", "MiniMaxM3SparseForConditionalGeneration",
}  # fmt: skip
"""Of the models on SGLang's page of popular ones."""


class Row(NamedTuple):
    """One line. named: architectures."""

    kind: str
    named: list[str]
    hidden: str
    kv: str
    recomputed: str
    test: str


def rows() -> list[Row]:
    found = []
    for line in TABLE.splitlines()[2:]:
        kind, architectures, *rest = (cell.strip() for cell in line.split("|")[1:-1])
        names = [one for one in re.findall(r"`(\w+)`", architectures)]
        found.append(Row(kind, names, *rest))
    return found


ROWS = rows()
NAMED = [(name, row) for row in ROWS for name in row.named]


def has_windows(name: str) -> bool:
    """In a pool of their own; of some architectures their config says so."""
    config = SimpleNamespace(sliding_window=128, layer_types=["sliding_attention"])
    own = Spark2_5Config() if name in Spark2_5Config.architectures else config
    return bool(model_config.is_hybrid_swa_model([name], own))


def has_states(name: str) -> bool:
    return name in overrides._MAMBA_RADIX_CACHE_ARCHS | overrides._MAMBA_EXTRA_BUFFER_ARCHS


def has_an_index(name: str) -> bool:
    """Where its config says so."""
    return model_config.is_deepseek_dsa(SimpleNamespace(architectures=[name], index_topk=64))


def test_every_architecture_is_sglangs_and_has_one_row() -> None:
    names = [name for name, _ in NAMED]
    assert len(names) > 60 and len(set(names)) == len(names)
    assert set(names) <= set(ModelRegistry.get_supported_archs())
    assert set(names) >= POPULAR


NO_MODELS = ("NextN", "MTP", "DSpark", "Draft", "DFlash", "Assistant", "Embedding", "Diffusion")
"""Parts of the names of draft models, and of what does not reply token for token."""


def test_what_sglang_keeps_otherwise_has_a_row() -> None:
    """No model with windows of a pool of their own, recurrent layers or an index is taken for one
    like "dense, others"."""
    special = {
        name
        for name in ModelRegistry.get_supported_archs()
        if (has_windows(name) or has_states(name) or has_an_index(name))
        and not any(part in name for part in NO_MODELS)
    }
    assert special <= {name for name, _ in NAMED}


@pytest.mark.parametrize(("name", "row"), NAMED, ids=[name for name, _ in NAMED])
def test_the_forms_of_a_row_are_those_of_a_start(name: str, row: Row) -> None:
    assert (row.hidden == "yes") == (name in FAMILIES)
    assert (row.recomputed == "yes") == (name in RECOMPUTED)
    kind = row.kind.partition(",")[0]
    if kind == "compressed":
        return  # by their pools, below
    assert has_windows(name) == (kind in ("windows", "both"))
    assert has_states(name) == (kind in ("recurrent", "both"))
    if kind in ("recurrent", "both"):
        refused = kind == "both" or name not in overrides._MAMBA_EXTRA_BUFFER_ARCHS
        assert (row.kv == "refused") == refused
    assert not has_an_index(name) or kind in ("sparse", "latent", "vision")
    assert has_an_index(name) or kind != "sparse"
    assert ("with" in row.kv and "images" in row.kv) == (name in WITH_IMAGES)
    if kind in ("vision", "dense", "experts", "latent"):
        assert (name in model_config.multimodal_model_archs) == (kind == "vision")


def test_what_has_forms_by_family_is_on_the_page() -> None:
    names = {name for name, _ in NAMED}
    assert FAMILIES.keys() | RECOMPUTED <= names
    assert FAMILIES.keys() == HIDDEN, "what `sglang-hc plan` goes by"
    assert {name for name, row in NAMED if row.kv == "refused"} == REFUSED


@pytest.mark.parametrize("pool", [DeepSeekV4TokenToKVPool, MiniMaxSparseKVPool, QSATokenToKVPool])
def test_pools_of_other_kinds_are_refused(pool: type) -> None:
    with pytest.raises(UnsupportedPool, match=f"KV pool {pool.__name__} is not supported"):
        KvPoolRows(full_attention(object.__new__(pool)), None)


def test_each_row_names_a_test_that_is_there() -> None:
    for row in ROWS:
        files = re.findall(r"`(test/[\w/.]+)`", row.test)
        assert (row.test == "none") == row.kind.endswith(", not checked"), row.kind
        assert bool(files) == (row.test != "none") and all((ROOT / one).is_file() for one in files)


def architecture(family: Family) -> str:
    """Of its checkpoints."""
    return family.config_class.removesuffix("Config").removesuffix("Text") + "ForCausalLM"


SERVED = {
    "state": {
        *map(architecture, state_model.MODELS.values()),
        *map(state_model.architecture_of, state_model.PUBLISHED),
    },
    "window": {*map(architecture, window_model.MODELS.values()), "Gemma4ForConditionalGeneration"},
    "window_models": {one["architectures"][0] for one in window_configs.CONFIGS.values()},
}
"""Of windows and recurrent layers: by its name, what a test serves."""


@pytest.mark.parametrize("name", SERVED)
def test_what_a_test_serves_is_in_its_row(name: str) -> None:
    file = f"`test/e2e/test_core_{name}.py`"
    assert {one for one, row in NAMED if row.test == file} == SERVED[name]
