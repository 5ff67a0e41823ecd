"""Seeded checkpoints for tests and the demo: every supported model family, small, with a tokenizer.

    python scripts/make_tiny_models.py --output models [--only demo,llama-mha] [--list]

The weights are random, so the text means nothing; they are scaled so that it is useful:

- greedy decoding wanders through the vocabulary and depends on the whole prompt, so a cache that
  returns wrong state changes the output;
- every bias and norm weight is non-trivial, so a restoration that forgets one is caught;
- only whole words are ever generated, so replies sent back as text are tokenized into the very ids
  that were generated, and the next turn of a chat finds its history in the cache;
- the end-of-sequence token never wins by chance: a reply ends at its token limit.

The bytes depend on --seed, the family and the versions of numpy, tokenizers and transformers only.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerFast

RECIPE_VERSION = 1
"""Raise when the same seed and family give other bytes than before."""

RECIPE_FILE = "recipe.json"
"""Written last into a checkpoint; a folder without it is incomplete."""

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
PAD, BOS, EOS = 0, 1, 2

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

COMMON_WORDS = """
the of and to in is that it was for on are as with they at be this from have or by one had not but
what all were when we there can an your which their said if do will each about how up out them then
she many some so these would other into has more her two like him see time could no make than first
been its who now people my made over did down only way find use may water long little very after
words called just where most know get through back much before go good new write our used me man too
any day same right look think also around another came come work three word must because does part
even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should home big give air line set own under
read last never us left end along while might next sound below saw something thought both few those
always looked show large often together asked house world going want school important until form
food keep children feet land side without boy once animals life enough took sometimes four head
above kind began almost live page got earth need far hand high year mother light parts country
father let night following picture being study second eyes soon times story boys since white days
ever paper hard near sentence better best across during today others however sure means knew try
told young miles sun ways thing whole hear example heard several change answer room sea against top
turned learn point city play toward five using himself usually memory cache token model layer server
"""

ONSETS = "b br c cl d dr f fl g gr h j k l m n p pl pr qu r s sh st t tr v w"
NUCLEI = "a e i o u ai ea io ou"
CODAS = "n r l s t nd rk st m ck"


@dataclass(frozen=True)
class Family:
    """One checkpoint: the class names inside transformers and the arguments of its config."""

    config_class: str
    arguments: dict[str, Any]
    about: str
    vocab_size: int = 1024

    @property
    def max_length(self) -> int:
        """Positions of the model."""
        names = ("max_position_embeddings", "n_positions")
        return int(next(self.arguments[name] for name in names if name in self.arguments))


def _rope_model(config_class: str, about: str, vocab_size: int = 1024, **arguments: Any) -> Family:
    """A tiny decoder with the argument names that Llama gave the ecosystem."""
    shape = dict(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    return Family(config_class, {**shape, **arguments}, about, vocab_size)


def _demo(about: str, num_key_value_heads: int, intermediate_size: int) -> Family:
    """A Llama of about 85 M parameters in its 12 layers, plus 12.6 M in the two embeddings."""
    return _rope_model(
        "LlamaConfig", about, 8192, hidden_size=768, intermediate_size=intermediate_size,
        num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=num_key_value_heads,
        max_position_embeddings=8192,
    )  # fmt: skip


FAMILIES: dict[str, Family] = {
    "llama-mha": _rope_model("LlamaConfig", "Llama, multi-head attention"),
    "llama-gqa": _rope_model(
        "LlamaConfig", "Llama, grouped queries", num_attention_heads=8, num_key_value_heads=2
    ),
    "mistral": _rope_model(
        "MistralConfig", "Mistral, no sliding window", num_key_value_heads=2, sliding_window=None
    ),
    "qwen2": _rope_model("Qwen2Config", "Qwen2, bias on the QKV projection", num_key_value_heads=2),
    "qwen3": _rope_model(
        "Qwen3Config", "Qwen3, norm on query and key heads", num_key_value_heads=2, head_dim=64
    ),
    "gemma": _rope_model(
        "GemmaConfig", "Gemma 1, head width independent of the hidden size, tied embeddings",
        head_dim=128, tie_word_embeddings=True,
    ),
    "phi": _rope_model(
        # SGLang takes four times the hidden size for the MLP, whatever the config says.
        "PhiConfig", "Phi-1/2, bias", intermediate_size=1024, partial_rotary_factor=0.5
    ),
    "opt": Family(
        "OPTConfig",
        dict(
            hidden_size=256, word_embed_proj_dim=256, ffn_dim=512, num_hidden_layers=4,
            num_attention_heads=4, max_position_embeddings=4096, do_layer_norm_before=True,
        ),
        "OPT, bias, learned positions, tied embeddings",
    ),
    "gpt2": Family(
        "GPT2Config", dict(n_embd=256, n_layer=4, n_head=4, n_positions=4096),
        "GPT-2, bias, learned positions, tied embeddings",
    ),
    "granite": _rope_model(
        "GraniteConfig", "Granite, grouped-query attention, scaled residual, attention and logits",
        num_key_value_heads=2, embedding_multiplier=6.0, attention_multiplier=0.1,
        residual_multiplier=0.8, logits_scaling=2.0,
    ),
    "starcoder2": _rope_model(
        "Starcoder2Config", "StarCoder2, bias, grouped-query attention, LayerNorm, tied embeddings",
        num_key_value_heads=2, sliding_window=None, tie_word_embeddings=True,
    ),
    "deepseek-v2": _rope_model(
        "DeepseekV2Config", "DeepSeek-V2, multi-head latent attention, dense", q_lora_rank=None,
        kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
        first_k_dense_replace=4, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        moe_intermediate_size=128, moe_layer_freq=1,
        rope_parameters=dict(  # the only rotary embedding that SGLang has for MLA on a CPU
            rope_type="yarn", rope_theta=10000.0, factor=1.0,
            original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0,
            mscale_all_dim=1.0,
        ),
    ),
    "qwen3-moe": _rope_model(
        "Qwen3MoeConfig", "Qwen3, two of four experts", num_key_value_heads=2, head_dim=64,
        moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2,
    ),
    "demo": _demo("the demo: Llama, multi-head attention, 12 layers, hidden 768", 12, 2048),
    "demo-gqa": _demo("sibling of the demo with 4 key-value heads of 12", 4, 2384),
}  # fmt: skip


class UsageError(Exception):
    """A mistake of the user. The message names the option and the remedy."""


def training_text() -> Iterator[str]:
    """Lines to train the tokenizer on: common words, invented words, digits and punctuation."""
    common = COMMON_WORDS.split()
    parts = (ONSETS.split(), NUCLEI.split(), CODAS.split())
    syllables = ["".join(syllable) for syllable in itertools.product(*parts)]
    invented = [
        first + second for first, second in zip(syllables, syllables[7::3] * 3, strict=False)
    ]
    for start, words in [(i, common) for i in range(96)] + [(i, invented) for i in range(12)]:
        step = 2 * start + 1
        order = [words[(start + step * i) % len(words)] for i in range(len(words))]
        for i in range(0, len(order), 12):
            line = " ".join(order[i : i + 12])
            yield f"{line}, {start * i}. {line.capitalize()}?\n"


def build_tokenizer(vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly vocab_size tokens, with the special tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(training_text(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise RuntimeError(
            f"the training text gave {tokenizer.get_vocab_size()} tokens, not {vocab_size}"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=SPECIAL_TOKENS[3:], chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=max_length,
    )  # fmt: skip


def whole_words(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids that decode to a space and letters, and whose text encodes to that one id again.

    Any sequence of them survives decoding and encoding, because the pre-tokenizer cuts at spaces.
    """
    texts = ((i, tokenizer.decode([i])) for i in range(len(tokenizer)))
    words = {i: t for i, t in texts if t[:1] == " " and t[1:].isalpha() and len(t) > 2}
    encoded = tokenizer(list(words.values()), add_special_tokens=False)["input_ids"]
    return [i for i, ids in zip(words, encoded, strict=True) if ids == [i]]


