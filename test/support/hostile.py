"""Values that a client may send and no server may fall over, each a change to a sound request."""

from __future__ import annotations

from typing import Any, NamedTuple

SURROGATE, NUL, BIG = "\ud800", "a\x00b", "s" * 20_000_000
HUGE = 1 << 70


def deep(levels: int) -> dict[str, Any]:
    """An object in an object in an object."""
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


class Hostile(NamedTuple):
    """field: of the request, or of its `sampling_params`."""

    name: str
    field: str
    value: Any
    sampling: bool = False


def _named(field: str) -> list[Hostile]:
    values = {
        "surrogate": SURROGATE, "NUL": NUL, "20 MB": BIG, "empty list": [], "list": ["a"],
        "number": 5, "object": {"a": 1},
    }  # fmt: skip
    return [Hostile(f"{field} {name}", field, value) for name, value in values.items()]


def _custom(name: str, value: Any) -> Hostile:
    return Hostile(f"custom_params {name}", "custom_params", value, sampling=True)


HOSTILE = [
    *_named("extra_key"),
    *_named("cache_salt"),
    *_named("rid"),
    *_named("session_id"),
    Hostile("session_params of an unknown session", "session_params", {"id": "nobody"}),
    Hostile("session_params surrogate", "session_params", {"id": SURROGATE}),
    Hostile("session_params number", "session_params", {"id": 5}),
    Hostile("session_params unknown field", "session_params", {"x": 1}),
    Hostile("session_params list", "session_params", []),
    _custom("list", []),
    _custom("text", "x"),
    _custom("deep", deep(400)),
    _custom("nested lists", {"a": [[[1]]]}),
    _custom("hc_cut text", {"hc_cut": "x"}),
    _custom("hc_cut forged", {"hc_cut": '{"head":64,"dropped":64,"cuts":[[0,"b"]],"left_out":""}'}),
    _custom(
        "hc_cut marked", {"hc_cut": "0" * 32 + '{"head":0,"dropped":1,"cuts":[],"left_out":""}'}
    ),
    _custom("hc_retain text", {"hc_retain": "x"}),
    _custom("hc_retain surrogate", {"hc_retain": {"session": SURROGATE, "ttl_s": 60}}),
    _custom("hc_retain for ever", {"hc_retain": {"ttl_s": 1e300}}),
    _custom("hc_retain texts", {"hc_retain": ["{", '{"ttl_s": "\\ud800"}']}),
    _custom("hc_pin text", {"hc_pin": "x"}),
    _custom("hc_pin surrogate", {"hc_pin": {"session": SURROGATE, "ttl_s": 60}}),
    _custom("hc_pin seconds", {"hc_pin": {"session": "s", "ttl_s": 1e300}}),
    _custom("hc_pin long", {"hc_pin": {"session": BIG, "ttl_s": 60}}),
    _custom("hc_overflow number", {"hc_overflow": -5}),
    _custom("hc_overflow head", {"hc_overflow": {"keep_first": HUGE}}),
    Hostile("sampling_params list", "sampling_params", []),
    Hostile("sampling_params text", "sampling_params", "x"),
    Hostile("max_new_tokens text", "max_new_tokens", "x", sampling=True),
    Hostile("max_new_tokens below zero", "max_new_tokens", -1, sampling=True),
    Hostile("n huge", "n", 10**9, sampling=True),
    Hostile("logit_bias infinite in float32", "logit_bias", {"5": 1e39}, sampling=True),
    Hostile("stop_regex broken", "stop_regex", "((", sampling=True),
    Hostile("is_normalized", "is_normalized", True, sampling=True),
    Hostile("input_ids beyond the vocabulary", "input_ids", [1, 2, 10**9]),
    Hostile("input_ids below zero", "input_ids", [1, -2]),
    Hostile("input_ids 70 bits", "input_ids", [1, HUGE]),
    Hostile("input_ids floats", "input_ids", [1, 2.5]),
    Hostile("input_ids nested", "input_ids", [[[1]]]),
    Hostile("input_ids mixed", "input_ids", [1, [2]]),
    Hostile("input_ids text", "input_ids", ["a"]),
    Hostile("input_ids empty", "input_ids", []),
    Hostile("priority huge", "priority", HUGE),
    Hostile("priority text", "priority", "x"),
    Hostile("lora_path unknown", "lora_path", "nobody"),
    Hostile("lora_path object", "lora_path", {}),
    Hostile("lora_id", "lora_id", "x"),
    Hostile("mm_hashes", "mm_hashes", ["ff"]),
    Hostile("input_embeds", "input_embeds", [[0.5, 0.5]]),
    Hostile("positional_embed_overrides", "positional_embed_overrides", {"a": 1}),
    Hostile("http_worker_ipc", "http_worker_ipc", "ipc:///tmp/x"),
    Hostile("token_ids_logprob", "token_ids_logprob", [HUGE]),
    Hostile("token_indices_to_pool", "token_indices_to_pool", [10**9]),
    Hostile("multi_item_delimiter_indices", "multi_item_delimiter_indices", [10**9]),
    Hostile("beam_width", "beam_width", 4, sampling=True),
    Hostile("beam_width text", "beam_width", "x", sampling=True),
    Hostile("watermark text", "watermark", "x"),
    Hostile("watermark number", "watermark", 5, sampling=True),
    Hostile("kv_hints object", "kv_hints", {"a": 1}),
    Hostile(
        "kv_hints for ever",
        "kv_hints",
        {
            "protocol_version": "0.1",
            "message_id": "m",
            "actions": [
                {
                    "action_id": "a",
                    "action_type": "kv.retain",
                    "action_version": "1.0",
                    "payload": {
                        "directives": [{"priority": HUGE, "end": -HUGE, "duration": 1e300}]
                    },
                }
            ],
        },
    ),
    Hostile("nvext text", "nvext", SURROGATE),
    Hostile("nvext huge", "nvext", {"cache_control": {"type": "ephemeral", "ttl": HUGE}}),
    Hostile("nvext hints", "nvext", {"agent_hints": {"total_requests": HUGE, "iat": HUGE}}),
    Hostile("cache_control deep", "cache_control", deep(400)),
    Hostile("prompt_cache_retention object", "prompt_cache_retention", {"a": 1}),
    Hostile("sampling_logprobs_mode", "sampling_logprobs_mode", "x"),
    Hostile("top_logprobs_num", "top_logprobs_num", 10**9),
    Hostile("logprob_start_len", "logprob_start_len", -7),
]
"""More than 60, for every field that a client may set and something of ours, or of SGLang's
scheduler, reads."""
