"""SGLang's requests: the only place that knows where their fields are and what they are called.

Functions and no view of our own, because some are asked for each request of each pass. `req`:
SGLang's `Req`, in the scheduler's process.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams

OTHER_INPUTS = (
    "input_embeds",
    "positional_embed_overrides",
    "multimodal_inputs",
    "token_type_ids",
    "multi_item_delimiter_indices",
)
"""What K and V of a request depend on beside its tokens, adapter and weights."""


# -- what it is ----------------------------------------------------------------------------------


def name_of(req: Any) -> str:
    """What its client calls it (`rid`). Several requests may have one name."""
    return req.rid


def handle_of(req: Any) -> Any:
    """By which SGLang tells the tree of it; `is` tells two requests of one name apart."""
    return req.cache_request_handle


def namespace_of(one: Any) -> str | None:
    """Whose state it is; None for everybody's. one: a request, or a `RadixKey` of the tree. SGLang
    has a salt beside it, which is packed into it here (`set_namespace`)."""
    return one.extra_key


def sent_namespace(sent: Any) -> Any:
    """As `namespace_of` while a request is on its way to the scheduler, unchecked; None for a kind
    that has none."""
    return getattr(sent, "extra_key", None)


def salt_of(one: Any) -> Any:
    """The salt of a request, here or, unchecked, on its way, that is not in its namespace yet."""
    return getattr(one, "cache_salt", None)


def name_client(sent: Any, salt: object, key: object) -> None:
    """Whose a request on its way is, as its client wrote it."""
    sent.cache_salt, sent.extra_key = salt, key


def set_namespace(one: Any, name: str | None) -> None:
    """Of a request, here or on its way. name: its salt and all."""
    one.extra_key, one.cache_salt = name, None


def body_of(request: Any) -> Any:
    """The JSON of an HTTP request, as FastAPI has parsed it for its route; None without one."""
    return getattr(request, "_json", None)


def hints_of(sent: Any) -> Any:
    """A request's `kv_hints` on its way, unchecked; a list in a batch."""
    return sent.kv_hints


def session_of(req: Any) -> str | None:
    """What its client calls its conversation."""
    return req.session_id


def adapter_of(req: Any) -> str | None:
    """SGLang's id of the LoRA that it runs with."""
    return req.lora_id


def sampling_of(req: Any) -> Any:
    """Its `SamplingParams`."""
    return req.sampling_params


def generates(req: Any) -> bool:
    """Whether it asks for tokens, and not for an embedding."""
    return req.sampling_params.max_new_tokens > 0


def stays_out_of_tree(req: Any) -> bool:
    """Whether SGLang keeps nothing of it, as with embeddings in the place of tokens."""
    return req.skip_radix_cache_insert


def keep_out_of_tree(req: Any) -> None:
    """Have SGLang keep nothing of it from now on; what its tree has already stays."""
    req.skip_radix_cache_insert = True


def has_other_inputs(req: Any) -> bool:
    """Whether any of OTHER_INPUTS is there. SGLang takes them from a request that is over."""
    return any(getattr(req, name, None) is not None for name in OTHER_INPUTS)


def prompt_of(req: Any) -> array[int]:
    """int64 ids that a prefill has to cover: the prompt, and behind a retraction what was replied.
    SGLang's own list: not to be changed."""
    return req.full_untruncated_fill_ids


def chunk_end_ids(req: Any) -> array[int]:
    """int64 ids of `prompt_of` up to the end of the chunk that was computed last."""
    return req.get_fill_ids()


def first_ids(req: Any, count: int) -> array[int]:
    """The first `count` int64 ids of prompt and reply."""
    return (req.origin_input_ids + req.output_ids)[:count]


def refused(scheduler: Any, sent: Any, why: str) -> Req:
    """A request in place of `sent`, which the scheduler answers with status 400."""
    sampling = SamplingParams(max_new_tokens=1)
    sampling.normalize(None)
    req = Req(
        sent.rid,
        "",
        array("q", [0]),
        sampling,
        vocab_size=scheduler.model_config.vocab_size,
        http_worker_ipc=sent.http_worker_ipc,
    )
    req.tokenizer = scheduler.tokenizer
    req.set_finish_with_abort(why)
    return req


