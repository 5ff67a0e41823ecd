"""What SGLang's defaults and our capture take of a card's memory, without the card.

python -m support.ledger        the table of docs/gpu-status.md
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from sglang_hc.config import GIB
from sglang_hc.forms import LayerPlan, StateShape
from sglang_hc.restore.staging import CUDA_FRAMES
from support.core import import_engine, run_in_child

CARDS = (40, 80, 141)


class Model(NamedTuple):
    """A model in 16 bit. parameters: billions."""

    layers: int
    width: int
    kv_width: int
    parameters: float
    context: int
    plan: str


MODELS = {
    "llama-2-7b": Model(32, 4096, 4096, 6.74, 4096, "hidden"),
    "llama-2-7b as KV": Model(32, 4096, 4096, 6.74, 4096, "kv"),
    "llama-2-13b": Model(40, 5120, 5120, 13.02, 4096, "hidden"),
    "llama-3.1-8b": Model(32, 4096, 1024, 8.03, 131_072, "kv"),
}


class Entry(NamedTuple):
    """Sizes in GiB, rows. left: of the share for weights and KV pool, after weights and capture."""

    gpu: int
    model: str
    chunk: int
    graphs: int
    rows: int
    snapshot_rows: int
    taps: float
    ring: float
    staging: float
    left: float
    reserve: float
    behind: float

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool has room for."""
        model = MODELS[self.model]
        return int(self.left * GIB / (model.layers * 2 * model.kv_width * 2))


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
    "num_hidden_layers": 32, "max_position_embeddings": 4096, "vocab_size": 32000,
    "torch_dtype": "float16", "rms_norm_eps": 1e-5,
}  # fmt: skip


def by_defaults() -> list[Entry]:
    """By SGLang's arguments on each card, with the tiers on. To be called in a process of its own,
    because it believes that there is a GPU."""
    os.environ["SGLANG_HC_ENABLE"] = "1"
    import_engine()
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    found = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        for gib in CARDS:
            memory_hook.get_device_memory_capacity = lambda device=None, gib=gib: gib * 1024.0
            args = prepare_server_args(
                ["--model-path", folder, "--device", "cuda", "--attention-backend", "triton",
                 "--sampling-backend", "pytorch", "--load-format", "dummy"]
            )  # fmt: skip
            publish(args, role="test")  # it resolves them
            found += [entry(gib, name, args) for name in MODELS]
    return found


def entry(gib: int, name: str, args: Any) -> Entry:
    from sglang.srt.arg_groups.model_override_base import resolved_view

    from sglang_hc.srt.model.capture_memory import capture_sizes

    model = MODELS[name]
    layer = StateShape(1, 2 * model.width, (2 * model.kv_width,) * 2, "float16")
    plan = LayerPlan.parse(model.plan, model.layers)
    sizes = capture_sizes(args, plan, layer, model.context, gib * GIB)
    chosen = resolved_view(args)
    static = gib * chosen.mem_fraction_static
    weights = 2 * model.parameters * 1e9 / GIB
    frames, frame_bytes = CUDA_FRAMES
    return Entry(
        gib, name, chosen.chunked_prefill_size, chosen.cuda_graph_config.decode.max_bs, sizes.rows,
        sizes.snapshot_rows, sizes.tap_bytes / GIB, sizes.ring_bytes / GIB,
        sizes.staging_bytes / GIB,
        static - weights - sizes.bytes / GIB, gib - static,
        frames * frame_bytes / GIB,
    )  # fmt: skip


def table(entries: list[Entry]) -> str:
    """Markdown: a row for each model, a column for each card."""
    cards = list(dict.fromkeys(e.gpu for e in entries))
    rows: dict[str, list[str]] = {}
    for e in entries:
        cell = f"{e.taps:.2f}, {e.ring:.2f}, {e.staging:.2f}; {e.kv_tokens:,}"
        rows.setdefault(e.model, []).append(cell)
    lines = ["| model | " + " | ".join(f"{gib} GB" for gib in cards) + " |"]
    lines += ["|---" * (len(cards) + 1) + "|"]
    lines += [f"| {model} | " + " | ".join(cells) + " |" for model, cells in rows.items()]
    return "\n".join(lines)


def ledger() -> list[Entry]:
    entries: list[Entry] = run_in_child(by_defaults)
    return entries


if __name__ == "__main__":
    print(table(ledger()))