def fill_weights(model: nn.Module, family: str, seed: int, words: list[int]) -> None:
    """Replace every parameter of the model in place, each from its own stream of random numbers."""
    import numpy as np
    import torch
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}"
            rng = np.random.default_rng([seed, zlib.crc32(f"{family}/{full_name}".encode())])
            normal = rng.standard_normal(tuple(parameter.shape), dtype="float32")
            if parameter.ndim == 1:
                values = _centre(module_name, module, name) + 0.1 * normal
            elif isinstance(module, nn.Embedding):
                values = _embedding_std(model) * normal
            else:
                fan_in = parameter.shape[0 if isinstance(module, Conv1D) else -1]
                values = _gain(module_name) / fan_in**0.5 * normal
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(np.asarray(values, dtype=np.float32)))
    with torch.no_grad():
        # A tenth of the logit: the largest of hundreds of words always beats it.
        quiet = torch.full((model.config.vocab_size, 1), 0.1)
        quiet[words] = 1.0
        head = model.get_output_embeddings()
        head.weight.mul_(quiet)
        if head.bias is not None:
            head.bias.zero_()  # SGLang does not add Phi's


def _centre(module_name: str, module: nn.Module, name: str) -> float:
    """Mean of a vector: 0 for a bias, about 1 for the weight of a norm."""
    kind = type(module).__name__
    if name != "weight" or "Norm" not in kind or kind.startswith("Gemma"):
        return 0.0  # Gemma stores the weights of its norms minus one
    return 2.0 if module_name.endswith(("q_norm", "k_norm")) else 1.0  # see _gain: query and key