# -- how far it is -------------------------------------------------------------------------------


def is_over(req: Any) -> bool:
    """Whether its reply is whole, or it was aborted."""
    return req.finished()


def is_ending(req: Any) -> bool:
    """Whether it is over, or will be aborted as soon as SGLang comes to it."""
    return is_over(req) or req.to_finish is not None


def has_answer(req: Any) -> bool:
    """Whether it has a token of its reply."""
    return len(req.output_ids) > 0


def end_of_reply(req: Any, tokens: int) -> str:
    """The text of the last tokens of its reply; empty where the server has no tokenizer."""
    if req.tokenizer is None:
        return ""
    text: str = req.tokenizer.decode(list(req.output_ids[-tokens:]))
    return text


def told_tokens(req: Any) -> int:
    """Tokens of its prompt and its reply until now."""
    return len(req.origin_input_ids) + len(req.output_ids)


def is_last_part(req: Any) -> bool:
    """Whether the part of its reply that is being sent is the last one."""
    return bool(req.finished_output)


def is_served(req: Any) -> bool:
    """Whether it is neither over nor retracted."""
    return not (req.finished() or req.is_retracted)


def was_retracted(req: Any) -> bool:
    """Whether it ever gave its slots up; what is cached of it was counted before then."""
    return req.retracted_stain


def middle_chunks_under_way(req: Any) -> int:
    """Chunks of its prompt, none of them the last, whose pass is not over."""
    return req.inflight_middle_chunks


def row_of(req: Any) -> int | None:
    """Its row in SGLang's table of device slots; None while it waits and when it is over."""
    return req.kv.req_pool_idx


def is_record_of(record: Any, req: Any) -> bool:
    """Whether SGLang's record of a row and its slots is that of a request."""
    return record is req.kv


def row_of_record(record: Any) -> int:
    """As `row_of`, of a record."""
    return record.req_pool_idx


def committed_tokens(req: Any) -> int:
    """Tokens from the first one on whose K and V stay in its slots."""
    return req.kv.kv_committed_len


def computed_prompt_tokens(req: Any) -> int:
    """Tokens of its prompt that were not cached when it was first admitted."""
    return len(req.origin_input_ids) - req.cached_tokens


def prompt_tokens(req: Any) -> int:
    """Tokens of its prompt, as its client is told."""
    return len(req.origin_input_ids)


def cached_by_source(req: Any) -> tuple[int, int, int]:
    """Tokens of its prompt that were cached when it was first admitted: (on the device, in host
    memory, below)."""
    return req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage


def is_probe(req: Any) -> bool:
    """Whether SGLang asks whether the server lives; no client is told of its tokens."""
    return str(req.rid).startswith(HEALTH_CHECK_RID_PREFIX)


def tokens_from_tiers(req: Any) -> tuple[int, int]:
    """Tokens of its prompt that came (from host memory, from below)."""
    return req.cached_tokens_host, req.cached_tokens_storage


def freed_windows(req: Any) -> int:
    """Tokens from the first one on whose rows in the pool of sliding windows it has given back, as
    far as they were its own (`tokens_in_tree`)."""
    return req.kv.get_evicted_seqlen(ComponentType.SWA)


def settled_tokens(req: Any) -> int:
    """Tokens that it will have computed wherever it ends from now on."""
    told = len(req.origin_input_ids) + len(req.output_ids) - 1
    return min(told, req.kv.kv_committed_len)


def decode_steps(req: Any) -> int:
    """Passes since its prompt was computed."""
    return req.decode_batch_idx


def owned_tokens(req: Any) -> int:
    """Tokens from the first one on whose slots it gives back, or leaves to the tree, when it is
    over."""
    return req.owned_kv_len()


# -- its trace -----------------------------------------------------------------------------------


def is_traced(req: Any) -> bool:
    """Whether a span of OpenTelemetry is open for it here (`--enable-trace`)."""
    return bool(req.time_stats.trace_ctx.tracing_enable)


