"""The digest of the weights: the same for the same, another for any change."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import sglang
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.server_args import ServerArgs
from transformers import LlamaConfig

from sglang_hc.srt.model.identity import SAMPLES, adapter_digest, model_identity, weights_digest
from sglang_hc.srt.ranks.start_group import StartGroup
from support.start_groups import on_ranks


def model(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 64), torch.nn.Linear(64, 5 * SAMPLES + 3, bias=False)]
    return torch.nn.Sequential(*layers).to(dtype)


def flip_one(m: torch.nn.Module) -> None:
    """The lowest bit of an element that is no sample."""
    m[1].weight.data.view(torch.int16).view(-1)[4321] ^= 1  # type: ignore[operator]


def swap_two(m: torch.nn.Module) -> None:
    rows = m[0].weight.data
    rows[[0, 1]] = rows[[1, 0]]


def reshape(m: torch.nn.Module) -> None:
    m[0].weight = torch.nn.Parameter(m[0].weight.data.reshape(96, 64))


def rename(m: torch.nn.Module) -> None:
    m[0].register_parameter("gain", m[0].bias)
    m[0].bias = None


def add_buffer(m: torch.nn.Module) -> None:
    m[0].register_buffer("scale", torch.ones(1))


@pytest.mark.parametrize("change", [flip_one, swap_two, reshape, rename, add_buffer])
def test_any_change_shows(change: Callable[[torch.nn.Module], None]) -> None:
    changed = model()
    change(changed)
    assert weights_digest(changed) != weights_digest(model())


def test_a_transposed_weight_is_read_in_its_own_order() -> None:
    changed = model()
    changed[0].weight = torch.nn.Parameter(changed[0].weight.data.t().contiguous().t())
    assert weights_digest(changed) == weights_digest(model())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_every_width_is_read(dtype: torch.dtype) -> None:
    changed = model(dtype)
    assert weights_digest(changed) == weights_digest(model(dtype))
    changed[0].bias.data.view(torch.uint8)[-1] ^= 1
    assert weights_digest(changed) != weights_digest(model(dtype))


def test_an_empty_parameter_is_no_trouble() -> None:
    empty = model()
    empty.register_parameter("nothing", torch.nn.Parameter(torch.empty(0)))
    assert weights_digest(empty) != weights_digest(model())


def runner(path: str = "/a/model", rope_theta: float = 1e4, **flags: str) -> SimpleNamespace:
    config = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": rope_theta})
    config._name_or_path = path
    return SimpleNamespace(
        server_args=ServerArgs(model_path=path, **{"attention_backend": "torch_native", **flags}),
        model_config=SimpleNamespace(hf_config=config),
        model=model(),
    )


def identity(one: SimpleNamespace) -> list[str]:
    """Of a model on one rank."""
    return model_identity(one, StartGroup(0, 1))


def test_a_model_is_the_same_wherever_it_lies() -> None:
    assert identity(runner("/a/model")) == identity(runner("/b/model"))


@pytest.mark.parametrize(
    "other", [{"rope_theta": 5e5}, {"kv_cache_dtype": "fp8_e5m2"}, {"attention_backend": "triton"}]
)
def test_another_use_of_the_same_weights_is_another_model(other: dict) -> None:
    assert identity(runner(**other)) != identity(runner())


def sparse_runner(**flags: str) -> SimpleNamespace:
    """A model that attends to what an index chooses."""
    one = runner(**flags)
    one.model_config.hf_config.architectures = ["DeepseekV32ForCausalLM"]
    one.model_config.hf_config.index_topk = 64
    return one


def test_what_chooses_the_tokens_of_sparse_attention_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And up to which length all are attended to. It is no matter to other models."""
    name = "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"
    flags = [{f"dsa_{what}_backend": "tilelang"} for what in ("prefill", "decode", "topk")]
    monkeypatch.setenv(name, "64")
    found = [identity(sparse_runner(**one)) for one in ({}, *flags)]
    plain = identity(runner())
    monkeypatch.setenv(name, "4096")
    found.append(identity(sparse_runner()))
    assert len(set(map(tuple, found))) == len(found)
    assert identity(runner()) == plain == identity(runner(**flags[0]))


def test_a_softmax_with_parts_left_out_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [identity(runner())]
    for phase in ("PREFILL", "DECODE"):
        monkeypatch.setenv(f"SGLANG_SKIP_SOFTMAX_{phase}_THRESHOLD_SCALE_FACTOR", "0.5")
        found.append(identity(runner()))
    assert len(set(map(tuple, found))) == len(found)


def test_state_of_another_sglang_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = identity(runner())
    monkeypatch.setattr(sglang, "__version__", "0.5.17")
    assert identity(runner()) != own


def scaled(k_scale: float | None) -> SimpleNamespace:
    """A model with an 8-bit KV cache whose scales were loaded from a file of one name."""
    one = runner(quantization_param_path="/scales.json")
    one.model.add_module("attention", RadixAttention(2, 16, 0.25, 2, 0))
    one.model.attention.k_scale_float = one.model.attention.v_scale_float = k_scale
    return one


def test_scales_of_the_cache_are_known_by_their_values() -> None:
    assert identity(scaled(0.5)) == identity(scaled(0.5))
    assert len({tuple(identity(scaled(scale))) for scale in (None, 0.5, 0.25)}) == 3


def adapter(seed: int = 0, scaling: float = 1.0, name: str = "q_proj") -> SimpleNamespace:
    """What `adapter_digest` reads of SGLang's LoRAAdapter."""
    weights = {name: torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))}
    layers = [SimpleNamespace(weights=weights), SimpleNamespace(weights={})]
    return SimpleNamespace(
        scaling=scaling, layers=layers, embedding_layers={}, added_tokens_embeddings={}
    )


def test_an_adapter_is_known_by_its_content() -> None:
    assert adapter_digest(adapter()) == adapter_digest(adapter())
    changed = adapter()
    changed.layers[0].weights["q_proj"].view(torch.int32)[3, 7] ^= 1
    moved = adapter()
    moved.layers.reverse()
    embedding = adapter()
    embedding.embedding_layers["q_proj"] = embedding.layers[0].weights.pop("q_proj")
    others = [changed, moved, embedding, adapter(1), adapter(scaling=2.0), adapter(name="k_proj")]
    assert len({adapter_digest(one) for one in [adapter(), *others]}) == 7


def test_all_ranks_have_one_identity_that_names_every_part_and_their_number() -> None:
    def of_ranks(*models: torch.nn.Module) -> list[str]:
        def one(group: StartGroup) -> list[str]:
            part = runner()
            part.model = models[group.rank]
            return model_identity(part, group)

        first, *others = on_ranks(len(models), one)
        assert all(other == first for other in others)
        return first

    changed = model()
    swap_two(changed)
    parts = [of_ranks(model(), model()), of_ranks(model(), changed), of_ranks(changed, model())]
    parts += [of_ranks(model(), model(), model(), model()), identity(runner())]
    assert len(set(map(tuple, parts))) == len(parts)