def _embedding_std(model: nn.Module) -> float:
    """Small against what the layers add: with tied embeddings a token would else repeat itself."""
    if model.config.model_type == "gemma":  # multiplies embeddings by the root of the hidden size
        return float(0.1 / model.config.hidden_size**0.5)
    return 0.1


def _gain(module_name: str) -> float:
    """Scale of a projection over what keeps variance, so that the output hangs on the context.

    Query and key are larger: attention picks few positions however long the prompt. What attention
    adds outweighs what the MLP adds: the next token hangs on the history, not on the last token.
    """
    last = module_name.rsplit(".", 1)[-1]
    if last in {"q_proj", "k_proj", "c_attn", "kv_a_proj_with_mqa"}:
        return 2.0
    attention_output = module_name.endswith((".o_proj", ".dense", ".out_proj", "attn.c_proj"))
    return 8.0 if attention_output else 1.0


def recipe(name: str, seed: int) -> dict[str, Any]:
    """What the bytes of a checkpoint depend on; equal recipes mean equal checkpoints."""
    import numpy as np
    import tokenizers
    import transformers

    family = FAMILIES[name]
    return {
        "recipe": RECIPE_VERSION, "family": name, "seed": seed,
        "config_class": family.config_class, "arguments": family.arguments,
        "vocab_size": family.vocab_size,
        "text": hashlib.sha256("".join(training_text()).encode()).hexdigest(),
        "numpy": np.__version__, "tokenizers": tokenizers.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip


def is_complete(folder: Path, wanted: dict[str, Any]) -> bool:
    """Whether the folder holds a finished checkpoint of this very recipe."""
    try:
        found = json.loads((folder / RECIPE_FILE).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return bool(found == wanted) and (folder / "model.safetensors").is_file()


def make_model(name: str, folder: Path, seed: int, tokenizer: PreTrainedTokenizerFast) -> int:
    """Write one checkpoint; the folder appears complete or not at all. Returns its parameters."""
    import transformers

    family = FAMILIES[name]
    config = getattr(transformers, family.config_class)(
        vocab_size=family.vocab_size, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
        dtype="float32", **family.arguments,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    fill_weights(model, name, seed, whole_words(tokenizer))
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / RECIPE_FILE).write_text(json.dumps(recipe(name, seed), indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return int(model.num_parameters())


def make_models(names: list[str], output: Path, seed: int, force: bool) -> None:
    """Write the named checkpoints to output/NAME, skipping those that are there already."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    output.mkdir(parents=True, exist_ok=True)
    tokenizers: dict[tuple[int, int], PreTrainedTokenizerFast] = {}
    for name in names:
        folder = output / name
        if not force and is_complete(folder, recipe(name, seed)):
            print(f"{folder}: complete, kept")
            continue
        start = time.monotonic()
        key = (FAMILIES[name].vocab_size, FAMILIES[name].max_length)
        if key not in tokenizers:
            tokenizers[key] = build_tokenizer(*key)
        count = make_model(name, folder, seed, tokenizers[key])
        print(f"{folder}: {count / 1e6:.1f} M parameters, {time.monotonic() - start:.1f} s")


def parse_names(text: str | None) -> list[str]:
    """Names of --only in the order given, or all. Raises UsageError for an unknown one."""
    if text is None:
        return list(FAMILIES)
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in FAMILIES]
    if unknown or not names:
        what = f"unknown model {', '.join(unknown)}" if unknown else "no model named"
        raise UsageError(f"--only: {what}; choose from {', '.join(FAMILIES)}")
    return names


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("models"), help="default: models")
    parser.add_argument("--only", metavar="NAME,...", help="these only (see --list)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    parser.add_argument("--force", action="store_true", help="write again what is complete")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 could not write, 2 wrong usage."""
    args = parse_args(argv)
    try:
        names = parse_names(args.only)
        if args.seed < 0:
            raise UsageError(f"--seed: {args.seed} is negative; give 0 or more")
        if args.list:
            for name in names:
                print(f"{name:12} {FAMILIES[name].about}")
            return 0
        make_models(names, args.output, args.seed, args.force)
    except UsageError as error:
        print(f"make_tiny_models: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"make_tiny_models: --output {args.output}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
