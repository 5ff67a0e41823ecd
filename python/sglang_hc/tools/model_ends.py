"""What the tiers keep of models whose layers do not all have full attention, by their config.json.

Layers with full attention are kept as KV, token for token; the others at ends alone
(`forms.EndLayout`), as a sliding window or as a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_hc.errors import ConfigError
from sglang_hc.forms import BLOCK_TOKENS, EndLayout, StateLayers, WindowLayers
from sglang_hc.tools.model_shape import ModelShape

_WINDOWED = {
    "gpt_oss", "gemma4_text", "llama4_text", "mimo_v2", "mimo_v2_flash", "step3p5", "laguna",
    "mellum", "granite_swa", "spark2_5",
}  # fmt: skip
"""Model types whose sliding windows have a pool of their own in SGLang."""

_DELTA_RULE = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Model types with gated delta rules."""

_MAMBA = {"nemotron_h", "granitemoehybrid"}
"""Model types with Mamba2."""

_RECURRENT = _DELTA_RULE | _MAMBA | {"kimi_linear"}

_COMPUTED = {"gpt_oss", "gemma4_text", "kimi_linear"} | _DELTA_RULE
"""Model types whose layers are all attention, or what is in its place, and a feed-forward part."""

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}

_CONVOLUTION_DTYPE, _STATE_DTYPE = "bfloat16", "float32"
"""Of a convolution and of the recurrence, as SGLang keeps them unless told otherwise."""

_LAYERS_OF_NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}

_NOTHING_KEPT = {"mlp", "moe"}
"""Layers without attention and without a state."""


@dataclass(frozen=True)
class KeptShape:
    """What is kept of a model, unsharded, in bytes.

    num_layers: of the model. full_layers: those with full attention that have K and V of their own.
    row_bytes: of a token in each of them; hidden_bytes: of a hidden state, 0 where the config does
    not say. plain_bytes: of a token, if all layers that have K and V, or a state in their place,
    kept them of every token.
    """

    model_type: str
    dtype: str
    num_layers: int
    full_layers: int
    row_bytes: int
    hidden_bytes: int
    plain_bytes: int
    ends: EndLayout

    @property
    def token_bytes(self) -> int:
        """Of each token, in the slots of blocks."""
        return self.full_layers * self.row_bytes

    @property
    def end_bytes(self) -> int:
        """Of an end that shares no part with another one."""
        return self.ends.blocks * self.ends.slot_bytes

    def path_bytes(self, tokens: int, ends: int) -> int:
        """Of so many tokens with so many ends."""
        return tokens * self.token_bytes + ends * self.end_bytes

    def share(self, tokens: int, ends: int) -> float:
        """The same, against K and V of every token in every layer."""
        return self.path_bytes(tokens, ends) / (tokens * self.plain_bytes)

    def describe(self) -> str:
        """One line for people."""
        if self.ends.has_state:
            others = f"{len(self.ends.state.layers)} recurrent"
        else:
            window = self.ends.window
            others = f"{len(window.layers)} with a window of {window.tokens} tokens"
        return (
            f"{self.model_type}, {self.num_layers} layers, {self.full_layers} with full attention, "
            f"{others}, {self.dtype}"
        )


def kept_shape(config: Mapping[str, Any], where: str = "config.json") -> KeptShape | None:
    """From a parsed config.json; None for a model that needs no ends: Granite 4 may have no
    recurrent layers. Raises ConfigError that names the field that is missing."""
    own = _text(config)
    kind = str(own.get("model_type", ""))
    if kind not in _WINDOWED | _RECURRENT:
        return None
    return _Reader(own, config, where).shape(kind)


