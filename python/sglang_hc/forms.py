"""Forms, layer plans and the byte layout of one block."""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from sglang_hc.errors import ConfigError

BLOCK_TOKENS = 64
"""Tokens per block, the unit of residency, hashing and eviction (HCache section 4.2.1)."""

CHUNK_ALIGN = 4096
"""Alignment of every chunk in bytes, so that O_DIRECT reads and writes whole chunks."""


INDEX_GROUP = 128
"""Elements of a sparse-attention index that share a scale."""

STATE_ALIGN = 64
"""Alignment in bytes of each part of a recurrent layer's state, so that it can be copied by words.
"""


class PlanError(ConfigError):
    """A layer plan that cannot be parsed or does not fit the model. The message is for users."""


class Form(enum.Enum):
    """How one layer's state of a span of tokens is kept off the GPU.

    WINDOW: K and V of the last tokens before an end, of a layer with a sliding window. STATE: the
    state of a recurrent layer at an end.
    """

    RECOMPUTE = "recompute"
    HIDDEN = "hidden"
    KV = "kv"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True)
class LayerPlan:
    """One form per layer: a RECOMPUTE prefix, then HIDDEN, then KV layers (HCache section 4.1)."""

    recompute: int
    hidden: int
    kv: int

    def __post_init__(self) -> None:
        if min(self.recompute, self.hidden, self.kv) < 0:
            raise PlanError(f"layer plan {self}: counts must not be negative")

    @property
    def num_layers(self) -> int:
        return self.recompute + self.hidden + self.kv

    @property
    def hidden_layers(self) -> range:
        """Indices of the layers kept as hidden states."""
        return range(self.recompute, self.recompute + self.hidden)

    @property
    def kv_layers(self) -> range:
        """Indices of the layers kept as KV."""
        return range(self.recompute + self.hidden, self.num_layers)

    def form(self, layer: int) -> Form:
        """Form of one layer, 0-based. Raises IndexError outside the model."""
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} of a {self.num_layers}-layer plan")
        if layer < self.recompute:
            return Form.RECOMPUTE
        return Form.HIDDEN if layer < self.recompute + self.hidden else Form.KV

    def over(self, stages: Sequence[int]) -> list[LayerPlan]:
        """The plan of each stage of a pipeline, given how many layers each has.

        RECOMPUTE layers are first layers of the first stage. Of what is stored, each stage keeps
        its share in each form: stages restore at the same time, and what is saved of a pass they
        save in the same steps. Raises PlanError where a stage would lack a form that others have.
        """
        if len(stages) == 1:
            return [self]
        stored = [stages[0] - self.recompute, *stages[1:]]
        if stored[0] < 1:
            raise PlanError(
                f"layer plan {self}: the first pipeline stage has {stages[0]} layers and would "
                f"keep none of them; recompute at most {stages[0] - 1}"
            )
        total = self.hidden + self.kv
        ends = [self.hidden * layers // total for layers in accumulate(stored)]
        hidden = [stop - start for start, stop in pairwise([0, *ends])]
        kv = [layers - count for layers, count in zip(stored, hidden, strict=True)]
        for form, whole, parts in (("hidden", self.hidden, hidden), ("kv", self.kv, kv)):
            if whole and not all(parts):
                raise PlanError(
                    f"layer plan {self}: each of the {len(stages)} pipeline stages needs a layer "
                    f"of each form, and one would have none as {form}; give other counts"
                )
        recompute = [self.recompute, *(0 for _ in stages[1:])]
        return [LayerPlan(*counts) for counts in zip(recompute, hidden, kv, strict=True)]

    def __str__(self) -> str:
        counts = (("recompute", self.recompute), ("hidden", self.hidden), ("kv", self.kv))
        return ",".join(f"{name}:{n}" for name, n in counts if n) or "kv:0"

    @classmethod
    def parse(cls, text: str, num_layers: int) -> LayerPlan:
        """Plan from `kv`, `hidden` or an explicit `recompute:2,hidden:24,kv:6`.

        `auto` is not a plan; whoever accepts it resolves it first. Raises PlanError with the layer
        count when the counts do not add up to `num_layers`.
        """
        if text in ("kv", "hidden"):
            return cls(0, num_layers, 0) if text == "hidden" else cls(0, 0, num_layers)
        counts = {"recompute": 0, "hidden": 0, "kv": 0}
        order: list[str] = []
        for part in text.split(","):
            match = re.fullmatch(r"(recompute|hidden|kv):(\d+)", part.strip())
            if match is None:
                raise PlanError(
                    f"layer plan {text!r}: {part!r} is not FORM:COUNT with FORM one of "
                    "recompute, hidden, kv; give auto, kv, hidden or e.g. hidden:20,kv:12"
                )
            order.append(match[1])
            counts[match[1]] = int(match[2])
        if order != [name for name in counts if name in order]:
            raise PlanError(
                f"layer plan {text!r}: name each form once, in the order recompute, hidden, kv"
            )
        plan = cls(**counts)
        if plan.num_layers != num_layers:
            raise PlanError(
                f"layer plan {text!r} covers {plan.num_layers} layers but the model has "
                f"{num_layers}; make the counts add up to {num_layers}"
            )
        return plan


@dataclass(frozen=True)
class StateShape:
    """Size of one token's state in one layer, per rank.

    hidden_bytes: bytes of the hidden state at the input of the fused QKV projection.
    kv_parts: bytes of each row the KV pool keeps: (K, V) with multi-head or grouped-query
    attention, one latent row with MLA; behind it `index_parts` with sparse attention.
    dtype: name of the element type, e.g. "bfloat16"; part of every block's identity.
    """

    num_layers: int
    hidden_bytes: int
    kv_parts: tuple[int, ...]
    dtype: str

    @property
    def kv_bytes(self) -> int:
        return sum(self.kv_parts)


def index_parts(head_dim: int) -> tuple[int, int]:
    """Bytes of a token's key in a layer's sparse-attention index, 8 bits an element, and of the
    float32 scales of the key."""
    return head_dim, head_dim // INDEX_GROUP * 4


@dataclass(frozen=True)
class DraftLayers:
    """Layers of a draft model, kept as KV behind the model's own, in rows of the same size.

    lag: a draft model of the EAGLE family computes a position's KV from the token behind it as
    well. Its row is therefore kept with that token, one row later (1), so that the tokens of a
    block tell all that the block's rows depend on. 0: with the position's own token.
    """

    count: int = 0
    lag: int = 0


NO_DRAFT = DraftLayers()


def _align(size: int, to: int = CHUNK_ALIGN) -> int:
    return -(-size // to) * to


@dataclass(frozen=True)
class WindowLayers:
    """Layers with sliding-window attention. To go on behind token E they need the K and V of tokens
    [E - tokens, E).

    layers: their numbers in the model. parts: bytes of each row that their pool keeps of a token,
    as `StateShape.kv_parts`, per rank; one size for all of them.
    """

    layers: tuple[int, ...] = ()
    tokens: int = 0
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class StateLayers:
    """Recurrent layers. To go on behind token E they need the state that they had there.

    layers: their numbers in the model. parts: bytes of each tensor of a layer's state (convolution,
    recurrence), per rank; one size for all of them. dtypes: names of the tensors' element types, a
    part of every identity.
    """

    layers: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class EndLayout:
    """Where each chunk lies inside an end part: what layers without full attention keep of a block.

    An end part is the WINDOW chunks in layer order, then the STATE chunks in layer order. A WINDOW
    chunk is, for each part, `BLOCK_TOKENS` rows of that part; a STATE chunk has the state behind
    the block's last token, each of its parts at a multiple of STATE_ALIGN. Every chunk is padded to
    CHUNK_ALIGN. Layers have their numbers in the model; those with full attention are numbered
    among themselves in `BlockLayout`, in the order of `full_layers`.
    """

    window: WindowLayers = WindowLayers()
    state: StateLayers = StateLayers()

    def __post_init__(self) -> None:
        layers = (*self.window.layers, *self.state.layers)
        if not layers or len(set(layers)) < len(layers):
            raise PlanError(f"{self}: an end has layers, and each of them one form")
        if self.window.layers and self.window.tokens < 1:
            raise PlanError(f"{self}: a window has at least one token")
        if self.state.layers and self.blocks > 1:
            raise PlanError(f"{self}: recurrent layers beside windows of more than a block")

    @property
    def blocks(self) -> int:
        """Blocks before an end whose end parts it needs: all that its windows reach into."""
        return max(1, -(-self.window.tokens // BLOCK_TOKENS))

    @property
    def has_state(self) -> bool:
        return bool(self.state.layers)

    def full_layers(self, num_layers: int) -> tuple[int, ...]:
        """Numbers of the layers with full attention, of a model with so many layers."""
        others = {*self.window.layers, *self.state.layers}
        return tuple(layer for layer in range(num_layers) if layer not in others)

    def form(self, layer: int) -> Form | None:
        """Form of one layer; None for one with full attention."""
        if layer in self.window.layers:
            return Form.WINDOW
        return Form.STATE if layer in self.state.layers else None

    @cached_property
    def state_offsets(self) -> tuple[int, ...]:
        """Where each part of a layer's state begins inside its chunk; the end of the last one."""
        sizes = (_align(part, STATE_ALIGN) for part in self.state.parts)
        return tuple(accumulate(sizes, initial=0))

    @cached_property
    def window_chunk_bytes(self) -> int:
        return _align(BLOCK_TOKENS * sum(self.window.parts))

    @cached_property
    def state_chunk_bytes(self) -> int:
        return _align(self.state_offsets[-1])

    @cached_property
    def window_bytes(self) -> int:
        """Of all WINDOW chunks, which come first."""
        return len(self.window.layers) * self.window_chunk_bytes

    @cached_property
    def slot_bytes(self) -> int:
        return self.window_bytes + len(self.state.layers) * self.state_chunk_bytes

    def chunks(self) -> list[tuple[int, int, int]]:
        """(layer, offset, length) of every chunk, in slot order, padding included."""
        window, state = self.window_chunk_bytes, self.state_chunk_bytes
        found = [(layer, i * window, window) for i, layer in enumerate(self.window.layers)]
        base = self.window_bytes
        return found + [(n, base + i * state, state) for i, n in enumerate(self.state.layers)]

    def fingerprint(self, blocks: bytes) -> bytes:
        """16-byte digest under which end parts are kept. blocks: fingerprint of the blocks."""
        digest = hashlib.blake2b(digest_size=16, key=blocks, person=b"sglang-hc ends")
        digest.update(repr(self).encode())
        return digest.digest()


@dataclass(frozen=True)
class BlockLayout:
    """Where each layer's chunk lies inside one block's slot.

    A slot is the HIDDEN chunks in layer order, then the KV chunks in layer order, those of the
    draft layers last. A HIDDEN chunk is `BLOCK_TOKENS` rows of `hidden_bytes`; a KV chunk is, for
    each part, `BLOCK_TOKENS` rows of that part. Every chunk is padded to CHUNK_ALIGN, so all chunks
    of one form have one stride. Draft layers are numbered behind the model's.

    ends: what layers without full attention keep beside the slot; plan and shape are then of the
    layers with full attention alone. None where all layers have it.
    """

    plan: LayerPlan
    shape: StateShape
    draft: DraftLayers = NO_DRAFT
    ends: EndLayout | None = None

    def __post_init__(self) -> None:
        if self.plan.num_layers != self.shape.num_layers:
            raise PlanError(
                f"layer plan {self.plan} covers {self.plan.num_layers} layers but the model has "
                f"{self.shape.num_layers}"
            )

    @property
    def kv_layers(self) -> range:
        """Indices of the layers kept as KV, draft layers included."""
        return range(self.plan.recompute + self.plan.hidden, self.num_layers)

    @property
    def draft_layers(self) -> range:
        return range(self.plan.num_layers, self.num_layers)

    @property
    def num_layers(self) -> int:
        """Of the model and of its draft model."""
        return self.plan.num_layers + self.draft.count

    @property
    def stored_layers(self) -> tuple[int, ...]:
        """In slot order."""
        return (*self.plan.hidden_layers, *self.kv_layers)

    def form(self, layer: int) -> Form:
        """Form of one layer, draft layers included."""
        return Form.KV if layer in self.draft_layers else self.plan.form(layer)

    def lag(self, layer: int) -> int:
        """Rows by which a layer's rows lie behind their positions."""
        return self.draft.lag if layer in self.draft_layers else 0

    @cached_property
    def hidden_chunk_bytes(self) -> int:
        return _align(BLOCK_TOKENS * self.shape.hidden_bytes)

    @cached_property
    def kv_chunk_bytes(self) -> int:
        return _align(BLOCK_TOKENS * self.shape.kv_bytes)

    @cached_property
    def slot_bytes(self) -> int:
        kv = len(self.kv_layers) * self.kv_chunk_bytes
        return self.plan.hidden * self.hidden_chunk_bytes + kv

    def chunk(self, layer: int) -> tuple[int, int]:
        """(offset, length) in bytes of a stored layer's chunk inside the slot, padding included.

        Raises PlanError for a RECOMPUTE layer: it has no chunk.
        """
        form = self.form(layer)
        if form is Form.HIDDEN:
            index = layer - self.plan.recompute
            return index * self.hidden_chunk_bytes, self.hidden_chunk_bytes
        if form is Form.KV:
            index = layer - self.plan.recompute - self.plan.hidden
            base = self.plan.hidden * self.hidden_chunk_bytes
            return base + index * self.kv_chunk_bytes, self.kv_chunk_bytes
        raise PlanError(f"layer {layer} of plan {self.plan} is recomputed and has no chunk")

    def chunks(self) -> list[tuple[int, int, int]]:
        """(layer, offset, length) of every stored chunk, in slot order."""
        return [(layer, *self.chunk(layer)) for layer in self.stored_layers]

    def fingerprint(self, *extra: str) -> bytes:
        """16-byte digest of the layout and of `extra` (model, weights, versions, parallelism)."""
        parts = (
            str(BLOCK_TOKENS),
            str(self.plan),
            repr(self.shape),
            *([repr(self.draft)] if self.draft.count else []),
            *([repr(self.ends)] if self.ends is not None else []),
            *extra,
        )
        text = "\x00".join(f"{len(part)}:{part}" for part in parts)
        return hashlib.blake2b(text.encode(), digest_size=16, person=b"sglang-hc plan").digest()
