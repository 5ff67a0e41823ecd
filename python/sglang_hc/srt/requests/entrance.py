"""What a client sends is checked where it enters, and again as data where it is used.

Every entrance but one ends in `TokenizerManager.generate_request`: /generate, the OpenAI and Ollama
routes, native gRPC, `sgl.Engine`, and the tokenizer workers (`worker.py`). The one that does not is
refused at start (`server_args.SWITCHES`). SGLang decodes a request in the scheduler process, where
a field of a wrong type ends the server; so each is decoded once before it is sent.

The scheduler believes none of this: what reaches it is looked at again (`admit`), whichever way it
came, and is answered with status 400, or loses the field concerned.
"""

from __future__ import annotations

import copy
import logging
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import (
    SessionParams,
    TokenizedGenerateReqInput,
    dec_hook,
    enc_hook,
    ext_hook,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hc.errors import convert
from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments, fields
from sglang_hc.srt.engine.guard import counters, tree_of
from sglang_hc.srt.requests.agents import take_fields
from sglang_hc.srt.requests.namespaces import ClientKey, take_names
from sglang_hc.srt.requests.overflow import accept_cut
from sglang_hc.tree.namespaces import MAX_KEY_BYTES, Namespace

logger = logging.getLogger(__name__)

MOST_NAME_BYTES = MAX_KEY_BYTES
"""UTF-8 bytes of a name that a client chooses: as many as of a key or a salt."""

MOST_NAMESPACE_BYTES = 8 * MOST_NAME_BYTES
"""UTF-8 bytes of a namespace in the scheduler: salt, key, adapter and cut, and how they are packed.
"""

MOST_SAMPLES = 1024
"""Replies to one prompt (`n`): a request is copied so often before anything else is checked."""

MOST_BIAS = 1e30
"""Of `logit_bias`: beyond it a probability would be no number, which ends the scheduler."""

NAMES = (
    *("rid", "extra_key", "cache_salt", "lora_path"),
    *("session_id", "routing_key", "conversation_id"),
)
"""Fields that hold a name, or, in a batch, a list of names."""

PLACES = ("multi_item_delimiter_indices", "token_indices_to_pool")
"""Fields that say where in a prompt its scores are read."""

OWN_FIELDS = {
    "mm_hashes": "an image is known by what is in it",
    "lora_id": "name the adapter in lora_path",
    "http_worker_ipc": "it says which process is asking",
    "encoder_urls": "it is set between processes",
    "num_items_assigned": "it is set between processes",
    **dict.fromkeys(PLACES, "its places are looked up unchecked, and not in a cached prefix"),
}
"""Fields of SGLang's that a client may not set while the tiers are on, and why."""

OWN_KEYS = {
    *("hash", "pad_value", "pad_values", "identity", "padded_input_ids"),
    *("mrope_positions", "mrope_position_delta"),
}
"""What of an image, a video or a sound that a client has processed itself SGLang would believe."""

_BULK = {
    "input_ids": array("q"), "input_embeds": None, "mm_inputs": None, "token_type_ids": None,
    "positional_embed_overrides": None, "time_stats": None,
}  # fmt: skip
"""Fields of a tokenized request that SGLang made itself or has checked, with small values."""

_FOUND = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"}
"""Fields of SGLang's SamplingParams that it computes."""

_Sampling = msgspec.defstruct(
    "_Sampling",
    [
        (known.name, known.type | None, None)
        for known in msgspec.structs.fields(SamplingParams)
        if known.name not in _FOUND
    ],
    forbid_unknown_fields=True,
)
"""What a client's sampling_params may have: SGLang builds its own from them unchecked."""

_encode = msgspec.msgpack.Encoder(enc_hook=enc_hook).encode


# -- in the tokenizer's process ------------------------------------------------------------------


def check_request(
    original: Callable[..., AsyncIterator[Any]], self: Any, obj: Any, request: Any = None
) -> AsyncIterator[Any]:
    """AROUND TokenizerManager.generate_request: the fields of a request as the client sent them.
    ValueError, raised where the reply is awaited, becomes HTTP status 400."""
    if config_of(arguments.of(self)) is not None:
        try:
            take_names(obj, request)
            check_fields(obj)
            take_fields(obj, request)
        except ValueError as error:
            return _refused(error)
    return original(self, obj, request)


def check_fields(obj: Any) -> None:
    """Raises ValueError for a value that no entrance takes. obj: SGLang's request, before SGLang
    has normalized it."""
    several = _is_batch(obj)
    for name in NAMES:
        _check_names(name, getattr(obj, name, None), several)
    for name, why in OWN_FIELDS.items():
        if getattr(obj, name, None) is not None:
            raise ValueError(
                f"{name} is not taken from requests by this server: {why}; leave it out"
            )
    for name in ("image_data", "video_data", "audio_data"):
        _check_processed(name, getattr(obj, name, None))
    if not isinstance(getattr(obj, "priority", None), int | None):
        raise ValueError("priority must be a whole number")
    moved = getattr(obj, "positional_embed_overrides", None)
    for one in moved if isinstance(moved, list) else [moved]:
        if not isinstance(one, PositionalEmbeds | None):
            raise ValueError("positional_embed_overrides is not taken as JSON; leave it out")
    session = getattr(obj, "session_params", None)
    if session is not None:
        if not isinstance(session, dict) or not set(session) <= set(
            SessionParams.__struct_fields__
        ):
            fields = ", ".join(SessionParams.__struct_fields__)
            raise ValueError(f"session_params must be an object with some of the fields {fields}")
        _check_names("session_params.id", session.get("id"), False)
        _check_names("session_params.rid", session.get("rid"), False)
    sampling = getattr(obj, "sampling_params", None)
    for one in sampling if several and isinstance(sampling, list) else [sampling]:
        _check_sampling(one)


def check_tokenized(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND TokenizerManager._create_tokenized_object: the request can be decoded where it is
    sent. ValueError becomes HTTP status 400."""
    if config_of(arguments.of(self)) is None:
        return original(self, *args, **kwargs)
    try:
        made = original(self, *args, **kwargs)
        if isinstance(key := fields.sent_namespace(made), ClientKey):
            fields.set_namespace(made, str(key))  # SGLang's wire knows plain strings
        small = copy.copy(made)
        for name, value in _BULK.items():
            if hasattr(small, name):
                setattr(small, name, value)
        msgspec.msgpack.decode(
            _encode(small), type=type(small), dec_hook=dec_hook, ext_hook=ext_hook
        )
        wrong = request_wrong(small, self.model_config.vocab_size, self.model_config.hidden_size)
        if wrong is not None:
            raise ValueError(wrong)
    except UnicodeError:
        raise ValueError("the request has text that is no Unicode (a lone surrogate)") from None
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"the request has a value that cannot be: {str(error)[:200]}") from error
    return made


def _is_batch(obj: Any) -> bool:
    """As SGLang tells one prompt from several."""
    text, ids = getattr(obj, "text", None), getattr(obj, "input_ids", None)
    if text is not None:
        return not isinstance(text, str)
    return isinstance(ids, list) and len(ids) > 0 and isinstance(ids[0], list)


def _check_names(field: str, value: object, several: bool) -> None:
    names = value if several and isinstance(value, list) else [value]
    if several and isinstance(value, list) and not value:
        raise ValueError(f"{field} is an empty list; leave it out")
    for name in names:
        if isinstance(name, ClientKey):  # packed by the entrance: its parts are the client's
            packed = Namespace.of(name)
            wrong = name_wrong(packed.salt) or name_wrong(packed.key)
        else:
            wrong = name_wrong(name)
        if wrong is not None:
            raise ValueError(f"{field} {wrong}")


def name_wrong(name: object, most: int = MOST_NAME_BYTES) -> str | None:
    """What is wrong with a name that a client chose; None for nothing. None is no name."""
    if name is None:
        return None
    if not isinstance(name, str):
        return "must be a string" + (", for one prompt" if isinstance(name, list) else "")
    if len(name) > most:
        return f"has more than {most} bytes of UTF-8"
    try:
        size = len(name.encode())
    except UnicodeError:
        return "is no Unicode (a lone surrogate)"
    return f"has more than {most} bytes of UTF-8" if size > most else None


def _check_processed(field: str, value: object) -> None:
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, list):
            _check_processed(field, one)
        elif isinstance(one, dict) and (found := OWN_KEYS & one.keys()):
            raise ValueError(
                f"{field}: {min(found)} is not taken from requests by this server: an image is "
                "known by what is in it; leave it out"
            )


def _check_sampling(sampling: object) -> None:
    if sampling is None:
        return
    if not isinstance(sampling, dict):
        raise ValueError("sampling_params must be an object")
    try:
        known = convert(sampling, _Sampling, "sampling_params")
    except RecursionError:
        raise ValueError("sampling_params is nested too deeply") from None
    if known.n is not None and not 1 <= known.n <= MOST_SAMPLES:
        raise ValueError(f"sampling_params.n must be a number from 1 to {MOST_SAMPLES}")
    for bias in (known.logit_bias or {}).values():
        if not abs(bias) <= MOST_BIAS:
            raise ValueError(f"sampling_params.logit_bias must be of numbers up to {MOST_BIAS:g}")


async def _refused(error: ValueError) -> AsyncIterator[Any]:
    """A reply that never comes."""
    raise error
    yield


# -- in the scheduler's process ------------------------------------------------------------------


def admit(original: Callable[..., None], self: Any, recv_req: Any, **more: Any) -> None:
    """AROUND Scheduler.handle_generate_request: whatever came is looked at as data. Status 400 for
    what SGLang or the tiers could not use; a cut that is not the tokenizer's is taken out."""
    if tree_of(self) is None:
        return original(self, recv_req, **more)
    wrong = request_wrong(recv_req, self.model_config.vocab_size, self.model_config.hidden_size)
    if wrong is None:
        if not accept_cut(recv_req.sampling_params):
            counters["ignored_fields"] += 1
        return original(self, recv_req, **more)
    counters["refused_requests"] += 1
    if name_wrong(recv_req.rid) is not None or recv_req.rid is None:
        logger.warning("sglang-hc: a request without a usable rid is dropped: %s", wrong)
        return None
    req = fields.refused(self, recv_req, wrong)
    self.init_req_max_new_tokens(req)
    return self._add_request_to_queue(req)


def request_wrong(recv_req: Any, vocabulary: int, width: int) -> str | None:
    """Why a tokenized request cannot be served; None if it can. width: of an embedding."""
    for name in ("rid", "extra_key", "cache_salt", "lora_id", "session_id"):
        most = MOST_NAMESPACE_BYTES if name == "extra_key" else MOST_NAME_BYTES
        wrong = name_wrong(getattr(recv_req, name, None), most)
        if wrong is not None:
            return f"{name} {wrong}"
    if not isinstance(recv_req, TokenizedGenerateReqInput):
        return None
    for name in PLACES:
        if getattr(recv_req, name) is not None:
            return f"{name} is not taken"
    if not isinstance(recv_req.session_params, SessionParams | None):
        return "session_params is no object"
    sampling = recv_req.sampling_params
    if not isinstance(sampling, SamplingParams) or not sampling.is_normalized:
        return "sampling_params is no object"
    if not isinstance(sampling.custom_params, dict | None):
        return "custom_params is no object"
    for bias in (sampling.logit_bias or {}).values():
        if not abs(bias) <= MOST_BIAS:
            return f"logit_bias has a number beyond {MOST_BIAS:g}"
    priority = recv_req.priority
    if priority is not None and (not isinstance(priority, int) or abs(priority) >= 1 << 63):
        return "priority is no number of 64 bits"
    if not _whole_from(recv_req.top_logprobs_num, 0) or recv_req.top_logprobs_num > vocabulary:
        return f"top_logprobs_num is no number from 0 to {vocabulary}"
    if not _whole_from(recv_req.logprob_start_len, -1):
        return "logprob_start_len is no number from -1 on"
    for token in recv_req.token_ids_logprob or ():
        if not _whole_from(token, 0) or token >= vocabulary:
            return f"token_ids_logprob has an id outside 0 to {vocabulary - 1}"
    if recv_req.input_embeds is not None:
        return _embeds_wrong(recv_req.input_embeds, width)
    return _tokens_wrong(recv_req.input_ids, vocabulary, recv_req.mm_inputs is not None)


def _whole_from(value: object, least: int) -> bool:
    return isinstance(value, int) and value >= least


def _embeds_wrong(embeds: object, width: int) -> str | None:
    wrong = f"input_embeds is no list of rows of {width} numbers"
    try:
        rows = np.asarray(embeds, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        return wrong
    good = rows.ndim == 2 and len(rows) and rows.shape[1] == width and np.isfinite(rows).all()
    return None if good else wrong


def _tokens_wrong(ids: object, vocabulary: int, pictures: bool) -> str | None:
    """pictures: some ids stand for them and are in no vocabulary."""
    if pictures:
        return None
    if not isinstance(ids, array) or ids.typecode != "q":
        return "input_ids is no list of token ids"
    if not len(ids):
        return None
    numbers = np.frombuffer(ids, dtype=np.int64)
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or high >= vocabulary:
        return f"input_ids has an id outside 0 to {vocabulary - 1}"
    return None
