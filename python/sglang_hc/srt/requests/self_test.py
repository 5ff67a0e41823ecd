"""A server that starts proves that the tiers serve: by what happened, not by what is in place.

Behind SGLang's own warm-up the launcher asks for a prompt of random tokens in a namespace of its
own, has the device forget it, and asks again. Then a block must have come back, the reply must be
as likely as it was, and every hook that takes part in a request must have run. What is missing ends
the start with one sentence. Nothing of this prompt goes below host memory. With
--skip-server-warmup nobody asks, and the scheduler looks for the hooks when its first request is
answered (`in_place.prove`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

import sglang
import torch
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import DumperControlReqInput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.utils.common import kill_process_tree

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.srt.arguments.server_args import CUT_KEY_ENV, config_of
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.engine import in_place
from sglang_hc.tree.forgetting import Forgetting
from sglang_hc.tree.identity import Prefix, pack_tokens
from sglang_hc.tree.namespaces import Namespace, client_namespace

logger = logging.getLogger(__name__)

PREFIX = "hc_self_test/"
"""Of the method names of our control requests: stored, evict, end."""

TOLERANCE = {torch.float32: 0.01}
ROUNDED = 0.25
"""Of a log probability of a reply to a cached prompt, by the model's type: chosen so that what the
forms and the type round away passes, and other state in the place of blocks does not."""

TRIES = 3
"""A client may fill the host tier, or an administrator clear it, between two of our requests."""

STORED_S = 10.0
"""A block that was computed is in host memory after milliseconds."""

LIMIT_S = 120.0
"""Of the whole test."""


class NotProven(Exception):
    """What the start did not show, for users."""


def _key() -> str:
    """How the keys of our requests begin; no client knows it."""
    secret = os.environ.get(CUT_KEY_ENV, "").encode()
    return f"self-test-{hashlib.blake2b(secret, digest_size=8).hexdigest()}-"


def is_of_test(namespace: str | None) -> bool:
    """Whether state is of a prompt of ours."""
    key = Namespace.of(namespace).key
    return key is not None and key.startswith(_key())


# -- in the launcher -----------------------------------------------------------------------------


def wait_and_warmup(original: Callable[..., None], server_args: Any, **kwargs: Any) -> None:
    """AROUND http_server._wait_and_warmup, which runs in a thread: behind the warm-up and before
    the server says that it is ready."""
    config = config_of(server_args)
    untested = config is None or config.throughput is not None  # without tiers no block comes back
    if untested or arguments.skips_warmup(server_args):
        original(server_args, **kwargs)
        return
    then = kwargs.pop("post_warmup_callback", None)

    def proved() -> None:
        from sglang.srt.entrypoints.http_server import get_global_state

        manager = get_global_state().tokenizer_manager
        if manager.event_loop is not None:  # else another tokenizer worker had the warm-up
            _prove_or_end(manager)
        if then is not None:
            then()

    original(server_args, post_warmup_callback=proved, **kwargs)


def _prove_or_end(manager: Any) -> None:
    """From the thread of the warm-up."""
    status, manager.server_status = manager.server_status, ServerStatus.Starting
    try:
        asyncio.run_coroutine_threadsafe(prove(manager), manager.event_loop).result(LIMIT_S)
    except NotProven as error:
        logger.error(
            "sglang-hc: the tiers do not serve on SGLang %s: %s. Use the release that this version "
            "of sglang-hc is made for, or start with --hc-disable",
            sglang.__version__,
            error,
        )
        workers = arguments.tokenizer_workers(arguments.of(manager))
        kill_process_tree(os.getpid() if workers == 1 else os.getppid())
    except Exception:
        logger.exception("sglang-hc: not tested whether the tiers serve")
    manager.server_status = status


async def prove(manager: Any) -> None:
    """Raises NotProven. manager: SGLang's `TokenizerManager`, in its event loop."""
    if not all("hc" in state for state in await manager.get_internal_state()):
        raise NotProven("a scheduler does not say that it has tiers (Scheduler.get_internal_state)")
    args = arguments.of(manager)
    block = max(BLOCK_TOKENS, arguments.page_size(args))
    if arguments.has_states(args):
        block = max(block, arguments.state_chunk(args))
    fits = manager.is_generation and 2 * block + 3 < manager.context_len
    # What one stage of a pipeline evicts, all have to in the same pass.
    if not fits or arguments.stages(args) > 1 or envs.SGLANG_RADIX_FORCE_MISS.get():
        logger.info("sglang-hc: not tested whether a block comes back, with this model or flags")
        return
    weighed = arguments.draft_algorithm(args) is None
    for replica in range(arguments.replicas(args)):
        for left in reversed(range(TRIES)):
            try:
                await _prove_replica(manager, replica, block, weighed)
                break
            except NotProven:
                if not left:
                    raise
    never = in_place.never_ran(in_place.Proof.TOKENIZER)
    if never:
        raise NotProven(f"never called in the tokenizer: {', '.join(never)}")


