"""The cost model of the loaded model on this machine: given, cached, or measured now."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sglang_hc import __version__, profile_file
from sglang_hc.config import HcConfig
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.restore.probe import probe
from sglang_hc.srt.binding import arguments, parallel
from sglang_hc.srt.model.exactness import has_fixed_tiles
from sglang_hc.srt.model.families import LayerAdapter
from sglang_hc.srt.model.projection import installed_kernels
from sglang_hc.srt.model.scratch_layer import subject_of
from sglang_hc.srt.ranks.start_group import StartGroup
from sglang_hc.store.disk import DirectorySpec

logger = logging.getLogger(__name__)


def cost_model(
    runner: Any,
    config: HcConfig,
    layers: list[LayerAdapter] | None,
    hidden: bool,
    group: StartGroup,
) -> CostModel | None:
    """Costs for this server; None when they cannot be measured: then everything stored is loaded.

    hidden: whether the model's layers can be kept as hidden states. group: the ranks that measure
    together; all have the first one's costs. Raises ConfigError for a profile given with
    --hc-profile that cannot be used here.
    """
    name = fingerprint(runner, config.disk, hidden)
    given = config.profile
    if given is not None:
        return group.first(lambda: profile_file.load_given(given, name, tiers_of(config)))
    cached = group.first(lambda: profile_file.load_cached(name))
    if cached is not None:
        return cached
    try:
        own = measured(runner, config.disk, layers, hidden, group)
        cost = group.first(lambda: own)
    except Exception:
        if group.size > 1:
            raise  # the other ranks wait for this one: only the end of its process frees them
        logger.warning(
            "sglang-hc: this machine could not be measured, so every restoration is loaded even "
            "where recomputing would be faster",
            exc_info=True,
        )
        return None
    if group.rank == 0:
        profile_file.save_cached(cost)
    return cost


def tiers_of(config: HcConfig) -> tuple[SourceTier, ...]:
    """The tiers that this server restores from."""
    return (SourceTier.HOST, SourceTier.DISK) if config.disk else (SourceTier.HOST,)


def measured(
    runner: Any,
    disks: tuple[str, ...],
    layers: list[LayerAdapter] | None,
    hidden: bool,
    group: StartGroup,
) -> CostModel:
    """Measure now; see `restore.probe`."""
    began = time.perf_counter()
    try:
        subject = subject_of(runner, layers, hidden, group)
        cost = probe(subject, fingerprint(runner, disks, hidden), disks)
        del subject
    finally:
        if torch.device(runner.device).type == "cuda":
            torch.cuda.empty_cache()  # SGLang sizes the KV pool by what is free now
    logger.info("sglang-hc: measured this machine in %.1f s", time.perf_counter() - began)
    return cost


def fingerprint(runner: Any, disks: tuple[str, ...], hidden: bool) -> str:
    """What the costs depend on, in words: model geometry, types, device, disks, versions."""
    of_every_server = model_and_device(runner)
    parts = [
        *of_every_server[:4],
        "hidden states" if hidden else "KV only",
        *(["fixed tiles"] if has_fixed_tiles(runner.model) else []),
        *of_every_server[4:],
        *_kernels(runner),
        *(f"disk {Path(DirectorySpec.parse(disk).path).resolve()}" for disk in disks),
        f"sglang-hc {__version__}",
        f"sglang {version('sglang')}",
        f"torch {torch.__version__}",
    ]
    return ", ".join(parts)


def model_and_device(runner: Any) -> list[str]:
    """The parts of a fingerprint that are of every server, with tiers or without."""
    args = arguments.of(runner)
    ranks, stages = parallel.tp_size(), parallel.pp_size()
    config = runner.model_config.hf_config.to_json_string(use_diff=False)
    digest = hashlib.blake2b(config.encode(), digest_size=8).hexdigest()
    return [
        f"{type(runner.model).__name__} {digest}",
        str(runner.dtype).removeprefix("torch."),
        f"quantization {arguments.quantization(args)}",
        f"KV {arguments.kv_cache_dtype(args)}",
        *(["deterministic"] if arguments.is_deterministic(args) else []),
        *([f"tensor parallel {ranks}"] if ranks > 1 else []),
        *([f"pipeline parallel {stages}"] if stages > 1 else []),
        _device_name(runner),
    ]


def _device_name(runner: Any) -> str:
    device = torch.device(runner.device)
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(runner.gpu_id))
    return f"{_processor()}, {torch.get_num_threads()} threads of {os.cpu_count()}"


def _kernels(runner: Any) -> list[str]:
    """Whose kernels may project hidden states, where that is measured."""
    if torch.device(runner.device).type != "cuda":
        return []
    return ["kernels of SGLang" if installed_kernels() is None else "own kernels"]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
