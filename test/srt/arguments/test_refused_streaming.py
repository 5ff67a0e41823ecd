"""Whatever cannot go with weights or state in host memory is refused in one sentence, which names
the option and the remedy: every refusal of `--hc-throughput`, and those that it has from
`--hc-offload-gb`, which it needs."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.server_args import ServerArgs

from benchmark.throughput.paper import paper_model
from sglang_hc.config import ConfigError, HcConfig, flag_of
from sglang_hc.policy.streamed_pass import StreamedModel
from sglang_hc.policy.streaming import ThroughputSpec
from sglang_hc.policy.streaming_plan import Setting, comparison, refuse_slower, settle
from sglang_hc.policy.throughput import Processor, Requests
from sglang_hc.srt.arguments import offload_flags, throughput_flags
from sglang_hc.srt.arguments.server_args import refuse_modes
from sglang_hc.srt.binding import arguments as binding
from sglang_hc.srt.hybrid import build
from sglang_hc.srt.model import throughput_plan
from sglang_hc.srt.model.offload import ALL_RESIDENT
from sglang_hc.srt.model.streamed import STREAMED, begin_streaming

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
STREAMING = PAGE.partition("- **State of running requests in host memory** ")[2]
STREAMING = " ".join(STREAMING.partition("\n- ")[0].split())

VALUES = {
    "disk": ("/tmp/a",), "remote": "file", "host_size_gb": 1.0, "forms": "kv", "eviction": "lru",
    "prefetch": "off", "restore": "always", "ttl": 1.0, "schedule": "ready-first", "audit": 0.5,
    "trace": "/tmp/a",
}  # fmt: skip
"""Of our options, one that differs from the default."""


def with_flags(*flags: str, **ours: Any) -> None:
    """What a start refuses of SGLang's flags, and of our options beside these two."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    args = parser.parse_args(["--model-path", "model", *flags])
    given = SimpleNamespace(**{"changed": lambda: list(ours), "overflow": "off"} | ours)
    refuse_modes(args, HcConfig())
    offload_flags.refuse_modes(args)
    throughput_flags.refuse_modes(args, given)


def flags(*words: str) -> Callable[[pytest.MonkeyPatch], object]:
    return lambda patch: with_flags(*words)


def ours(**options: Any) -> Callable[[pytest.MonkeyPatch], object]:
    return lambda patch: with_flags(**options)


