"""What of SGLang and of ours goes with state of running requests in host memory
(`--hc-throughput`). Beside it stands `--hc-offload-gb`, with its own table (`offload_flags`)."""

from __future__ import annotations

from typing import Any

from sglang_hc.config import ConfigError, HcConfig, flag_of
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.binding.arguments import asked, choose

NO_TIERS = "there are no tiers beside it: state in host memory is the cache"

OURS = dict.fromkeys(
    (
        *("host_size_gb", "disk", "remote", "eviction", "prefetch", "restore", "ttl"),
        *("schedule", "audit", "trace"),
    ),
    NO_TIERS,
) | {"forms": "each slot has its form: give act:SHARE in the specification"}
"""Options of ours that are refused beside it when they differ from their defaults, and why."""

SIZES = {
    "tp_size": "rows that stream on several ranks were not tested",
    "pp_size": "rows that stream on several ranks were not tested",
    "dp_size": "replicas that share the link were not tested",
}
"""Arguments of SGLang that are refused above 1, and why."""

BACKENDS = ("triton", "torch_native")
"""Attention back ends that read the rows of a round by the slots that they are told."""

ATTENTION = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def begin(args: Any, config: HcConfig) -> None:
    """Refuse what cannot go with it, and choose what nobody gave. Raises ConfigError."""
    refuse_modes(args, config)
    if all(asked(args, name) is None for name in ATTENTION):
        choose(args, "attention_backend", BACKENDS[0])


def stream_state(args: Any) -> None:
    """Run passes one after the other (`--hc-throughput`): which rows a pass needs is known when it
    begins, and they begin to come then. SGLang's own radix cache stays in place, because what
    tiers in host memory would keep lies there already."""
    choose(args, "disable_overlap_schedule", True)


def refuse_modes(args: Any, config: HcConfig) -> None:
    """Raise ConfigError for what cannot go with state of running requests in host memory."""
    for name in config.changed():
        if name in OURS:
            raise _refusal(flag_of(name), OURS[name])
    if config.overflow == "reembed":
        raise _refusal("--hc-overflow reembed", NO_TIERS)
    for name, why in SIZES.items():
        if asked(args, name) > 1:
            raise _refusal(f"{_flag(name)} above 1", why)
    if (asked(args, "page_size") or 1) > 1:
        raise _refusal(_flag("page_size") + " above 1", "rows cross token by token")
    for name in ATTENTION:
        backend = asked(args, name)
        if backend is not None and backend not in BACKENDS:
            raise ConfigError(
                f"--hc-throughput and {_flag(name)} {backend}: it does not read the rows of a "
                f"round; give --attention-backend {' or '.join(BACKENDS)}"
            )


def refuse_model(args: Any) -> None:
    """Raise ConfigError for a model whose state cannot stream."""
    if arguments.has_latent_attention(args):
        raise ConfigError(
            "--hc-throughput: the latent KV of this model is smaller than anything that could be "
            "kept in its place, and was not tested; leave the flag out: --hc-offload-gb serves it"
        )


def _refusal(what: str, why: str) -> ConfigError:
    return ConfigError(f"--hc-throughput and {what}: {why}; leave one of the two out")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
