"""A server that starts proves that the tiers serve: by what happened, not by what is in place.

Behind SGLang's own warm-up the launcher asks for a prompt of random tokens in a namespace of its
own, has the device forget it, and asks again. Then a block must have come back, the reply must be
as likely as it was, and every hook that takes part in a request must have run. What is missing ends
the start with one sentence. With --skip-server-warmup nobody asks, and the scheduler looks for the
hooks when its first request is answered (`in_place.prove`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

import sglang
from sglang.srt.managers.io_struct import DumperControlReqInput, GenerateReqInput
from sglang.srt.utils.common import kill_process_tree

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.engine import in_place
from sglang_hc.tree.forgetting import Forgetting
from sglang_hc.tree.identity import Prefix, pack_tokens
from sglang_hc.tree.namespaces import client_namespace

logger = logging.getLogger(__name__)

PREFIX = "hc_self_test/"
"""Of the method names of our control requests: stored, evict, end."""

TOLERANCE = 0.25
"""Of a log probability: chosen so that what 16 bit round away passes, and other state in the place
of a whole block does not."""

STORED_S = 30.0
"""A block that was computed is in host memory after milliseconds."""


class NotProven(Exception):
    """What the start did not show, for users."""


# -- in the launcher -----------------------------------------------------------------------------


def wait_and_warmup(original: Callable[..., None], server_args: Any, **kwargs: Any) -> None:
    """AROUND http_server._wait_and_warmup, which runs in a thread: behind the warm-up and before
    the server says that it is ready."""
    if config_of(server_args) is None or arguments.skips_warmup(server_args):
        original(server_args, **kwargs)
        return
    then = kwargs.pop("post_warmup_callback", None)

    def proved() -> None:
        from sglang.srt.entrypoints.http_server import get_global_state

        manager = get_global_state().tokenizer_manager
        try:
            if manager.event_loop is not None:  # else another tokenizer worker had the warm-up
                asyncio.run_coroutine_threadsafe(prove(manager), manager.event_loop).result()
        except NotProven as error:
            logger.error(
                "sglang-hc: the tiers do not serve on SGLang %s: %s. Use the release that this "
                "version of sglang-hc is made for, or start with --hc-disable",
                sglang.__version__,
                error,
            )
            kill_process_tree(os.getpid())
        if then is not None:
            then()

    original(server_args, post_warmup_callback=proved, **kwargs)


async def prove(manager: Any) -> None:
    """Raises NotProven. manager: SGLang's `TokenizerManager`, in its event loop."""
    if not all("hc" in state for state in await manager.get_internal_state()):
        raise NotProven("a scheduler does not say that it has tiers (Scheduler.get_internal_state)")
    args = arguments.of(manager)
    count = max(BLOCK_TOKENS, arguments.page_size(args)) + 1
    fits = manager.is_generation and count + 1 < manager.context_len
    if not fits or arguments.stages(args) > 1:  # what one stage evicts, all have to in that pass
        logger.info("sglang-hc: not tested whether a block comes back: with --pp-size, or no room")
        return
    for replica in range(arguments.replicas(args)):
        await _prove_replica(manager, replica, count, arguments.draft_algorithm(args) is None)
    never = in_place.never_ran(in_place.Proof.TOKENIZER)
    if never:
        raise NotProven(f"never called in the tokenizer: {', '.join(never)}")


async def _prove_replica(manager: Any, replica: int, count: int, weighed: bool) -> None:
    """weighed: the log probability of a reply is asked for; not with speculative decoding."""
    vocabulary = manager.model_config.vocab_size  # special tokens are at its ends
    tokens = random.choices(range(vocabulary // 4, vocabulary // 2), k=count)
    key = f"self-test-{secrets.token_hex(16)}"
    body = {"namespace": client_namespace(None, key), "tokens": tokens}

    async def ask() -> Any:
        request = GenerateReqInput(
            input_ids=tokens,
            sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            return_logprob=weighed,
            extra_key=key,
            routed_dp_rank=replica,
        )
        return (await anext(manager.generate_request(request, None)))["meta_info"]

    async def control(method: str) -> list[Any]:
        asked = DumperControlReqInput(method=PREFIX + method, body=body)
        return [one for reply in await manager.dumper_control(asked) for one in reply.response]

    first = await ask()
    never = sorted({name for reply in await control("stored") for name in reply["never_ran"]})
    if never:
        raise NotProven(f"never called in the scheduler: {', '.join(never)}")
    deadline = time.monotonic() + STORED_S
    while not any(reply["stored"] >= count - 1 for reply in await control("stored")):
        if time.monotonic() > deadline:
            raise NotProven("what a request computed is in no tier (HcRadixCache.checkpoint)")
        await asyncio.sleep(0.01)
    await control("evict")
    try:
        again = await ask()
    finally:
        await control("end")
    cached = (again.get("cached_tokens_details") or {}).get("host", 0)
    if cached != count - 1:
        raise NotProven(
            f"a block that had left the device did not come back ({cached} of {count - 1} tokens, "
            "HcRadixCache.init_load_back)"
        )
    if weighed:
        before, after = (one["output_token_logprobs"][0][0] for one in (first, again))
        if not abs(before - after) <= TOLERANCE:
            raise NotProven(
                "attention read something else than the block that was restored (the log "
                f"probability of a token was {before:.4f} and became {after:.4f})"
            )


# -- in the scheduler ----------------------------------------------------------------------------


def answer(tree: Any, method: str, body: dict[str, Any]) -> dict[str, Any]:
    """The reply to one control request, by every rank of every replica. tree: `HcRadixCache`."""
    prompt, planner = Prefix(body["namespace"], pack_tokens(body["tokens"])), tree.restorer.planner
    if method == PREFIX + "evict":
        planner.always += 1  # so that it is restored whatever it costs
        tree.forget_namespaces(prompt.namespace.__eq__, secrets.token_hex(16))
    elif method == PREFIX + "end":
        planner.always -= 1
        tree.forget(Forgetting(prompt.namespace, b""), lambda answer: None)
    return {
        "stored": tree.host_match.ready(prompt).tokens,
        "never_ran": in_place.never_ran(in_place.Proof.SCHEDULER),
    }