def latent(patch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(attention_arch=AttentionArch.MLA)
    patch.setattr(binding, "model_config_of", lambda args: config)
    throughput_flags.refuse_model(None)


def masked(patch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(prepare_attn_masks=None)
    runner = SimpleNamespace(model=model, model_config=SimpleNamespace(is_multimodal=True))
    plan: Any = SimpleNamespace(streaming=None)
    begin_streaming(runner, plan, None)


def reading(*attentions: RadixAttention) -> Callable[[pytest.MonkeyPatch], object]:
    """A model whose layers attend so."""
    runner = SimpleNamespace(
        model=torch.nn.ModuleList(attentions), model_config=SimpleNamespace(is_multimodal=False)
    )
    plan: Any = SimpleNamespace(streaming=None)
    return lambda patch: begin_streaming(runner, plan, None)


def scaled(**how: Any) -> Callable[[pytest.MonkeyPatch], object]:
    """K and V whose scales are beside them. how: what of SGLang's configurator says so."""
    model = SimpleNamespace(**{STREAMED: object()})
    pools = SimpleNamespace(model=model, kv_cache_dtype_str=how.pop("dtype", "auto"))
    return lambda patch: build.build_pool(
        lambda *args, **kwargs: SimpleNamespace(), pools, max_total_num_tokens=5, **how
    )


def unmeasured(patch: pytest.MonkeyPatch) -> None:
    config = HcConfig(offload_gb="auto", throughput="auto")
    throughput_plan.settle_streaming(None, config, None, ALL_RESIDENT, None)


MODEL = dataclasses.replace(paper_model("30B"), host=200e9)
"""OPT-30B on a 4090."""


def here(model: StreamedModel, **changed: Any) -> Setting:
    plain = {
        "served": model, "whole": model, "requests": Requests(1024, 128),
        "cpu": Processor(75e9, 1e-3), "longest": 2048, "tokens": None, "running": None,
        "is_apart": True, "no_hidden": None,
    }  # fmt: skip
    return Setting(**{**plain, **changed})


def planned(
    spec: str, no_hidden: str | None = None, **model: float
) -> Callable[[pytest.MonkeyPatch], object]:
    """What the plan says to a specification. model: what of OPT-30B is otherwise."""
    setting = here(dataclasses.replace(MODEL, **model), no_hidden=no_hidden)
    return lambda patch: settle(setting, ThroughputSpec.parse(spec))


def auto(**model: float) -> Callable[[pytest.MonkeyPatch], object]:
    def start(patch: pytest.MonkeyPatch) -> None:
        setting = here(dataclasses.replace(MODEL, **model))
        plan, found = settle(setting, ThroughputSpec()), comparison(setting)
        assert found is not None
        refuse_slower(setting, plan, found)

    return start


AHEAD = (
    r"--hc-throughput auto: weights that are copied ahead .*\(--hc-offload-gb alone\), are "
    r"modelled at [\d.]+ tokens/s, streaming at [\d.]+"
)
LEAVE = "leave one of the two out"
GIVE = "give --attention-backend triton or torch_native"
QUANTISED = "the weights are quantised (fp8)"
NO_EXACT = "--hc-exact: hidden states are not bit-exact here (a bit differs)"

TABLE: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], str]] = {
    "ranks": (flags("--tp-size", "2"), f"--hc-throughput and --tp-size above 1: .*; {LEAVE}"),
    "stages": (flags("--pp-size", "2"), f"--hc-throughput and --pp-size above 1: .*; {LEAVE}"),
    "replicas": (flags("--dp-size", "2"), f"--hc-throughput and --dp-size above 1: .*; {LEAVE}"),
    "pages": (flags("--page-size", "16"), f"--hc-throughput and --page-size above 1: .*; {LEAVE}"),
    "back end": (flags("--attention-backend", "fa3"), f"--attention-backend fa3: .*; {GIVE}"),
    "back end of prefill": (
        flags("--prefill-attention-backend", "flashinfer"),
        f"--hc-throughput and --prefill-attention-backend flashinfer: .*; {GIVE}",
    ),
    "back end of decode": (
        flags("--decode-attention-backend", "fa3"),
        f"--hc-throughput and --decode-attention-backend fa3: .*; {GIVE}",
    ),
    "speculation": (
        flags("--speculative-algorithm", "NGRAM"),
        f"--hc-offload-gb and --speculative-algorithm: .*; {LEAVE}",
    ),
    "adapters": (flags("--enable-lora"), f"--hc-offload-gb and --enable-lora: .*; {LEAVE}"),
    "CPU experts": (
        flags("--kt-weight-path", "experts"),
        f"--hc-offload-gb and --kt-weight-path: .*; {LEAVE}",
    ),
    "SGLang's offloading": (
        flags("--cpu-offload-gb", "4"),
        "--cpu-offload-gb yet: .*--hc-offload-gb leaves them in host memory too. Leave it out",
    ),
    **{
        name: (ours(**{name: value}), f"--hc-throughput and {flag_of(name)}: .*; {LEAVE}")
        for name, value in VALUES.items()
    },
    "moved state": (
        ours(overflow="reembed"),
        f"--hc-throughput and --hc-overflow reembed: .*; {LEAVE}",
    ),
    "latent KV": (latent, "--hc-throughput: the latent KV .*; leave the flag out"),
    "masks": (masked, "--hc-throughput: images .*; leave the flag or --enable-multimodal out"),
    "K and V of another layer": (
        reading(*(RadixAttention(1, 8, 1.0, 1, layer_id=layer) for layer in (0, 1, 1))),
        "--hc-throughput: layers of this model attend to .* another layer .*; leave the flag out",
    ),
    "K and V of an encoder": (
        reading(RadixAttention(1, 8, 1.0, 1, layer_id=0, is_cross_attention=True)),
        "--hc-throughput: layers of this model attend to .* an encoder, .*; leave the flag out",
    ),
    "KV of 4 bits": (scaled(quant_method=object()), "--hc-throughput: .*; leave the flag out"),
    "KV in blocks": (scaled(dtype="mxfp8"), "--hc-throughput: .*; leave the flag out"),
    "memory that is not free": (
        lambda _: build.check_room(3 << 30, (3 << 30) - 1, 9),
        "--hc-throughput: 9 tokens take 3 GiB of host memory, and 3 are free; give .* smaller",
    ),
    "no costs": (unmeasured, "--hc-throughput: this machine could not be .*--hc-profile FILE"),
    "large hidden states": (
        planned("act:0.4", act=16384.0, kv=4096.0),
        r"--hc-throughput act:0.4: hidden states \(16,384 bytes a layer\) are larger than KV "
        r"\(4,096\); use act:0",
    ),
    "quantised": (
        planned("act:1", QUANTISED),
        rf"--hc-throughput act:1: {re.escape(QUANTISED)}; use act:0",
    ),
    "8-bit KV": (
        planned("act:0.5", "the KV cache is fp8_e5m2"),
        "--hc-throughput act:0.5: the KV cache is fp8_e5m2; use act:0",
    ),
    "not bit-exact": (
        planned("act:0.5", NO_EXACT),
        rf"--hc-throughput act:0.5: {re.escape(NO_EXACT)}; use act:0",
    ),
    "nothing that could stay": (
        planned("act:0,device-act-gb:2"),
        "--hc-throughput device-act-gb:2: nothing is kept .*; give act:SHARE above 0 too",
    ),
    "host memory": (
        planned("auto", host=59.5e9, kv_gen=math.inf),
        "--hc-throughput needs 55.1 GiB of host memory for weights and 1.39 for one request; 55.4 "
        "are free; free some, lower --hc-offload-gb",
    ),
    "device memory": (
        planned("rounds:1", device=2.6e9),
        "--hc-throughput: two places of .* are left; give more rounds, a smaller device-act-gb",
    ),
    "device memory for one request": (
        planned("auto", device=2.5e9),
        "--hc-throughput: two places for one request take .* raise --mem-fraction-static",
    ),
    "weights that fit": (
        auto(device=80e9),
        r"--hc-throughput auto: the weights fit \(55.1 of 74.5 GiB\); SGLang alone is modelled at "
        r"161 tokens/s, streaming at 21\.1; leave the flag out",
    ),
    "weights that fit and cross in no time": (
        auto(device=80e9, per_new=1e-3),
        r"--hc-throughput auto: the weights fit .*; SGLang alone is modelled at .*; leave the flag",
    ),
    "weights ahead are faster": (
        auto(device=50e9, host=61e9, kv_gen=math.inf),
        AHEAD + "; leave the flag out",
    ),
    "other layers on the device": (
        auto(device=40e9, host=60.5e9),
        AHEAD + r"; with --hc-offload-gb [\d.]+ streaming is .* [\d.]+ tokens/s: give that",
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_it_is_refused_in_one_sentence(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, said = TABLE[case]
    with pytest.raises(ConfigError, match=said) as refused:
        start(monkeypatch)
    assert "\n" not in str(refused.value)


def test_what_goes_with_it_is_not_refused() -> None:
    with_flags()
    with_flags("--attention-backend", "triton", "--page-size", "1", "--max-running-requests", "9")
    with_flags("--prefill-attention-backend", "torch_native", "--chunked-prefill-size", "64")


def test_the_table_has_every_option_that_is_refused() -> None:
    assert VALUES.keys() == throughput_flags.OURS.keys()


def test_the_page_names_them_all() -> None:
    found = set(re.findall(r"`(--[a-z0-9-]+)", STREAMING))
    sizes = {f"--{name.replace('_', '-')}" for name in throughput_flags.SIZES}
    named = {flag_of(name) for name in throughput_flags.OURS} | sizes
    others = {"--hc-throughput", "--hc-offload-gb", "--hc-overflow", "--page-size"}
    others |= {"--attention-backend", "--hc-exact", "--kv-cache-dtype"}
    assert found == named | others
    for backend in throughput_flags.BACKENDS:
        assert f"`{backend}`" in STREAMING
