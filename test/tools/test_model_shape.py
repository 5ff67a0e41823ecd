import math

import pytest

from sglang_hc.errors import ConfigError
from sglang_hc.forms import StateShape
from sglang_hc.tools.datasheet import (
    Rates,
    Stored,
    datasheet_costs,
    load_hardware,
    streamed_model,
)
from sglang_hc.tools.model_shape import ModelShape
from support.papers import DEEPSEEK_V3, DEEPSEEK_V32, LLAMA2_7B, LLAMA31_8B

MIXTRAL = LLAMA31_8B | dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
QWEN3_30B_A3B = dict(
    model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768,
    num_experts=128, num_experts_per_tok=8, decoder_sparse_step=1, mlp_only_layers=[],
    torch_dtype="bfloat16",
)  # fmt: skip
GPT2 = dict(model_type="gpt2", n_embd=768, n_layer=12, n_head=12)
FALCON_7B = dict(
    model_type="falcon", hidden_size=4544, num_hidden_layers=32, num_attention_heads=71,
    multi_query=True, num_kv_heads=71, new_decoder_architecture=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "attention", "state"),
    [
        (LLAMA2_7B, "MHA", StateShape(32, 8192, (8192, 8192), "float16")),
        (LLAMA31_8B, "GQA", StateShape(32, 8192, (2048, 2048), "float16")),
        (QWEN3_30B_A3B, "GQA", StateShape(48, 4096, (1024, 1024), "bfloat16")),
        (FALCON_7B, "MQA", StateShape(32, 9088, (128, 128), "float16")),
        (DEEPSEEK_V3, "MLA", StateShape(61, 14336, (1152,), "bfloat16")),
        (DEEPSEEK_V32, "DSA", StateShape(61, 14336, (1152, 128, 4), "bfloat16")),
        (GPT2, "MHA", StateShape(12, 1536, (1536, 1536), "float16")),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_state_of_each_kind_of_attention(config, attention, state):
    shape = ModelShape.from_config(config)
    assert shape.attention == attention
    assert shape.state_shape() == state


@pytest.mark.parametrize(
    ("config", "embedding", "billions"),
    [
        (LLAMA2_7B, 2 * 32000 * 4096, 6.74),
        (LLAMA31_8B, 2 * 128256 * 4096, 8.03),
        (MIXTRAL, 2 * 32000 * 4096, 12.88),
        (QWEN3_30B_A3B, 2 * 151936 * 2048, 3.34),
        (DEEPSEEK_V3, 2 * 129280 * 7168, 37.4),
        (GPT2, 50257 * 768 + 1024 * 768, 0.124),
        (FALCON_7B, 65024 * 4544, 6.92),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_layers_and_embeddings_add_up_to_the_published_active_parameters(
    config, embedding, billions
):
    shape = ModelShape.from_config(config)
    total = shape.num_layers * shape.layer_params + embedding
    assert total / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("config", "per_layer"),
    [
        # Plain and gated FFNs at hidden 64, 8 heads; counted on instances of the real classes.
        (dict(model_type="opt", hidden_size=64, num_hidden_layers=4, num_attention_heads=8,
              ffn_dim=160, word_embed_proj_dim=32), 36864),
        (dict(model_type="phi", hidden_size=64, num_hidden_layers=4, num_attention_heads=8,
              intermediate_size=160), 36864),
        (dict(model_type="phi3", hidden_size=64, num_hidden_layers=4, num_attention_heads=8,
              intermediate_size=160), 47104),
        (dict(model_type="gemma", hidden_size=64, num_hidden_layers=4, num_attention_heads=8,
              num_key_value_heads=1, head_dim=32, intermediate_size=160), 67584),
        (dict(model_type="falcon", hidden_size=64, num_hidden_layers=4, num_attention_heads=8,
              num_kv_heads=2, new_decoder_architecture=True), 43008),
        (dict(model_type="falcon", hidden_size=64, num_hidden_layers=4, num_attention_heads=8,
              multi_query=False), 49152),
        (dict(model_type="gpt_bigcode", n_embd=64, n_layer=4, n_head=8), 41984),
        (dict(model_type="mpt", d_model=64, n_layers=4, n_heads=8), 49152),
        (dict(model_type="qwen2_moe", hidden_size=64, num_hidden_layers=4, num_attention_heads=8,
              num_key_value_heads=2, intermediate_size=160, num_experts=4, num_experts_per_tok=2,
              moe_intermediate_size=32, shared_expert_intermediate_size=48,
              decoder_sparse_step=2), 36352),
        (dict(model_type="deepseek_v2", hidden_size=64, num_hidden_layers=4,
              num_attention_heads=8, intermediate_size=160, moe_intermediate_size=32,
              kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=16,
              v_head_dim=16, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=2,
              first_k_dense_replace=1), 57344),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)  # fmt: skip
def test_parameters_of_a_layer(config, per_layer):
    assert ModelShape.from_config(config).layer_params == per_layer


@pytest.mark.parametrize(
    ("config", "words", "matrices", "billions"),
    [
        (LLAMA2_7B, 32000, 2, 6.74),
        (MIXTRAL, 32000, 2, 46.7),
        (QWEN3_30B_A3B, 151936, 2, 30.5),
        (DEEPSEEK_V3, 129280, 2, 671),
        (FALCON_7B, 65024, 1, 6.92),
        (LLAMA31_8B | dict(tie_word_embeddings=True), 128256, 1, 7.50),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_stored_weights_add_up_to_the_published_parameters(config, words, matrices, billions):
    shape = ModelShape.from_config(config | {"vocab_size": words})
    assert shape.embedding_params == matrices * words * shape.hidden_size
    total = shape.num_layers * shape.stored_params + shape.embedding_params
    assert total / 1e9 == pytest.approx(billions, rel=0.01)
    assert ModelShape.from_config(config).embedding_params == 0


def test_paper_formulas_follow_for_multi_head_attention():
    """HCache section 3.2: projecting takes 4 D^2 FLOPs a token."""
    shape = ModelShape.from_config(LLAMA2_7B)
    assert 2 * shape.kv_projection_params == 4 * 4096**2
    assert shape.attention_flops_per_pair == 4 * 4096


def test_sparse_attention_costs_its_index_and_the_tokens_that_it_chooses():
    """In the latent space: a query and a row have 576 elements, a value the 512 of the latent."""
    dense, sparse = map(ModelShape.from_config, (DEEPSEEK_V3, DEEPSEEK_V32))
    index = 1536 * 64 * 128 + 7168 * (128 + 64)
    assert sparse.layer_params - dense.layer_params == index
    assert sparse.attention_flops_per_pair == 2 * 64 * 128
    assert sparse.attention_flops_per_token == 2 * 128 * (576 + 512) * 2048
    assert sparse.describe().startswith("deepseek_v32, 61 layers, DSA, hidden 7168, 128 heads, ")
    h200 = load_hardware("H200")
    long, short = (64, 131_072), (64, 1024)
    costs = [datasheet_costs(h200, shape, 50e9).prefill for shape in (dense, sparse)]
    assert costs[1].seconds(*long) < 0.4 * costs[0].seconds(*long)
    assert costs[1].seconds(*short) >= costs[0].seconds(*short)
    counted = 2 * sparse.layer_params + sparse.attention_flops_per_token
    assert costs[1].per_token == counted / h200.flops
    rates = Rates(h200.flops, h200.memory_bandwidth, 50e9, None)
    sized = ModelShape.from_config(DEEPSEEK_V32 | {"vocab_size": 129_280})
    streamed = streamed_model(rates, sized, 1e12, 141e9, Stored(kv=1.0))
    assert streamed.kv == 576 + 132 and streamed.kv_gen == math.inf
    assert streamed.per_new == counted / h200.flops


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_lora_rank": None}, "field q_lora_rank is missing"),
        ({"index_n_heads": None}, "field index_n_heads is missing"),
        ({"index_kpool": 4}, "index_kpool must be 1, a key for each token, got 4"),
    ],
)
def test_another_index_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_config(DEEPSEEK_V32 | change)


def test_language_part_of_a_multi_modal_config_counts():
    nested = {"model_type": "llava", "torch_dtype": "float16", "text_config": dict(LLAMA31_8B)}
    del nested["text_config"]["torch_dtype"]
    shape = ModelShape.from_config(nested)
    assert shape.model_type == "llama"
    assert shape.state_shape() == StateShape(32, 8192, (2048, 2048), "float16")


@pytest.mark.parametrize(
    ("stated", "model_type", "asked", "used"),
    [
        ("bfloat16", "llama", "auto", "bfloat16"),
        ("float32", "llama", "auto", "float16"),
        (None, "llama", "auto", "float16"),
        ("float32", "gemma", "auto", "bfloat16"),
        ("bfloat16", "llama", "half", "float16"),
        ("bfloat16", "llama", "float32", "float32"),
    ],
)
def test_element_type_is_what_the_server_would_use(stated, model_type, asked, used):
    config = LLAMA2_7B | {"torch_dtype": stated, "model_type": model_type}
    assert ModelShape.from_config(config, dtype=asked).dtype == used


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "field num_hidden_layers .* is missing"),
        ({"hidden_size": None}, "field hidden_size .* is missing"),
        ({"num_attention_heads": None}, "field num_attention_heads .* is missing"),
        ({"intermediate_size": None}, "field intermediate_size .* is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be positive, got 0"),
        ({"hidden_size": "4096"}, "hidden_size must be a whole number, got '4096'"),
        ({"hidden_size": -1}, "hidden_size must be a whole number, got -1"),
        ({"num_key_value_heads": 5}, "num_key_value_heads must divide 32"),
        ({"num_attention_heads": 3}, "num_attention_heads must divide hidden_size 4096"),
        ({"torch_dtype": "int8"}, "torch_dtype must be one of .*, got 'int8'"),
        ({"kv_lora_rank": 512}, "field qk_rope_head_dim is missing"),
        ({"num_local_experts": 8}, r"field num_experts_per_tok \(or .*\) is missing"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention means"),
        ({"mamba_d_state": 16}, "mamba_d_state means layers that are not plain attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        ModelShape.from_config(LLAMA2_7B | change, where="my/config.json")
    assert str(caught.value).startswith("my/config.json: ")


def test_a_config_that_is_no_object_is_refused():
    with pytest.raises(ConfigError, match="must be a JSON object"):
        ModelShape.from_config([1, 2])


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 1.0),
        ({"model_type": "mistral", "sliding_window": None}, 0.0),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, 0.0),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True,
          "max_window_layers": 9}, 0.25),
        ({"model_type": "gemma2", "sliding_window": 4096}, 0.5),
        ({"model_type": "gemma3_text", "sliding_window": 512}, 5 / 6),
        ({"model_type": "gpt_oss", "sliding_window": 128,
          "layer_types": ["sliding_attention"] * 8 + ["full_attention"] * 4}, 2 / 3),
    ],
)  # fmt: skip
def test_layers_with_a_sliding_window_are_counted(fields, windowed):
    sizes = {"num_hidden_layers": 12, "hidden_size": 64, "num_attention_heads": 4}
    shape = ModelShape.from_config({**sizes, "intermediate_size": 128, **fields})
    assert shape.windowed == pytest.approx(windowed)
    assert shape.window == (fields["sliding_window"] or 0 if windowed else 0)
