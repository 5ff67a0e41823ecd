"""The geometry of a model, read from its Hugging Face config.json: state bytes and FLOPs per layer.

Nothing but the config is read: no weights, no tokenizer, no torch. Families name the same thing
differently (GPT-2 says n_layer where Llama says num_hidden_layers), so each quantity has a list of
names; what a family implies without writing it down (Falcon's single KV head, GPT-2's four-fold
FFN) is in the functions below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang_hc.errors import ConfigError
from sglang_hc.forms import StateShape, index_parts
from sglang_hc.policy.served import HIDDEN, RECOMPUTED
from sglang_hc.tools.model_config import architecture_of

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "kv_channels", "attention_head_size")
_FFN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")

_FOURFOLD_FFN = {"gpt2", "gpt_bigcode", "gptj", "bloom", "falcon", "codegen", "mpt", "gpt_neo"}
"""Families whose FFN is four times the hidden size when the config does not say."""

_PLAIN_FFN = _FOURFOLD_FFN | {"opt", "phi", "gpt_neox", "starcoder2", "nemotron"}
"""Families whose FFN has two matrices; all others have three (gate, up, down)."""

_TIED = {"gpt2", "opt", "bloom", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text"}
"""Families whose output is their embedding when the config does not say."""

_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
"""Families of which each n-th layer attends to everything when the config does not say."""

_ATTENTION = {
    "attention", "full_attention", "sliding_attention", "chunked_attention", "indexed_attention",
}  # fmt: skip
"""Layer types whose state is KV rows."""

_OTHER_STATE = ("mamba", "ssm_", "linear_num_", "linear_attn", "block_configs")
"""Beginnings of fields that only models with other or unequal layers have."""

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32"}


def element_bytes(dtype: str) -> int:
    """Of an element type by its name. Raises ConfigError."""
    if dtype not in _BYTES:
        raise ConfigError(f"element type {dtype} is none of {', '.join(_BYTES)}")
    return _BYTES[dtype]


@dataclass(frozen=True)
class ModelShape:
    """Geometry of one model.

    kv_parts: elements of each row that the KV pool keeps per token and layer, as in `StateShape`.
    index_parts: bytes of what it keeps beside them of a sparse-attention index.
    layer_params: weights of one layer that one token passes through; with mixture of experts those
    of the experts it is routed to, averaged over dense and sparse layers.
    stored_params: weights of one layer, all experts included, averaged likewise.
    embedding_params: weights outside the layers: of the embedding, and of the output where it has
    its own; 0 where the config does not say how many words there are.
    kv_projection_params: weights that turn a hidden state into its KV row.
    attention_flops_per_pair: FLOPs for one query token and one token it attends to; with sparse
    attention, and one token of its context, by the index.
    attention_flops_per_token: FLOPs for one query token, however long its context: with sparse
    attention to as many tokens as the index chooses, counted as if the context had them.
    window, windowed: a share `windowed` of the layers attends to the last `window` tokens only.
    vocab: words of the output; 0 where the config does not say.
    architecture: SGLang's class; empty where the config does not say.
    """

    model_type: str
    attention: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_parts: tuple[int, ...]
    layer_params: float
    stored_params: float
    embedding_params: int
    kv_projection_params: int
    attention_flops_per_pair: int
    dtype: str
    index_parts: tuple[int, ...] = ()
    attention_flops_per_token: int = 0
    window: int = 0
    windowed: float = 0.0
    vocab: int = 0
    architecture: str = ""

    @property
    def allows_hidden(self) -> bool:
        """Whether a server may keep layers as hidden states."""
        return not self.is_latent and (not self.architecture or self.architecture in HIDDEN)

    @property
    def allows_recompute(self) -> bool:
        """Whether a server may keep nothing of first layers."""
        return self.attention != "DSA" and (
            not self.architecture or self.architecture in RECOMPUTED
        )

    @property
    def is_latent(self) -> bool:
        """Whether K and V are kept as one latent row, smaller than a hidden state."""
        return self.attention in ("MLA", "DSA")

    @property
    def element_bytes(self) -> int:
        return element_bytes(self.dtype)

    def state_shape(self) -> StateShape:
        """Sizes in bytes of an unsharded model."""
        size = self.element_bytes
        parts = tuple(part * size for part in self.kv_parts)
        parts += self.index_parts
        return StateShape(self.num_layers, self.hidden_size * size, parts, self.dtype)

    def describe(self) -> str:
        """One line for people."""
        heads = f"{self.num_heads} heads"
        if not self.is_latent:
            heads += f", {self.num_kv_heads} KV heads of {self.head_dim}"
        return (
            f"{self.model_type}, {self.num_layers} layers, {self.attention}, "
            f"hidden {self.hidden_size}, {heads}, {self.dtype}"
        )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], dtype: str = "auto", where: str = "config.json"
    ) -> ModelShape:
        """Shape from a parsed config.json; multi-modal configs are read at their text_config.

        dtype: "auto" for what SGLang would serve in, or a 16- or 32-bit float type.
        Raises ConfigError naming the field that is missing or impossible, or the kind of
        model whose state is not made of per-layer KV rows.
        """
        shape = _Reader(config, where).shape(dtype)
        return replace(shape, architecture=architecture_of(config))


class _Reader:
    """Reads one config. Holds no state but the config and the name used in errors."""

    def __init__(self, config: object, where: str) -> None:
        self._where = where
        if not isinstance(config, Mapping):
            raise ConfigError(f"{where}: must be a JSON object")
        inner = config.get("text_config")
        self._outer: Mapping[str, Any] = config
        self._config: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
        self._type = str(self._config.get("model_type") or config.get("model_type") or "unknown")

    def shape(self, dtype: str) -> ModelShape:
        self._refuse_other_state()
        layers, hidden, heads = map(self._count, (_LAYERS, _HIDDEN, _HEADS))
        if self._config.get("kv_lora_rank") is not None:
            return self._latent(layers, hidden, heads, dtype)
        head_dim = self._optional(*_HEAD_DIM)
        if head_dim is None:
            if hidden % heads:
                raise self._bad(_HEADS[0], f"must divide hidden_size {hidden}", heads)
            head_dim = hidden // heads
        kv_heads = self._kv_heads(heads)
        kv_width = kv_heads * head_dim
        kv_projection = 2 * hidden * kv_width
        attention = 2 * hidden * heads * head_dim + kv_projection
        window, windowed = self._window(layers)
        return ModelShape(
            model_type=self._type,
            attention="MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA",
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            kv_parts=(kv_width, kv_width),
            layer_params=attention + self._ffn_params(layers, hidden),
            stored_params=attention + self._ffn_params(layers, hidden, stored=True),
            embedding_params=self._embedding_params(hidden),
            kv_projection_params=kv_projection,
            attention_flops_per_pair=4 * heads * head_dim,
            dtype=self._dtype(dtype),
            window=window,
            windowed=windowed,
            vocab=self._optional("vocab_size") or 0,
        )

    def _latent(self, layers: int, hidden: int, heads: int, dtype: str) -> ModelShape:
        """Multi-head latent attention (DeepSeek): one latent row and one shared RoPE key."""
        rank = self._count(("kv_lora_rank",))
        rope = self._count(("qk_rope_head_dim",))
        nope = self._count(("qk_nope_head_dim",))
        value = self._count(("v_head_dim",))
        query = heads * (nope + rope)
        q_rank = self._optional("q_lora_rank")
        q_params = hidden * query if q_rank is None else q_rank * (hidden + query)
        kv_projection = hidden * (rank + rope)
        attention = (
            q_params + kv_projection + rank * heads * (nope + value) + heads * value * hidden
        )
        dense = ModelShape(
            model_type=self._type,
            attention="MLA",
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=1,
            head_dim=nope + rope,
            kv_parts=(rank + rope,),
            layer_params=attention + self._ffn_params(layers, hidden),
            stored_params=attention + self._ffn_params(layers, hidden, stored=True),
            embedding_params=self._embedding_params(hidden),
            kv_projection_params=kv_projection,
            attention_flops_per_pair=2 * heads * (nope + rope + value),
            dtype=self._dtype(dtype),
            vocab=self._optional("vocab_size") or 0,
        )
        chosen = self._optional("index_topk")
        return dense if chosen is None else self._sparse(dense, chosen, q_rank)

    def _sparse(self, dense: ModelShape, chosen: int, q_rank: int | None) -> ModelShape:
        """Latent attention to the tokens that an index chooses (DeepSeek-V3.2, GLM-5). They are
        attended to in the latent space, without keys and values of each head."""
        if q_rank is None:
            raise self._missing(("q_lora_rank",))
        pool = self._optional("index_kpool")
        if pool not in (None, 1):
            raise self._bad("index_kpool", "must be 1, a key for each token", pool)
        heads, dim = self._count(("index_n_heads",)), self._count(("index_head_dim",))
        (row,) = dense.kv_parts
        latent = row + self._count(("kv_lora_rank",))
        index = q_rank * heads * dim + dense.hidden_size * (dim + heads)
        return replace(
            dense,
            attention="DSA",
            layer_params=dense.layer_params + index,
            attention_flops_per_pair=2 * heads * dim,
            attention_flops_per_token=2 * dense.num_heads * latent * chosen,
            index_parts=index_parts(dim),
        )

    def _refuse_other_state(self) -> None:
        kinds = self._config.get("layer_types") or self._config.get("layers_block_type") or ()
        strange = [str(kind) for kind in kinds if kind not in _ATTENTION]
        if not kinds:  # where layers are named, fields may be of kinds that none of them is
            strange = [name for name in self._config if name.startswith(_OTHER_STATE)]
        if strange:
            raise ConfigError(
                f"{self._where}: {strange[0]} means layers that are not plain attention with one "
                "KV row per token; only models whose layers are all attention can be planned"
            )
        if self._config.get("is_encoder_decoder"):
            raise ConfigError(
                f"{self._where}: encoder-decoder models are not served with a prefix cache; "
                "only decoder models can be planned"
            )

    def _kv_heads(self, heads: int) -> int:
        """KV heads, with the flags by which older families say it."""
        if self._type == "falcon" and not self._config.get("new_decoder_architecture"):
            # These configs carry num_kv_heads too, but the old architecture ignores it.
            return 1 if self._config.get("multi_query", True) else heads
        if self._type == "gpt_bigcode":
            return 1 if self._config.get("multi_query", True) else heads
        if self._type == "chatglm" and not self._config.get("multi_query_attention"):
            return heads
        nested = self._config.get("attn_config")
        given = self._optional(*_KV_HEADS)
        if given is None and isinstance(nested, Mapping):
            given = nested.get("kv_n_heads")
        kv_heads = heads if given is None else given
        if kv_heads > heads or heads % kv_heads:
            raise self._bad("num_key_value_heads", f"must divide {heads} attention heads", kv_heads)
        return kv_heads

    def _window(self, layers: int) -> tuple[int, float]:
        """Tokens of a sliding window, and the share of the layers that have it."""
        window = self._optional("sliding_window", "sliding_window_size") or 0
        if not window or self._config.get("use_sliding_window") is False:
            return 0, 0.0
        kinds = self._config.get("layer_types")
        if kinds:
            return window, list(kinds).count("sliding_attention") / len(kinds)
        first = self._optional("max_window_layers") if "use_sliding_window" in self._config else 0
        step = self._optional("sliding_window_pattern") or _PATTERN.get(self._type)
        whole = layers // step if step else min(layers, first or 0)
        return window, 1 - whole / layers

    def _embedding_params(self, hidden: int) -> int:
        tied = self._config.get("tie_word_embeddings", self._type in _TIED)
        return (1 if tied else 2) * (self._optional("vocab_size") or 0) * hidden

    def _ffn_params(self, layers: int, hidden: int, *, stored: bool = False) -> float:
        """Weights of the feed-forward part that one token uses, averaged over the layers; with
        `stored`, of all experts."""
        matrices = 2 if self._type in _PLAIN_FFN else 3
        experts = self._optional(*_EXPERTS)
        if not experts:
            return matrices * hidden * self._ffn_width(hidden)
        expert = self._optional("moe_intermediate_size") or self._ffn_width(hidden)
        shared = (self._optional("n_shared_experts", "num_shared_experts") or 0) * expert
        shared += self._optional("shared_expert_intermediate_size") or 0
        used = experts if stored else self._count(_EXPERTS_USED)
        sparse = matrices * hidden * (used * expert + shared)
        dense_layers = self._dense_layers(layers)
        if not dense_layers:
            return sparse
        dense = matrices * hidden * self._ffn_width(hidden)
        return (dense_layers * dense + (layers - dense_layers) * sparse) / layers

    def _dense_layers(self, layers: int) -> int:
        """How many layers of a mixture-of-experts model have a dense feed-forward part."""
        first = self._optional("first_k_dense_replace") or 0
        step = self._optional("decoder_sparse_step", "moe_layer_freq") or 1
        listed = set(self._config.get("mlp_only_layers") or ())
        offset = 0 if "moe_layer_freq" in self._config else 1
        return sum(
            layer < first or layer in listed or (layer + offset) % step != 0
            for layer in range(layers)
        )

    def _ffn_width(self, hidden: int) -> int:
        width = self._optional(*_FFN)
        if width is None and self._type in _FOURFOLD_FFN:
            return 4 * hidden
        if width is None:
            raise self._missing(_FFN)
        # The first Qwen writes the width of gate and up together.
        return width // 2 if self._type == "qwen" else width

    def _dtype(self, dtype: str) -> str:
        """Element type of weights and KV; "auto" as SGLang resolves it."""
        if dtype == "auto":
            stated = next(
                (
                    str(config[name])
                    for config in (self._config, self._outer)
                    for name in ("dtype", "torch_dtype")
                    if config.get(name)
                ),
                "float32",
            )
            name = _DTYPES.get(stated, stated)
            if name == "float32":
                name = "bfloat16" if self._type.startswith("gemma") else "float16"
        else:
            name = _DTYPES.get(dtype, dtype)
        if name not in _BYTES:
            raise self._bad("torch_dtype", f"must be one of {', '.join(_BYTES)}", name)
        return name

    def _count(self, names: tuple[str, ...]) -> int:
        value = self._optional(*names)
        if value is None:
            raise self._missing(names)
        if value == 0:
            raise self._bad(names[0], "must be positive", value)
        return value

    def _optional(self, *names: str) -> int | None:
        """The first of these fields that is there and not null, as a whole number >= 0."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self._bad(name, "must be a whole number", value)
            return value
        return None

    def _missing(self, names: tuple[str, ...]) -> ConfigError:
        others = f" (or {', '.join(names[1:])})" if names[1:] else ""
        return ConfigError(
            f"{self._where}: field {names[0]}{others} is missing; model_type {self._type!r}"
        )

    def _bad(self, name: str, rule: str, value: object) -> ConfigError:
        return ConfigError(f"{self._where}: field {name} {rule}, got {value!r}")
