"""What an engine needs to be alone in a process of ours, without server and tokenizer."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

LATE_S = 300.0
"""After which something that comes counts as late."""


def import_engine() -> None:
    """Import SGLang and put the hooks in place once; every child inherits both, and what takes a
    third of a start and is the same in all: each runs `lscpu` a dozen times."""
    import sglang.srt.dllm.algorithm
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401
    from sglang.srt.arg_groups import arg_utils
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import common

    load_plugins()
    if not hasattr(common.parse_lscpu_topology, "cache_info"):
        common.parse_lscpu_topology = functools.cache(common.parse_lscpu_topology)
        common.parse_lscpu_topology()
        for asked in (arg_utils.namespace_of, arg_utils.resolvable_fields):
            asked(ServerArgs)  # keeps its answer


def use_one_thread() -> None:
    """Compute with one thread in this process and its children, whatever the environment says."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)


@contextmanager
def rendezvous(args: Any) -> Iterator[None]:
    """An engine of one rank, by SGLang's arguments, needs no port while it is built: another
    process may take one that was free before it listens there. Several ranks meet at a port."""
    if args.tp_size * args.pp_size > 1:
        yield
        return
    name = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
    with TemporaryDirectory() as folder:
        os.environ[name] = f"file://{folder}/store"
        try:
            yield
        finally:
            del os.environ[name]


def never_late() -> None:
    """Nothing that comes counts as late in this process. On a busy machine it would be computed,
    and what is found restored would depend on how busy."""
    from sglang_hc.queue import meeting, prefetch
    from sglang_hc.ranks import pending_ops
    from sglang_hc.store import executor, known_blocks, lower_tier
    from sglang_hc.store.disk import threads

    threads.PATIENCE = threads.Patience(silent_s=LATE_S)
    for module, name in (
        *((prefetch, "PATIENCE"), (meeting, "PATIENCE")),
        *((lower_tier, "DRAIN_S"), (executor, "DRAIN_S"), (pending_ops, "LONGEST_DRAIN_S")),
        *((lower_tier, "READ_DEADLINE_S"), (known_blocks, "LOOKUP_S")),
    ):
        setattr(module, name, LATE_S)


def tokenizers_part(
    args: Any, limit: int, tokens: list[int], salt: str | None, sampling: dict[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """Cuts a prompt that is longer than `limit`, in place, as the flags say. Returns the request's
    key and its options of sampling."""
    from sglang_hc.srt.requests.namespaces import client_key
    from sglang_hc.srt.requests.overflow import cut_prompt

    request = SimpleNamespace(
        sampling_params=sampling,
        extra_key=client_key(None, salt),
        return_logprob=False,
        contains_mm_input=lambda: False,
        input_embeds=None,
        session_params=None,
    )
    cut_prompt(SimpleNamespace(server_args=args, max_req_input_len=limit), request, tokens)
    return request.extra_key, request.sampling_params
