"""What the GPU scripts share: model shapes made on the spot, flags, and the goals to check."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark import ROOT
from benchmark.__main__ import main as benchmark
from benchmark.harness.arms import HICACHE
from benchmark.harness.core import FREE_LOADING
from scripts.make_tiny_models import BOS, EOS, PAD, build_tokenizer

CONTEXT = 16384
"""Positions of both shapes, as HCache extends its models (section 6.1)."""

TOKENIZER_SIZE = 1024
"""Prompts are token ids; the tokenizer is there because the server wants one."""


@dataclass(frozen=True)
class Shape:
    """Widths of a public model. Weights are dummies: right for times, meaningless as text.

    goals: by rival, how many times better the TTFT of turns after the first shall be.
    """

    arguments: dict[str, Any]
    goals: dict[str, float]


SHAPES = {
    "llama-2-7b": Shape(
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
        },
        {"hicache": 1.27, "stock": 2.2},  # HCache, Fig. 9
    ),
    "llama-2-13b": Shape(
        {
            "vocab_size": 32000,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "rms_norm_eps": 1e-5,
        },
        {"hicache": 1.0, "stock": 1.0},
    ),
    "llama-3.1-8b": Shape(
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
        },
        {"hicache": 1.0, "stock": 1.0},
    ),
}

WITHIN_ONE_PERCENT = 0.99
HICACHE_PAGE = "--page-size 64"
"""HiCache copies whole pages; with SGLang's default of one token it would be slow for no reason."""


def rehearsal(shape: str) -> str:
    """Server flags that shrink a shape to what a CPU runs in seconds: two narrow layers with the
    shape's ratio of query to key-value heads."""
    arguments = SHAPES[shape].arguments
    group = arguments["num_attention_heads"] // arguments["num_key_value_heads"]
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8 // group,
        "head_dim": 32,
    }
    return "--json-model-override-args " + shlex.quote(json.dumps(small))


def make_shape(name: str, models: Path) -> Path:
    """Folder with config and tokenizer of a shape; made when it is not there."""
    import transformers

    folder = models / f"{name}-shape"
    if not (folder / "config.json").is_file():
        config = transformers.LlamaConfig(
            **SHAPES[name].arguments,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
        )
        build_tokenizer(TOKENIZER_SIZE, CONTEXT).save_pretrained(folder)
        config.save_pretrained(folder)
    return folder


def run(experiment: str, preset: Sequence[str], shorter: Sequence[str], about: str) -> int:
    """An experiment on a shape, with `preset`, then what was typed; then the goals.

    With --rehearse a shrunk shape and the lengths of `shorter` run on a CPU.
    Returns the exit status of the benchmark.
    """
    parser = argparse.ArgumentParser(
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a flag that is not ours belongs to the benchmark
    )
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="where shapes go")
    parser.add_argument("--server-args", default="", help="further flags for every server")
    parser.add_argument("--output", help=f"folder (default: out/gpu-{experiment}-SHAPE)")
    parser.add_argument(
        "--rehearse", action="store_true", help="the same on a CPU: tiny, short, no HiCache"
    )
    args, typed = parser.parse_known_args()
    output = args.output or f"out/gpu-{experiment}-{args.shape}"
    flags = "--load-format dummy --dtype bfloat16"
    if args.rehearse:
        flags += f" {rehearsal(args.shape)}"
    words = [
        *("--model", str(make_shape(args.shape, args.models)), "--output", output, *preset),
        *(shorter if args.rehearse else ()),
        *_arm_flags([*preset, *typed], args.rehearse),
        *("--server-args", f"{flags} {args.server_args}".strip(), *typed),
    ]
    status = benchmark([experiment, *words])
    path = Path(output) / "result.json"
    if status != 2 and path.is_file():
        title = "Goals on a GPU (this was a rehearsal)" if args.rehearse else "Goals"
        print("\n".join(["", title, *goal_lines(json.loads(path.read_text()), args.shape)]))
    return status


def _arm_flags(words: Sequence[str], rehearse: bool) -> list[str]:
    """What single arms get, of the last --arms: HiCache its page size, and in a rehearsal ours a
    reason to restore: tiny models are recomputed sooner otherwise."""
    last = max(index for index, word in enumerate(words) if word == "--arms")
    flags = {arm: HICACHE_PAGE for arm in HICACHE}
    if rehearse:
        flags |= {arm: f"--hc-profile {FREE_LOADING}" for arm in ("kv", "hidden", "auto")}
    arms = [arm for arm in words[last + 1].split(",") if arm in flags]
    return [word for arm in arms for word in ("--arm-args", f"{arm}={flags[arm]}")]


def goal_lines(result: dict[str, Any], shape: str) -> list[str]:
    """One line for every goal that this result can speak about: met, or missed."""
    lines = []
    costs = ["median_tbt"]
    if result["experiment"] == "overhead":
        costs.append("output_token_throughput")
    for row in result["ratios"]:
        rival = "stock" if row["against"] == "stock" else "hicache"
        wanted = None
        if row["arm"] == "auto" and (row["metric"], row["group"]) == ("median_ttft", "turns 1+"):
            wanted = SHAPES[shape].goals[rival]
        elif row["arm"] == "auto" and rival == "stock" and row["metric"] in costs:
            wanted = WITHIN_ONE_PERCENT
        if wanted is not None:
            verdict = "met" if row["median"] >= wanted else "MISSED"
            lines.append(
                f"{verdict}: {row['metric']} of {row['group']}, {row['point']}, "
                f"{row['median']:.3f} times {row['against']}'s "
                f"({row['low']:.3f} to {row['high']:.3f}), goal {wanted:g}"
            )
    return lines