def computed_shape(config: Mapping[str, Any], where: str = "config.json") -> ModelShape | None:
    """What computing a token takes, of a model with a `kept_shape`, with the K and V of a layer
    with full attention; None for a model that is not _COMPUTED. A recurrent layer counts as one
    that attends to 64 tokens, which it takes at once. Raises ConfigError that names the field that
    is missing."""
    kept = kept_shape(config, where)
    if kept is None or kept.model_type not in _COMPUTED:
        return None
    own = dict(_text(config))
    if kept.ends.has_state:
        others = ("layer_types", "linear_attn_config", "full_attention_interval")
        names = [name for name in own if name in others or name.startswith(("linear_", "mamba_"))]
        share = len(kept.ends.state.layers) / kept.num_layers
        shape = ModelShape.from_config({n: own[n] for n in own.keys() - names}, where=where)
        shape = replace(shape, window=BLOCK_TOKENS, windowed=share)
    else:
        shape = ModelShape.from_config(config, where=where)
    part = kept.row_bytes // shape.element_bytes // len(shape.kv_parts)
    return replace(shape, kv_parts=len(shape.kv_parts) * (part,))


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


class _Reader:
    def __init__(self, config: Mapping[str, Any], outer: Mapping[str, Any], where: str) -> None:
        self._config = config
        self._where = where
        stated = (part.get(name) for part in (config, outer) for name in ("dtype", "torch_dtype"))
        self._dtype = str(next((name for name in stated if name), "bfloat16"))
        if self._dtype not in _BYTES:
            raise ConfigError(f"{where}: dtype must be one of {', '.join(_BYTES)}")
        self._size = _BYTES[self._dtype]

    def shape(self, kind: str) -> KeptShape | None:
        layers = self._count("num_hidden_layers")
        types = self._types(layers)
        shared = int(self._config.get("num_kv_shared_layers") or 0)
        own = range(layers - shared)  # the last ones read the K and V of earlier layers
        full = [n for n in own if types[n] in ("full_attention", "attention")]
        rest = [n for n in own if n not in full and types[n] not in _NOTHING_KEPT]
        if not rest:
            return None
        row = self._row(kind)
        if kind in _RECURRENT:
            ends = EndLayout(state=self._states(kind, rest))
            plain = (len(full) + len(rest)) * row
        else:
            ends = EndLayout(window=self._windows(rest))
            plain = len(full) * row + len(rest) * sum(ends.window.parts)
        hidden = self._other("hidden_size", 0) * self._size
        return KeptShape(kind, self._dtype, layers, len(full), row, hidden, plain, ends)

    def _types(self, layers: int) -> Sequence[str]:
        names = ("layer_types", "layers_block_type")
        types = next((self._config[name] for name in names if self._config.get(name)), None)
        if types is None and "hybrid_override_pattern" in self._config:
            kinds = str(self._config["hybrid_override_pattern"])
            types = [_LAYERS_OF_NEMOTRON.get(one, one) for one in kinds]
        if types is None and "linear_attn_config" in self._config:
            full = self._inner("linear_attn_config").get("full_attn_layers") or ()
            types = [
                "full_attention" if n + 1 in full else "linear_attention" for n in range(layers)
            ]
        if types is None and "full_attention_interval" in self._config:
            step = self._count("full_attention_interval")
            every = ["linear_attention"] * (step - 1) + ["full_attention"]
            types = [every[n % step] for n in range(layers)]
        if types is None and "attention_chunk_size" in self._config:  # Llama 4
            types = ["full_attention" if n % 4 == 3 else "chunked_attention" for n in range(layers)]
        if types is None and isinstance(pattern := self._config.get("hybrid_layer_pattern"), list):
            types = ["sliding_attention" if one else "full_attention" for one in pattern]
        if not isinstance(types, Sequence) or len(types) != layers:
            raise ConfigError(f"{self._where}: field layer_types must name {layers} layers")
        return [str(one) for one in types]

    def _row(self, kind: str) -> int:
        """Bytes of a token in a layer with full attention."""
        if self._config.get("kv_lora_rank"):  # one latent, and a key with positions
            return (self._count("kv_lora_rank") + self._count("qk_rope_head_dim")) * self._size
        heads, size = self._heads(), self._width()
        if kind == "gemma4_text":
            size = int(self._config.get("global_head_dim") or size)
            heads = int(self._config.get("num_global_key_value_heads") or heads)
        return heads * (size + self._other("v_head_dim", size)) * self._size

    def _windows(self, layers: Sequence[int]) -> WindowLayers:
        """MiMo-V2 and Step 3.5 may have other heads in them."""
        heads = self._other("swa_num_key_value_heads", self._heads())
        other = self._config.get("attention_other_setting")
        if isinstance(other, Mapping):
            heads = int(other.get("num_attention_groups") or heads)
        key = self._other("swa_head_dim", self._width())
        value = self._other("swa_v_head_dim", self._other("v_head_dim", key))
        chunked = "attention_chunk_size" in self._config
        tokens = self._count("attention_chunk_size" if chunked else "sliding_window")
        parts = heads * key * self._size, heads * value * self._size
        return WindowLayers(tuple(layers), tokens, parts)

    def _heads(self) -> int:
        grouped = "num_attention_groups" in self._config
        return self._count("num_attention_groups" if grouped else "num_key_value_heads")

    def _width(self) -> int:
        if self._config.get("head_dim") is None and "hidden_size" in self._config:
            return self._count("hidden_size") // self._count("num_attention_heads")
        return self._count("head_dim")

    def _other(self, name: str, usual: int) -> int:
        return usual if self._config.get(name) is None else self._count(name)

    def _states(self, kind: str, layers: Sequence[int]) -> StateLayers:
        """Of recurrent layers: the last inputs of a convolution over what goes into the recurrence,
        and a matrix for each of its heads."""
        read = self._mamba if kind in _MAMBA else self._delta_rule
        width, kernel, state = self._kimi() if kind == "kimi_linear" else read()
        dtypes = _CONVOLUTION_DTYPE, str(self._config.get("mamba_ssm_dtype") or _STATE_DTYPE)
        parts = width * (kernel - 1), state
        sizes = tuple(count * _BYTES[dtype] for count, dtype in zip(parts, dtypes, strict=True))
        return StateLayers(tuple(layers), sizes, dtypes)

    def _delta_rule(self) -> tuple[int, int, int]:
        """Inputs of the convolution, its taps, and elements of the recurrence. Heads of keys are
        shared by those of values."""
        keys, values = self._count("linear_num_key_heads"), self._count("linear_num_value_heads")
        key, value = self._count("linear_key_head_dim"), self._count("linear_value_head_dim")
        width = 2 * keys * key + values * value
        return width, self._count("linear_conv_kernel_dim"), values * key * value

    def _kimi(self) -> tuple[int, int, int]:
        """The same of Kimi's delta rule, whose heads are all alike."""
        inner = self._inner("linear_attn_config")
        heads, size, kernel = (
            self._positive(f"linear_attn_config.{name}", inner.get(name))
            for name in ("num_heads", "head_dim", "short_conv_kernel_size")
        )
        return 3 * heads * size, kernel, heads * size * size

    def _mamba(self) -> tuple[int, int, int]:
        """The same of Mamba2, by the names of Nemotron-H or of Granite."""
        heads, size, groups, state, kernel = (
            self._count(*names)
            for names in (
                ("mamba_num_heads", "mamba_n_heads"),
                ("mamba_head_dim", "mamba_d_head"),
                ("n_groups", "mamba_n_groups"),
                ("ssm_state_size", "mamba_d_state"),
                ("conv_kernel", "mamba_d_conv"),
            )
        )
        return heads * size + 2 * groups * state, kernel, heads * size * state

    def _inner(self, name: str) -> Mapping[str, Any]:
        inner = self._config.get(name)
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{self._where}: field {name} must be an object, got {inner!r}")
        return inner

    def _count(self, *names: str) -> int:
        """Of the first of these fields that is there."""
        name = next((name for name in names if name in self._config), names[0])
        return self._positive(name, self._config.get(name))

    def _positive(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{self._where}: field {name} must be a positive number, got {value!r}"
            )
        return value
