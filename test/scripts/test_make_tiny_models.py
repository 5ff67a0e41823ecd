"""The tiny checkpoints: same bytes for the same seed, useful output, clear errors."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from scripts import make_tiny_models

BUILT = ("llama-gqa", "opt")  # untied and tied embeddings, rotary and learned positions


def build(output: Path, *flags: str) -> int:
    return int(make_tiny_models.main(["--output", str(output), *flags]))


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("models")
    assert build(output, "--only", ",".join(BUILT)) == 0
    return output


@pytest.fixture(scope="module", params=BUILT)
def loaded(built: Path, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Tokenizer and model, as a stranger to the script loads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = built / request.param
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)


def prompt_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    return ids


def greedy(model: Any, ids: list[int], count: int = 64) -> list[int]:
    import torch

    prompt = torch.tensor([ids])
    output = model.generate(
        prompt,
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        attention_mask=torch.ones_like(prompt),
    )
    reply: list[int] = output[0, len(ids) :].tolist()
    return reply


def test_same_seed_same_bytes_other_seed_other_weights(built: Path, tmp_path: Path) -> None:
    assert build(tmp_path / "again", "--only", "opt") == 0
    assert build(tmp_path / "other", "--only", "opt", "--seed", "1") == 0
    assert digests(tmp_path / "again" / "opt") == digests(built / "opt")
    changed = digests(tmp_path / "other" / "opt")
    assert changed["model.safetensors"] != digests(built / "opt")["model.safetensors"]
    assert changed["tokenizer.json"] == digests(built / "opt")["tokenizer.json"]


def test_a_complete_model_is_kept_and_a_broken_one_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(tmp_path, "--only", "opt") == 0
    weights = tmp_path / "opt" / "model.safetensors"
    inode = weights.stat().st_ino
    assert build(tmp_path, "--only", "opt") == 0
    assert "kept" in capsys.readouterr().out
    assert weights.stat().st_ino == inode
    (tmp_path / "opt" / "recipe.json").unlink()
    assert build(tmp_path, "--only", "opt") == 0
    assert weights.stat().st_ino != inode
    assert build(tmp_path, "--only", "opt", "--force") == 0


def test_greedy_output_wanders_and_hangs_on_the_first_words(loaded: tuple[Any, Any]) -> None:
    tokenizer, model = loaded
    ids = prompt_ids(tokenizer, [{"role": "user", "content": "The river and the paper. " * 20}])
    reply = greedy(model, ids)
    assert len(set(reply)) >= 10
    changed = ids.copy()
    changed[3] = tokenizer(" mother", add_special_tokens=False)["input_ids"][0]
    assert changed != ids
    assert greedy(model, changed) != reply


def test_the_next_turn_starts_with_the_ids_of_this_one(loaded: tuple[Any, Any]) -> None:
    """A reply sent back as text is tokenized into the ids that were generated."""
    tokenizer, model = loaded
    messages = [{"role": "user", "content": "Tell me 17 stories, quickly!"}]
    ids = prompt_ids(tokenizer, messages)
    reply = greedy(model, ids)
    messages.append({"role": "assistant", "content": tokenizer.decode(reply)})
    messages.append({"role": "user", "content": "And then?"})
    assert prompt_ids(tokenizer, messages)[: len(ids) + 64] == ids + reply


@pytest.mark.parametrize("name", ["demo", "demo-gqa"])
def test_the_demo_models_have_85_million_parameters_in_their_layers(name: str) -> None:
    import torch
    import transformers

    family = make_tiny_models.FAMILIES[name]
    config = getattr(transformers, family.config_class)(
        vocab_size=family.vocab_size, **family.arguments
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layers = sum(p.numel() for n, p in model.named_parameters() if ".layers." in n)
    assert layers == pytest.approx(85e6, rel=0.01)


def test_list_names_every_family(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert build(tmp_path / "none", "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(make_tiny_models.FAMILIES)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--only", "bert"], ["--only", "bert", "llama-mha"]),
        (["--only", ","], ["--only", "llama-mha"]),
        (["--seed", "-1"], ["--seed", "-1"]),
    ],
)
def test_a_wrong_flag_is_named(
    flags: list[str], words: list[str], tmp_path: Path, capsys: Any
) -> None:
    assert build(tmp_path, *flags) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words)


def test_an_output_that_cannot_be_made_is_named(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    assert build(tmp_path / "file" / "models", "--only", "opt") == 1
    assert "--output" in capsys.readouterr().err