async def _prove_replica(manager: Any, replica: int, block: int, weighed: bool) -> None:
    """block: tokens that have to come back. weighed: the log probability of a reply is asked for;
    not with speculative decoding."""
    vocabulary = manager.model_config.vocab_size  # special tokens are at its ends
    tokens = random.choices(range(vocabulary // 4, vocabulary // 2), k=2 * block + 2)
    key = _key() + secrets.token_hex(8)
    body = {"namespace": client_namespace(None, key), "tokens": tokens}

    async def ask() -> Any:
        request = GenerateReqInput(
            input_ids=tokens,
            sampling_params={
                **{"max_new_tokens": 1, "min_new_tokens": 0},
                **{"temperature": 0.0, "ignore_eos": True},
            },
            return_logprob=weighed,
            extra_key=key,
            routed_dp_rank=replica,
        )
        return (await anext(manager.generate_request(request, None)))["meta_info"]

    async def control(method: str) -> list[Any]:
        asked = DumperControlReqInput(method=PREFIX + method, body=body)
        return [one for reply in await manager.dumper_control(asked) for one in reply.response]

    await ask()
    never = sorted({name for reply in await control("stored") for name in reply["never_ran"]})
    if never:
        raise NotProven(f"never called in the scheduler: {', '.join(never)}")
    before = await ask()  # of what the device has, as later of what was restored
    deadline = time.monotonic() + STORED_S
    while not any(reply["stored"] > block for reply in await control("stored")):
        if time.monotonic() > deadline:
            raise NotProven("what a request computed is in no tier (HcRadixCache.checkpoint)")
        await asyncio.sleep(0.01)
    await control("evict")
    try:
        after = await ask()
    finally:
        await control("end")
    cached = (after.get("cached_tokens_details") or {}).get("host", 0)
    if cached < block:
        raise NotProven(
            f"a block that had left the device did not come back ({cached} tokens did, "
            "HcRadixCache.init_load_back)"
        )
    if weighed:
        was, became = (one["output_token_logprobs"][0][0] for one in (before, after))
        tolerance = TOLERANCE.get(manager.model_config.dtype, ROUNDED)
        if math.isfinite(was) and not abs(was - became) <= tolerance:
            raise NotProven(
                "attention read something else than the block that was restored (the log "
                f"probability of a token was {was:.4f} and became {became:.4f})"
            )


# -- in the scheduler ----------------------------------------------------------------------------


def answer(tree: Any, method: str, body: dict[str, Any]) -> dict[str, Any]:
    """The reply to one control request, by every rank of every replica. tree: `HcRadixCache`; None
    where the tiers are off."""
    if tree is None:
        return {"stored": 0, "never_ran": []}
    namespace, planner = body["namespace"], tree.restorer.planner
    if method == PREFIX + "evict":
        planner.always += 1  # so that it is restored whatever it costs
        _leave_device(tree, namespace)
    elif method == PREFIX + "end":
        planner.always -= 1
        with tree.compute_stream.entered():
            tree.tiers.forget(Forgetting(namespace))
        _leave_device(tree, namespace)
    stored = tree.host_match.ready(Prefix(namespace, pack_tokens(body["tokens"]))).tokens
    return {"stored": stored, "never_ran": in_place.never_ran(in_place.Proof.SCHEDULER)}


def _leave_device(tree: Any, namespace: str) -> None:
    tree.forget_namespaces(lambda one: one == namespace, secrets.token_hex(16))
