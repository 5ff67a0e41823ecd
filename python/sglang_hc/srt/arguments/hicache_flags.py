"""HiCache's flags beside the tiers: refused in one sentence, because nobody would read them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from sglang_hc.errors import ConfigError
from sglang_hc.srt.binding.arguments import asked, choose, default

INSTEAD = {
    "enable_hierarchical_cache": "the tiers are on without it",
    "hicache_host_memory_mode": "the host tier keeps blocks, and --hc-disk a copy",
    "hicache_ratio": "--hc-host-size-gb says how large the host tier is",
    "hicache_size": "--hc-host-size-gb says how large the host tier is",
    "hicache_host_memory_fraction": "--hc-host-size-gb says how large the host tier is",
    "hicache_write_policy": "every full block is saved as it is computed",
    "hicache_io_backend": "the tiers have one way to copy",
    "hicache_mem_layout": "--hc-forms says how state is kept",
    "hicache_storage_backend": "--hc-disk names a disk and --hc-remote a shared store",
    "hicache_storage_prefetch_policy": "--hc-prefetch says when blocks are read",
    "hicache_storage_prefetch_retry_poll_interval": "--hc-prefetch says when blocks are read",
    "hicache_storage_prefetch_retry_max_attempts": "--hc-prefetch says when blocks are read",
    "hicache_storage_backend_extra_config": "--hc-remote-config takes a store's options",
}
"""SGLang's arguments for HiCache, and what there is in their place."""


def forget_defaults(parser: argparse.ArgumentParser) -> None:
    """Of these flags only those are to be in the parsed arguments that were given."""
    parser.set_defaults(**dict.fromkeys(INSTEAD))


def given(parsed: argparse.Namespace) -> list[str]:
    """Which of them a command line or a file of `--config` has."""
    return [name for name in INSTEAD if getattr(parsed, name, None) is not None]


def with_defaults(parsed: argparse.Namespace) -> argparse.Namespace:
    """The parsed arguments with SGLang's defaults for those that were not given."""
    words = vars(parsed)
    lacking = [name for name in INSTEAD if name in words and words[name] is None]
    return argparse.Namespace(**words | {name: default(name) for name in lacking})


def changed(args: Any) -> list[str]:
    """Which of them differ from their defaults in arguments that no command line gave."""
    return [name for name in INSTEAD if asked(args, name) != default(name)]


def refuse(names: Iterable[str]) -> None:
    """Raise ConfigError for those that are there."""
    wrong = [f"--{name.replace('_', '-')} ({INSTEAD[name]})" for name in names]
    if wrong:
        raise ConfigError(
            f"the tiers take HiCache's place, and nothing reads {', '.join(wrong)}; leave it out, "
            "or add --hc-disable to serve without the tiers"
        )


def take_its_place(args: Any) -> None:
    """Have SGLang call our tree where it would call HiCache's, and build nothing of that itself."""
    choose(args, "radix_cache_backend", "hc")
    choose(args, "enable_hierarchical_cache", True)
    # Has SGLang tell the tree of every queued request; its own back end is not built.
    choose(args, "hicache_storage_backend", "file")
    # The queue asks the tree once; what is fetched later, the tree knows by itself.
    choose(args, "hicache_storage_prefetch_retry_max_attempts", 0)
    # No host pool is sized by what is free, and with this layout no device memory is set aside.
    choose(args, "hicache_host_memory_fraction", None)
    choose(args, "hicache_mem_layout", "layer_first")
