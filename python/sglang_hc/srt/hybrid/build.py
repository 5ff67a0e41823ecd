"""`--hc-throughput`: in place of SGLang's KV pool, allocator and attention come those whose state
lies in host memory."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor.forward_context import get_attn_backend

from sglang_hc.config import GIB, ConfigError
from sglang_hc.device.copy_stream import copy_stream_for
from sglang_hc.hybrid.mirror import Mirror
from sglang_hc.hybrid.units import PLACES, Place, Units
from sglang_hc.memory import available_memory
from sglang_hc.restore.cost_observer import timer_for
from sglang_hc.srt.engine.streams import model_streams
from sglang_hc.srt.hybrid.allocator import TwoKindsAllocator
from sglang_hc.srt.hybrid.attention import StreamedAttention
from sglang_hc.srt.hybrid.inputs import ProjectionInputs
from sglang_hc.srt.hybrid.pool import PlacePool, SlotsOnly
from sglang_hc.srt.model.streamed import Streamed, streamed_of

logger = logging.getLogger(__name__)

ANY_NUMBER = 1 << 60
"""Bytes of a KV pool that has any number of slots."""

NOT_PLAIN = (
    "--hc-throughput: this model keeps more than K and V of each token, or not in a plain KV pool "
    "(latent attention, sliding windows with a pool of their own, recurrent layers, types of 4 "
    "bits or in blocks); leave the flag out"
)

LESS = "give --hc-throughput a smaller host-gb, or a smaller --max-total-tokens"


def available_bytes(original: Callable[..., int], self: Any, pre_model_load_memory: int) -> int:
    """AROUND KVCacheConfigurator._profile_available_bytes: the device does not bound the slots;
    what was settled at load does, as the number of tokens that a user gives. Raises ConfigError for
    a model whose state is not in a plain pool."""
    if streamed_of(self.model) is None:
        return original(self, pre_model_load_memory)
    if self.is_hybrid_swa or self.use_mla_backend or self.mambaish_config is not None:
        raise ConfigError(NOT_PLAIN)
    return ANY_NUMBER


def build_pool(
    original: Callable[..., Any], self: Any, *, max_total_num_tokens: int, **kwargs: Any
) -> Any:
    """AROUND KVCacheConfigurator._build_mha_kv_pool: slots without memory, and the places. Raises
    ConfigError for K and V whose scales are beside them: what crosses are the rows alone."""
    streamed = streamed_of(self.model)
    if streamed is None:
        return original(self, max_total_num_tokens=max_total_num_tokens, **kwargs)
    if kwargs.get("quant_method") is not None or self.kv_cache_dtype_str == "mxfp8":
        raise ConfigError(NOT_PLAIN)
    assert max_total_num_tokens == streamed.streaming.tokens
    slots = original(
        self, max_total_num_tokens=max_total_num_tokens, **kwargs | {"mha_pool_class": SlotsOnly}
    )
    rows = streamed.streaming.rows
    slots.places = original(
        self, max_total_num_tokens=rows, **kwargs | {"mha_pool_class": PlacePool}
    )
    return slots


def build_allocator(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    """AROUND KVCacheConfigurator._build_token_to_kv_pool_allocator. Raises ConfigError."""
    streamed = streamed_of(self.model)
    if streamed is None:
        return original(self, **kwargs)
    pool = kwargs["token_to_kv_pool"]
    if not isinstance(pool, SlotsOnly):
        raise ConfigError(NOT_PLAIN)
    return TwoKindsAllocator(streamed.streaming, pool.dtype, self.device, pool)


def build_attention(original: Callable[..., Any], *, model_runner: Any) -> Any:
    """AROUND build_attention_backends: ours, around as many of SGLang's as a pass has rounds."""
    streamed = streamed_of(model_runner.model)
    if streamed is None:
        return original(model_runner=model_runner)
    built: list[Any] = []

    def child(rows: torch.Tensor) -> Any:
        built.append(original(model_runner=_InPlaces(model_runner, rows)))
        return built[-1].attn_backend

    ours = _attention(model_runner, streamed, child)
    for name in ("prefill_attention_backend_str", "decode_attention_backend_str"):
        setattr(ours, name, getattr(built[0], name))
    return msgspec.structs.replace(built[0], attn_backend=ours)


def fuses_write(original: Callable[..., bool], forward_batch: Any) -> bool:
    """AROUND models.utils.enable_fused_set_kv_buffer: a rotation that writes K and V would write
    them past the places."""
    if isinstance(get_attn_backend(), StreamedAttention):
        return False
    return original(forward_batch)


class _InPlaces:
    """A model runner as an attention back end sees it that works in the places. rows: of each
    request's tokens, in the place of SGLang's table of slots."""

    def __init__(self, runner: Any, rows: torch.Tensor) -> None:
        self._runner = runner
        self.req_to_token_pool = copy.copy(runner.req_to_token_pool)
        self.req_to_token_pool.req_to_token = rows
        self.token_to_kv_pool = runner.token_to_kv_pool.places
        self.kv_index_translator = KVIndexTranslator(
            req_to_token=rows,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            token_to_kv_pool=self.token_to_kv_pool,
            page_size=1,
            device=runner.device,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def check_room(wanted: int, free: int, tokens: int) -> None:
    """Before the first page of host memory is taken. Raises ConfigError: later the system would
    end a process, and not always this one."""
    if wanted > free:
        raise ConfigError(
            f"--hc-throughput: {tokens} tokens take {wanted / GIB:.3g} GiB of host memory, and "
            f"{free / GIB:.3g} are free; {LESS}"
        )


def _attention(
    runner: Any, streamed: Streamed, child: Callable[[torch.Tensor], Any]
) -> StreamedAttention:
    """With host memory for all slots. Raises ConfigError when there is not so much."""
    streaming, pool = streamed.streaming, runner.token_to_kv_pool
    device, dtype = torch.device(runner.device), runner.dtype
    inward = copy_stream_for(device, model_streams(runner))
    parts = [part.shape[1] for part in pool.places.rows(0)]
    width, inputs = 0, None
    if streamed.layers is not None:
        width = streamed.layers[0].qkv.weight.shape[1]
        inputs = ProjectionInputs(streamed.layers)
    row_bytes = width * dtype.itemsize
    try:
        mirror = Mirror(streaming, pool.layer_num, row_bytes, parts)
        check_room(mirror.bytes, available_memory(), streaming.tokens)
        inward.pin(mirror.memory)
    except OSError as error:
        raise ConfigError(
            f"--hc-throughput: host memory for {streaming.tokens} tokens: {error}; {LESS}"
        ) from None
    except ConfigError as error:
        raise ConfigError(str(error).replace("lower --hc-host-size-gb", LESS)) from None
    logger.info("sglang-hc: --hc-throughput: %.2f GiB of host memory", mirror.bytes / GIB)
    rows = min(streaming.rows, streaming.act_tokens)
    hidden = [torch.empty((rows, width), dtype=dtype, device=device) for _ in range(PLACES)]
    kept = torch.empty(
        (pool.layer_num, streaming.device_act, row_bytes), dtype=torch.uint8, device=device
    )
    places = [
        Place(states.view(torch.uint8), pool.places.rows(index))
        for index, states in enumerate(hidden)
    ]
    units = Units(mirror, kept, places, inward, timer_for(inward))
    return StreamedAttention(runner, streamed, pool.places, units, hidden, inputs, child)
