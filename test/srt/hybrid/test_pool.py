"""Ways past the places are closed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_hc.config import ConfigError
from sglang_hc.forms import StateShape
from sglang_hc.hybrid.units import PLACES
from sglang_hc.policy.streaming import Streaming
from sglang_hc.srt.hybrid import build
from sglang_hc.srt.hybrid.attention import StreamedAttention
from sglang_hc.srt.hybrid.pool import PlacePool, SlotsOnly
from sglang_hc.srt.model.streamed import STREAMED, Streamed


def pool_of(kind: type[Any], size: int = 5) -> Any:
    return kind(
        size, page_size=1, dtype=torch.float32, head_num=2, head_dim=4, layer_num=3, device="cpu",
        enable_memory_saver=False, start_layer=0, end_layer=2,
    )  # fmt: skip


def test_a_model_without_a_plain_pool_is_refused() -> None:
    streamed = Streamed(Streaming(5, 0, 0, 5), StateShape(3, 32, (32, 32), "float32"), None)
    model = SimpleNamespace(**{STREAMED: streamed})
    plain = {"is_hybrid_swa": False, "use_mla_backend": False, "mambaish_config": None}
    none = SimpleNamespace(model=SimpleNamespace())
    assert build.available_bytes(lambda *_: 7, none, 0) == 7
    assert build.available_bytes(lambda *_: 7, SimpleNamespace(model=model, **plain), 0) > 1 << 40
    for name in plain:
        wrong = SimpleNamespace(model=model, **plain | {name: True})
        with pytest.raises(ConfigError, match="not in a plain KV pool"):
            build.available_bytes(lambda *_: 7, wrong, 0)
    with pytest.raises(ConfigError, match="not in a plain KV pool"):
        build.build_allocator(lambda *_: None, wrong, token_to_kv_pool=pool_of(PlacePool))


def test_all_of_the_free_memory_may_be_taken() -> None:
    build.check_room(5, 5, 1)


def test_a_rotation_does_not_write_k_and_v_itself() -> None:
    def asked(_: Any) -> bool:
        return True

    ours = object.__new__(StreamedAttention)
    with forward_context(ForwardContext(attn_backend=ours)):
        assert build.fuses_write(asked, None) is False
    with forward_context(ForwardContext(attn_backend=object())):  # type: ignore[arg-type]
        assert build.fuses_write(asked, None) is True


def test_slots_alone_are_neither_read_nor_written() -> None:
    pool = pool_of(SlotsOnly)
    for call in (
        lambda: pool.get_key_buffer(0),
        lambda: pool.get_value_buffer(0),
        lambda: pool.get_kv_buffer(0),
        lambda: pool.set_kv_buffer(None, None, None, None),
    ):
        with pytest.raises(RuntimeError):
            call()


def test_every_layer_reads_and_writes_the_place_that_is_set() -> None:
    pool = pool_of(PlacePool)
    slots = torch.tensor([2, 4])
    for place in range(PLACES):
        pool.place = place
        k, v = (torch.full((2, 2, 4), 10.0 * place + n) for n in (1, 2))
        pool.set_kv_buffer(None, slots, k, v, layer_id_override=2)
        assert torch.equal(pool.get_key_buffer(2)[slots], k)
        assert torch.equal(pool.get_value_buffer(0)[slots], v)
    first, second = (pool.rows(place)[0].view(torch.float32)[2, 0] for place in range(PLACES))
    assert (float(first), float(second)) == (1.0, 11.0)
