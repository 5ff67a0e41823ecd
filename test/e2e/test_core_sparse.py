"""Sparse attention under SGLang's real scheduler, on a CPU with torch for its kernels: what was
evicted comes back with its index, and goes on word for word. The index chooses 64 tokens, so a
wrong key changes the reply."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from support import ranked_turns, retractions, sparse_kernels, sparse_model
from support.core import Once, Reply, run_in_child
from support.prompts import in_directory, in_store, on_disk, prompt
from support.ranked_core import RankedCore
from support.sparse_core import FLAGS, KEPT, engine, evicted, exchange, history, never_evicted
from support.starts import check_left_out, refusal

CHUNKS = "--chunked-prefill-size", "128"
PLAIN = "--disable-overlap-schedule"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sparse")
    sparse_model.make(made)
    return made


@pytest.fixture
def model(folder: Path) -> str:
    return str(folder / "deepseek-v3.2")


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("deepseek-v3.2", ()),
        pytest.param("deepseek-v3.2", CHUNKS, marks=pytest.mark.slow),
        pytest.param("deepseek-v3.2", (PLAIN,), marks=pytest.mark.slow),
        ("deepseek-v3.2", (*CHUNKS, PLAIN, "--enable-mixed-chunk")),
        ("deepseek-v3.2", ("--dtype", "bfloat16")),
        ("glm-5", CHUNKS),
    ],
)
def test_what_left_the_device_comes_back(
    folder: Path, once: Once, name: str, flags: tuple[str, ...]
) -> None:
    """In pages of 64 tokens, which SGLang takes for these models whatever is asked for."""
    model = str(folder / name)
    wanted = once(never_evicted, model, *flags)
    found = run_in_child(evicted, model, *flags)
    assert [found.first, found.second.tokens] == wanted
    assert found.same, "the device has other bytes than before"
    assert (found.second.device, found.second.host) == (0, KEPT)
    assert found.stats["layer_plan"] == "kv:4" and "guarded_errors" not in found.stats


@pytest.mark.parametrize(
    "parts", [slice(1, 2), slice(2, 3), slice(0, 1)], ids=["keys", "scales", "latents"]
)
def test_an_index_of_another_block_is_noticed(model: str, once: Once, parts: slice) -> None:
    """The control: rows of two blocks change places in host memory, the others stay."""
    wanted = once(never_evicted, model)
    spoil = partial(exchange, parts=parts)
    found = run_in_child(partial(evicted, spoil=spoil), model)
    assert found.first == wanted[0] and found.second.host == KEPT
    assert not found.same and found.second.tokens != wanted[1]


def first_turn(model: str, *flags: str) -> list[int]:
    core = engine(model, *flags)
    reply = core.ask(history([])[:300], 24)
    core.settle()
    return reply.tokens


def second_turn(model: str, first: list[int], *flags: str) -> Reply:
    return engine(model, *flags).ask(history(first), 24)


@pytest.mark.parametrize(
    "below",
    [on_disk, *(pytest.param(below, marks=pytest.mark.slow) for below in (in_directory, in_store))],
)
def test_the_next_server_goes_on(
    model: str, once: Once, tmp_path: Path, below: Callable[[object], tuple[str, ...]]
) -> None:
    wanted = once(never_evicted, model)
    flags = below(tmp_path)
    first = run_in_child(first_turn, model, *flags)
    second = run_in_child(second_turn, model, first, *flags)
    assert [first, second.tokens] == wanted
    assert second.storage == KEPT


def of_rank(rank: int, port: int, *server: str) -> RankedCore:
    sparse_kernels.use()
    return ranked_turns.engine(rank, port, *server, *FLAGS)


@pytest.mark.slow
@pytest.mark.parametrize("below", [on_disk, in_store])
def test_two_ranks_divide_latents_and_index(
    model: str, tmp_path: Path, below: Callable[[object], tuple[str, ...]]
) -> None:
    ranked_turns.check_two_servers(of_rank, "tp", "kv", model, *below(tmp_path))


def test_another_choice_of_tokens_is_another_model(model: str, tmp_path: Path) -> None:
    """Its state depends on what was attended to."""
    first = run_in_child(first_turn, model, *on_disk(tmp_path))
    other = "--json-model-override-args", '{"index_topk": 32}'
    assert run_in_child(second_turn, model, first, *on_disk(tmp_path), *other).cached == 0


def retracted(model: str, often: bool) -> dict[str, Any]:
    if often:
        retractions.retract_often()
    prompts = [prompt(i, 100 + 10 * i) for i in range(3)]
    return retractions.serve(engine(model), prompts)


def test_what_was_retracted_comes_back(model: str) -> None:
    """In whole pages: what is behind the last one is computed again."""
    calm, found = (run_in_child(retracted, model, often) for often in (False, True))
    assert found["replies"] == calm["replies"] and found["retractions"] > 0
    assert found["again"] <= BLOCK_TOKENS * found["retractions"]
    assert found["stats"]["retracted_restored_tokens"] > 0


def sizes(model: str) -> dict[str, list[float]]:
    """Bytes of a token by the pool, by the modules at load, and by the config; with the weights of
    a layer."""
    from sglang_hc.srt.model.scratch_layer import layer_weights, model_shape
    from sglang_hc.tools.model_shape import ModelShape

    core = engine(model, "--dtype", "bfloat16", "--page-size", "1")
    runner = core.scheduler.tp_worker.model_runner
    assert runner.page_size == BLOCK_TOKENS, "SGLang has other pages for it"
    config = ModelShape.from_config(runner.model_config.hf_config.to_dict(), "bfloat16")
    pool, tokens = runner.token_to_kv_pool, core.scheduler.max_total_num_tokens + BLOCK_TOKENS
    layout = core.tree.tiers.restorer.path.pool.layout
    weights = layer_weights(runner.model)
    return {
        "pool": [pool.get_kv_size_bytes() / tokens / pool.layer_num, weights],
        "loaded": [model_shape(runner).kv_bytes, weights],
        "kept": [layout.shape.kv_bytes, weights],
        "config": [config.state_shape().kv_bytes, config.layer_params],
    }


def test_bytes_and_costs_count_the_index(model: str) -> None:
    found = run_in_child(sizes, model)
    assert found["pool"][0] == 2 * (64 + 32) + 128 + 4
    assert all(one == pytest.approx(found["pool"]) for one in found.values())


def test_hidden_form_is_left_out_and_the_log_says_why(model: str) -> None:
    check_left_out(engine, model, "kv:4", "DeepseekV32ForCausalLM")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--hc-forms", "recompute:1,kv:3"), "is not among the families whose first layers"),
        (("--hc-overflow", "reembed"), "keys of a sparse-attention index are kept in 8 bits"),
    ],
)
def test_what_cannot_be_right_is_refused(model: str, flags: tuple[str, ...], why: str) -> None:
    assert why in refusal(engine, model, *flags)