def add_to_trace(req: Any, attributes: dict[str, str | int | float]) -> None:
    """Attributes of the span that covers it in this process; nothing once that is over."""
    req.time_stats.trace_ctx.trace_set_thread_attrs(attributes)


# -- its prefix ----------------------------------------------------------------------------------


def longest_prefix(req: Any) -> int:
    """Tokens of `prompt_of` that may be cached; of the others at least one is computed."""
    return req._compute_max_prefix_len(len(prompt_of(req)))


def prefix_length(req: Any) -> int:
    """Tokens before those that it computes next."""
    return req.prefix_len


def prefix_slots(tree: Any, req: Any) -> torch.Tensor:
    """(prefix_length,) int64 device slots of these tokens: those of its row, or before it has one
    those of its match. tree: SGLang's."""
    if not req.kv.holds_kv:
        return tree.prefix_device_indices(req)
    row = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    return row[: req.prefix_len].to(torch.int64)


def tokens_in_tree(req: Any) -> int:
    """Tokens of its prefix whose slots belong to the device tree."""
    return req.kv.cache_protected_len


def priority_of(req: Any) -> int:
    """What its client gave it, with which it keeps its nodes of the device tree; 0 without."""
    return req.priority or 0


def prefix_node(req: Any) -> Any:
    """The node of the device tree at the end of these; the request holds a lock on it."""
    return req.last_node


def host_hit(req: Any) -> int:
    """Tokens behind its prefix that the last match promised from below the device."""
    return req.host_hit_length


def set_host_hit(req: Any, tokens: int, from_below: bool = False) -> None:
    """Promise so many, or say how many it got. from_below: all of them from below host memory."""
    req.host_hit_length = tokens
    if not tokens:
        req.swa_host_hit_length = 0
    if from_below:
        req.storage_hit_length = tokens


def go_on_behind(tree: Any, req: Any, slots: torch.Tensor, node: Any) -> None:
    """Between two chunks: the prefix goes on with `slots`, (n,) int64, the last of which `node` of
    the device tree has. The next chunk reads its prefix from the request's row, so they are written
    there. They count as served by the store."""
    before, req.lock = req.lock, tree.lock(node)
    tree.unlock(before)
    start, req.prefix_len = req.prefix_len, req.prefix_len + len(slots)
    tree.req_to_token_pool.write((req.kv.req_pool_idx, slice(start, req.prefix_len)), slots)
    req.last_node = node
    req.kv.cache_protected_len = req.prefix_len
    req.kv.kv_allocated_len = req.kv.kv_committed_len = req.prefix_len
    if not req.retracted_stain:
        req.cached_tokens_storage += len(slots)


# -- its state of recurrent layers ---------------------------------------------------------------


def has_state(req: Any) -> bool:
    """Whether it has a slot for the state that it goes on with."""
    return req.kv.holds_mamba


def go_on_with_state(req: Any, own: torch.Tensor | None, source: torch.Tensor) -> None:
    """In its next pass it takes a copy of the state in the slot `source`. own: a slot for that,
    which it does not have yet; None where it has one. (1,) int64 each."""
    if own is not None:
        req.kv.mamba_pool_idx = own[0]
    req.kv.mamba_cow_src_index = source
    req.kv.mamba_needs_clear = False


def branch_of(req: Any) -> int | None:
    """Tokens behind which it leaves a state in its prefill, because others go on otherwise there;
    None where nobody is known to."""
    return req.mamba_branching_seqlen


def tracked_state(tree: Any, req: Any) -> tuple[int, torch.Tensor] | None:
    """The last place at which it left a state since the tree took one, in tokens, and that state's
    slot, (1,) int64; None for none."""
    kv, pool = req.kv, tree.req_to_token_pool
    if not kv.mamba_last_track_seqlen or kv.mamba_ping_pong_track_buffer is None:
        return None
    slot = kv.mamba_ping_pong_track_buffer[pool.get_mamba_ping_pong_keep_idx(req)]
    return kv.mamba_last_track_seqlen, slot.unsqueeze(0)
