"""What the tiers keep of models whose layers do not all have full attention, by their config.json.

Layers with full attention are kept as KV, token for token; the others at ends alone
(`forms.EndLayout`), as a sliding window or as a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_hc.errors import ConfigError
from sglang_hc.forms import EndLayout, StateLayers, WindowLayers

_WINDOWED = {
    "gpt_oss", "gemma4_text", "llama4_text", "mimo_v2_flash", "step3p5", "laguna", "mellum",
    "granite_swa", "spark2_5",
}  # fmt: skip
"""Model types whose sliding windows have a pool of their own in SGLang."""

_RECURRENT = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Model types with gated delta rules."""

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}

_STATE_DTYPE = "float32"
"""Of the recurrence, as SGLang keeps it unless told otherwise."""


@dataclass(frozen=True)
class KeptShape:
    """What is kept of a model, unsharded, in bytes.

    num_layers: of the model. full_layers: those with full attention that have K and V of their own.
    row_bytes: of a token in each of them. plain_bytes: of a token, if all layers that have K and V,
    or a state in their place, kept them of every token.
    """

    model_type: str
    dtype: str
    num_layers: int
    full_layers: int
    row_bytes: int
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
    """From a parsed config.json; None for a model that needs no ends. Raises ConfigError that names
    the field that is missing."""
    inner = config.get("text_config")
    own = inner if isinstance(inner, Mapping) else config
    kind = str(own.get("model_type", ""))
    if kind not in _WINDOWED | _RECURRENT:
        return None
    return _Reader(own, config, where).shape(kind)


class _Reader:
    def __init__(self, config: Mapping[str, Any], outer: Mapping[str, Any], where: str) -> None:
        self._config = config
        self._where = where
        stated = (part.get(name) for part in (config, outer) for name in ("dtype", "torch_dtype"))
        self._dtype = str(next((name for name in stated if name), "bfloat16"))
        if self._dtype not in _BYTES:
            raise ConfigError(f"{where}: dtype must be one of {', '.join(_BYTES)}")
        self._size = _BYTES[self._dtype]

    def shape(self, kind: str) -> KeptShape:
        layers = self._count("num_hidden_layers")
        types = self._types(layers)
        shared = int(self._config.get("num_kv_shared_layers") or 0)
        own = range(layers - shared)  # the last ones read the K and V of earlier layers
        full = [n for n in own if types[n] == "full_attention"]
        rest = [n for n in own if types[n] != "full_attention"]
        row = self._row(kind)
        if kind in _RECURRENT:
            ends = EndLayout(state=self._states(rest))
            plain = len(own) * row
        else:
            ends = EndLayout(window=self._windows(rest))
            plain = len(full) * row + len(rest) * sum(ends.window.parts)
        return KeptShape(kind, self._dtype, layers, len(full), row, plain, ends)

    def _types(self, layers: int) -> Sequence[str]:
        types = self._config.get("layer_types")
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

    def _states(self, layers: Sequence[int]) -> StateLayers:
        """Of gated delta rules: the last inputs of a convolution over queries, keys and values, and
        a matrix for each head of values."""
        keys, values = self._count("linear_num_key_heads"), self._count("linear_num_value_heads")
        key, value = self._count("linear_key_head_dim"), self._count("linear_value_head_dim")
        width = 2 * keys * key + values * value
        convolution = width * (self._count("linear_conv_kernel_dim") - 1) * self._size
        recurrence = values * key * value * _BYTES[_STATE_DTYPE]
        dtypes = self._dtype, _STATE_DTYPE
        return StateLayers(tuple(layers), (convolution, recurrence), dtypes)

    def _count(self, name: str) -> int:
        value = self._config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{self._where}: field {name} must be a positive number, got {value!r}"
            )
        return value
