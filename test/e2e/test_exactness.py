"""Per family and form: a conversation that was evicted between turns goes on token for token.

The reference is the same conversation, in another namespace, that never left the device. Requests
run one after the other, so that nothing but eviction and restoration differs. Recomputing is no
reference: K/V written by decode steps differ from K/V written by a prefill in the last bits.
"""

from __future__ import annotations

import random

import pytest

from support.core import Core, run_in_child

FAMILIES = [
    "llama-mha", "llama-gqa", "mistral", "qwen2", "qwen3", "gemma", "phi", "opt", "gpt2",
    "granite", "starcoder2",
]  # fmt: skip
TURNS = 3
POOL = 640


def converse(core: Core, salt: str, evict: bool, spoil: bool = False) -> dict[str, list]:
    """Three turns. Reports tokens, cache hits and how far restored K/V are from the originals."""
    rng = random.Random(7)
    history: list[int] = []
    report: dict[str, list] = {"tokens": [], "device": [], "host": [], "missed": [], "error": []}
    originals = None
    for turn in range(TURNS):
        history += [rng.randrange(3, 900) for _ in range(70 + 13 * turn)]
        if turn and evict:
            core.flood(random.Random(turn), 2 * POOL)
            if spoil:
                core.tree.tiers.drain()
                core.tree.tiers._pool.bytes[:] = 63
        reply = core.ask(history, 24, salt)
        if originals is not None:
            known = originals[0].shape[0]
            restored = [rows[:known] for rows in core.kv(history, salt)]
            report["error"].append(
                max(
                    float((a.float() - b.float()).abs().max() / a.float().abs().max())
                    for a, b in zip(originals, restored, strict=True)
                )
            )
        report["missed"].append(len(history) - 1 - reply.cached)
        report["tokens"].append(reply.tokens)
        report["device"].append(reply.device)
        report["host"].append(reply.host)
        history += reply.tokens
        originals = core.kv(history, salt)
        core.settle()
    return report


def both(model: str, form: str, dtype: str, spoil: bool = False) -> tuple[dict, dict, dict]:
    core = Core(
        "--hc-forms", form, "--hc-host-size-gb", "0.2", "--max-total-tokens", str(POOL),
        "--dtype", dtype, model=model,
    )  # fmt: skip
    kept = converse(core, "kept", evict=False)
    evicted = converse(core, "evicted", evict=True, spoil=spoil)
    return kept, evicted, core.tree.stats()


def check(kept: dict, evicted: dict) -> None:
    # Each turn adds 70 or more tokens; all that came before is a hit, but for the last token of a
    # reply, whose state was not computed when the reply ended.
    assert kept["host"] == [0, 0, 0] and min(kept["device"][1:]) > 90
    assert evicted["device"] == [0, 0, 0] and evicted["host"] == kept["device"]
    assert evicted["tokens"] == kept["tokens"]


@pytest.mark.parametrize("model", FAMILIES)
def test_hidden_form_float32(models: None, model: str) -> None:
    kept, evicted, stats = run_in_child(both, model, "hidden", "float32")
    assert stats["layer_plan"].startswith("hidden")
    check(kept, evicted)
    assert max(evicted["error"]) <= 1e-5


@pytest.mark.parametrize("model", FAMILIES)
def test_hidden_form_bfloat16(models: None, model: str) -> None:
    kept, evicted, stats = run_in_child(both, model, "hidden", "bfloat16")
    assert stats["layer_plan"].startswith("hidden")
    check(kept, evicted)
    assert max(evicted["error"]) == 0.0


@pytest.mark.parametrize("model", [*FAMILIES, "deepseek-v2"])
def test_kv_form_float32(models: None, model: str) -> None:
    kept, evicted, _ = run_in_child(both, model, "kv", "float32")
    check(kept, evicted)
    assert max(evicted["error"]) == 0.0


@pytest.mark.parametrize("model", ["llama-gqa", "qwen3", "opt"])
def test_mixed_plan_bfloat16(models: None, model: str) -> None:
    kept, evicted, stats = run_in_child(both, model, "hidden:2,kv:2", "bfloat16")
    assert stats["layer_plan"] == "hidden:2,kv:2"
    check(kept, evicted)
    assert max(evicted["error"]) == 0.0


@pytest.mark.parametrize("model", [*FAMILIES, "deepseek-v2"])
def test_recomputed_layers_float32(models: None, model: str) -> None:
    """The family's own embedding step and layers, and whatever the other layers are loaded as."""
    plan = "recompute:2,kv:2" if model == "deepseek-v2" else "recompute:2,hidden:1,kv:1"
    kept, evicted, stats = run_in_child(both, model, plan, "float32")
    assert stats["layer_plan"] == plan
    assert stats["recomputed_layer_tokens"] == 2 * sum(evicted["host"])
    check(kept, evicted)
    assert max(evicted["error"]) <= 1e-5


def test_recomputed_layers_bfloat16(models: None) -> None:
    """A prefill of what decode steps wrote first: rounded elsewhere, by a place or two."""
    kept, evicted, _ = run_in_child(both, "llama-gqa", "recompute:2,hidden:1,kv:1", "bfloat16")
    assert evicted["host"] == kept["device"]
    assert evicted["tokens"][0] == kept["tokens"][0]
    assert 0.0 < max(evicted["error"]) <= 2**-7


@pytest.mark.parametrize("form", ["kv", "hidden"])
def test_restored_garbage_is_noticed(models: None, form: str) -> None:
    """The control: were restored state not used, or not compared, the tests would be blind."""
    kept, evicted, _ = run_in_child(both, "llama-mha", form, "float32", True)
    assert evicted["host"] == kept["device"]
    assert evicted["tokens"][1:] != kept["tokens"][1:]
    assert max(evicted["error"]) > 0.1
