"""SGLang's real scheduler in one process: model, tree, event loop; no HTTP, no tokenizer."""

from __future__ import annotations

import itertools
import os
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from benchmark import ROOT
from benchmark.harness.in_process import (
    import_engine,
    never_late,
    rendezvous,
    tokenizers_part,
    use_one_thread,
)

MODELS = ROOT / "models"

FREE_LOADING = ROOT / "benchmark" / "harness" / "free_loading.json"
"""Costs: loading costs nothing and prefill a second a token. What is stored is always restored."""


class Idle(BaseException):
    """Leaves SGLang's event loop; nothing in there catches it."""


@dataclass
class Reply:
    """One finished request.

    top: per token of the reply the log probabilities of the most likely tokens, by token id; empty
    unless they were asked for.
    """

    tokens: list[int]
    device: int
    host: int
    storage: int
    top: list[dict[int, float]]

    @property
    def cached(self) -> int:
        return self.device + self.host + self.storage


class Core:
    """An engine with the tiers, driven request by request through SGLang's own event loop.

    profile: costs the server decides by, by default those under which what is stored is always
    restored; None leaves it to the flags, or to measuring.
    """

    tp_rank = pp_rank = 0
    """Of several ranks; see `ranked_core.RankedCore`."""

    def __init__(
        self,
        *flags: str,
        model: str = "llama-mha",
        profile: str | None = str(FREE_LOADING),
        **env: str,
    ) -> None:
        use_one_thread()
        never_late()
        defaults = {
            "SGLANG_HC_ENABLE": "1",
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        }
        os.environ.update(defaults | env)
        import_engine()
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
        from sglang.srt.server_args import PortArgs, prepare_server_args

        argv = ["--model-path", str(MODELS / model), "--skip-server-warmup"]
        argv += flags
        if profile is not None:
            argv += ["--hc-profile", profile]
        self.args = prepare_server_args(argv)
        self.args.resolve_once()  # and the check: as SGLang's launcher does
        self.args.check_server_args()
        tp, pp = self.tp_rank, self.pp_rank
        world = spawn_world_rank(self.args, tp_rank=tp, pp_rank=pp)
        publish(self.args, role="scheduler", ranks=SpawnRanks(world, gpu_id=tp + pp))
        with rendezvous(self.args):
            self.scheduler = Scheduler(self.args, PortArgs.init_new(self.args))
        self.scheduler.idle_sleeper = None  # it would wait for a socket at every idle pass
        self._connect()
        self.scheduler._add_request_to_queue = self._note(self.scheduler._add_request_to_queue)
        self.inbox: list[Any] = []
        self.requests: dict[str, Any] = {}
        self.arrived: list[Any] = []
        self._names = itertools.count()
        self._quiet = 0
        self._steps: int | None = None
        self._each_pass: Callable[[int], None] | None = None
        self._before = 0
        self.passes = 0

    def _connect(self) -> None:
        """Have the scheduler receive what `submit` hands in."""
        self.scheduler.request_receiver = SimpleNamespace(recv_requests=self._begin_pass)

    @property
    def model_state(self) -> Any:
        """What the plugin found at load: `srt.model_state.ModelState`."""
        from sglang_hc.srt.model.model_state import MODEL_STATE

        return getattr(self.scheduler.tp_worker.model_runner, MODEL_STATE)

    @property
    def tree(self) -> Any:
        return self.scheduler.tree_cache

    def submit(
        self,
        tokens: Sequence[int],
        new: int,
        salt: str | None = None,
        logprobs_from: int | None = None,
        top: int = 0,
        lora: str | None = None,
        rid: str | None = None,
        **sampling: Any,
    ) -> str:
        """Hand in a request; it runs in the next `run`. Returns its id.

        A prompt that is too long is cut as the flags say; logprobs_from must lie behind the cut.

        logprobs_from: ask for the log probabilities of the prompt from this token on. top: so many
        most likely tokens are reported for each token of the reply. lora: id of an adapter. rid:
        the request's id, by default one of its own; see `named`.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = {"temperature": 0.0, "ignore_eos": True, **sampling, "max_new_tokens": new}
        limit = self.scheduler.max_req_input_len
        length, tokens = len(tokens), list(tokens)
        salt, sampling = tokenizers_part(self.args, limit, tokens, salt, sampling)
        if logprobs_from is not None:
            logprobs_from -= length - len(tokens)
        params = SamplingParams(**sampling)
        params.normalize(None)
        if rid is None:  # SGLang aborts all whose id begins with that of the abort
            rid = f"r{next(self._names)}."
        self.inbox.append(
            TokenizedGenerateReqInput(
                rid=rid,
                input_text="",
                input_ids=array("q", tokens),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=params,
                return_logprob=logprobs_from is not None or top > 0,
                logprob_start_len=-1 if logprobs_from is None else logprobs_from,
                top_logprobs_num=top,
                token_ids_logprob=None,
                stream=False,
                extra_key=salt,
                lora_id=lora,
            )
        )
        return rid

    def abort(self, rid: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self.inbox.append(AbortReq(rid=rid))

    def run(self, steps: int | None = None, each_pass: Callable[[int], None] | None = None) -> None:
        """Run the event loop until nothing is left to do, or for a number of its iterations.

        each_pass: is told the number of each pass at its top, 1 for the first, before the pass
        receives requests.
        """
        self._quiet = 0
        self._steps = steps
        self._each_pass, self._before = each_pass, self.passes
        try:
            self.scheduler.run_event_loop()
        except Idle:
            return

    def named(self, rid: str) -> list[Any]:
        """SGLang's requests of this id, in the order in which they came."""
        return [req for req in self.arrived if req.rid == rid]

    def reply(self, rid: str) -> Reply:
        """The reply to the last request of this id."""
        return self.reply_to(self.requests[rid])

    def reply_to(self, req: Any) -> Reply:
        assert req.finished(), f"{req.rid} is not finished"
        return Reply(
            list(req.output_ids_through_stop),
            req.cached_tokens_device,
            req.cached_tokens_host,
            req.cached_tokens_storage,
            _top(req) if req.return_logprob else [],
        )

    def ask(
        self, tokens: Sequence[int], new: int = 16, salt: str | None = None, top: int = 0
    ) -> Reply:
        """One request on its own, to its end."""
        rid = self.submit(tokens, new, salt, top=top)
        self.run()
        return self.reply(rid)

    def score(self, tokens: Sequence[int], start: int, salt: str | None = None) -> list[float]:
        """Natural-log probabilities of tokens[start + 1:], each given all tokens before it.

        What the caches have of tokens[:start] is used, as for any request.
        """
        return self.score_and_reply(tokens, start, salt)[0]

    def score_and_reply(
        self, tokens: Sequence[int], start: int, salt: str | None = None
    ) -> tuple[list[float], Reply]:
        """`score`, and the reply of one token, which says where the state came from."""
        rid = self.submit(tokens, 1, salt, logprobs_from=start)
        self.run()
        reply = self.reply(rid)
        values = self.requests[rid].logprob.input_token_logprobs_val
        assert len(values) == len(tokens) - start, "not every position has a log probability"
        return [float(value) for value in values[1:]], reply

    def evict(self) -> None:
        """Push everything idle off the device, by the tree's own eviction."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=self.scheduler.max_total_num_tokens))
        assert self.tree.evictable_size() == 0

    def forget(self) -> None:
        """Everything that is known leaves, except what lies below host memory."""
        self.settle()
        assert self.scheduler.flush_cache()

    def believe_profile(self) -> None:
        """What is seen from now on corrects no cost, and nothing that the costs refuse is tried:
        for decisions by stated costs."""
        from sglang_hc.policy.tries import Tries

        self.tree.tiers.restorer.planner.costs.observe = lambda *_: None
        setattr(Tries, "due", property(lambda _: False))  # noqa: B010  no other engine is here

    def flood(self, rng: random.Random, tokens: int, vocabulary: int = 900) -> None:
        """Push everything idle out of the device pool with unrelated requests."""
        size = self.scheduler.max_total_num_tokens
        done = 0
        while done < tokens:
            length = min(size // 2, tokens)
            self.ask([rng.randrange(3, vocabulary) for _ in range(length)], 1, salt="flood")
            done += length

    def push_out(self) -> None:
        """Save what there is, then have others write over every slot of the device pool."""
        self.tree.tiers.drain()
        self.flood(random.Random(1), 2 * self.scheduler.max_total_num_tokens)

    def settle(self) -> None:
        """Wait for what is being saved, then check every invariant."""
        tiers = getattr(self.tree, "tiers", None)  # SGLang's own tree has none
        if tiers is not None:
            tiers.drain()
            tiers.check_integrity()
        self.check_device()

    def check_device(self) -> None:
        """The device pool and the tree add up (SGLang's own invariants, trap 34 of its users)."""
        tree, allocator = self.tree, self.scheduler.token_to_kv_pool_allocator
        used, all_slots = tree.evictable_size() + tree.protected_size(), allocator.size
        if tree.supports_swa():  # two pools, of which the one of windows is smaller
            windows = tree.swa_evictable_size() + tree.swa_protected_size()
            assert allocator.swa_available_size() + windows == allocator.size_swa
            free, all_slots = allocator.full_available_size(), allocator.size_full
        else:
            free = allocator.available_size()
        assert free + used == all_slots == self.scheduler.max_total_num_tokens
        if tree.supports_mamba():
            states = tree.req_to_token_pool.mamba_allocator
            used = tree.mamba_evictable_size() + tree.mamba_protected_size()
            assert states.available_size() + used == states.size
        tree.sanity_check()
        slots = tree.all_values_flatten() if tree.total_size()[0] else []
        assert len(set(map(int, slots))) == len(slots), "a device slot has two owners"

    def kv(self, tokens: Sequence[int], salt: str | None = None) -> list[Any]:
        """Copies of the K and V rows the device tree holds for a prefix, per layer and part."""
        slots = self.slots(tokens, salt)
        pool = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        if hasattr(pool, "k_buffer"):
            return [
                b[i][slots].clone()
                for i in range(pool.layer_num)
                for b in (pool.k_buffer, pool.v_buffer)
            ]
        return [pool.kv_buffer[i][slots].clone() for i in range(pool.layer_num)]

    def slots(self, tokens: Sequence[int], salt: str | None = None) -> Any:
        """Device slots that the device tree has for a prefix."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        from sglang_hc.tree.namespaces import client_namespace

        key = RadixKey(array("q", tokens), client_namespace(None, salt))
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        return self.tree.path_device_indices(found.last_device_node)

    def _begin_pass(self, local_reqs: Sequence[Any] | None = None) -> list[Any]:
        """local_reqs: SGLang's own aborts, of requests that waited too long."""
        if self._each_pass is not None:
            self._each_pass(self.passes - self._before + 1)
        return [*(local_reqs or ()), *self.receive()]

    def receive(self) -> list[Any]:
        self.passes += 1
        inbox, self.inbox = self.inbox, []
        if self._steps is not None:
            if self._steps == 0:
                self.inbox = inbox
                raise Idle
            self._steps -= 1
            return inbox
        self._quiet = 0 if inbox or not self.scheduler.is_fully_idle() else self._quiet + 1
        if self._quiet > 2:
            raise Idle
        return inbox

    def _note(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add(req: Any, *args: Any, **kwargs: Any) -> Any:
            self.requests[req.rid] = req
            if req not in self.arrived:
                self.arrived.append(req)
            return original(req, *args, **kwargs)

        return add


def _top(req: Any) -> list[dict[int, float]]:
    found = req.logprob
    return [
        dict(zip(ids, values, strict=True))
        for ids, values in zip(
            found.output_top_logprobs_idx, found.output_top_logprobs_val, strict=True
        )
    ]
