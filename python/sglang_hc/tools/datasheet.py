"""Costs from data sheets: GPU profiles, where each number comes from, and the cost model of one."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from sglang_hc.errors import ConfigError, decode_json, read_text
from sglang_hc.policy.cost_model import CostModel, SourceTier, TierCopy
from sglang_hc.policy.fit import Fit, StepFit
from sglang_hc.policy.streamed_pass import ROUND_SECONDS, StreamedModel
from sglang_hc.tools.model_shape import ModelShape


class Quantity(Struct, frozen=True):
    """A positive number and its origin."""

    value: Annotated[float, Meta(gt=0)]
    origin: Literal["data sheet", "measured", "assumption"]


class Hardware(Struct, frozen=True):
    """One GPU.

    fp16_tflops: dense 16-bit matrix rate, in 1e12 FLOP/s.
    flop_fraction: share of that rate which the layers' matrix products reach, in (0, 1].
    memory_gb, memory_gbps, link_gbps: device memory in 1e9 bytes, its bandwidth and that of the
    host link in one direction in 1e9 bytes/s.
    """

    name: Annotated[str, Meta(min_length=1)]
    fp16_tflops: Quantity
    flop_fraction: Quantity
    memory_gb: Quantity
    memory_gbps: Quantity
    link_gbps: Quantity
    note: str

    @property
    def flops(self) -> float:
        """FLOP/s that the planner counts with."""
        return self.fp16_tflops.value * 1e12 * self.flop_fraction.value

    @property
    def memory_bandwidth(self) -> float:
        """Bytes/s of device memory."""
        return self.memory_gbps.value * 1e9


def known_gpus() -> dict[str, str]:
    """Name of every shipped profile, with the text of its file."""
    folder = resources.files("sglang_hc.tools") / "gpus"
    texts = [entry.read_text() for entry in folder.iterdir() if entry.name.endswith(".json")]
    named = {parse_hardware(text, "shipped profile").name: text for text in texts}
    return dict(sorted(named.items()))


def load_hardware(name_or_path: str) -> Hardware:
    """A shipped profile by name, in any case, or one from a file in the same format.

    Raises ConfigError with the known names, or with the field that is missing or nonsense.
    """
    known = known_gpus()
    for name, text in known.items():
        if name.lower() == name_or_path.lower():
            return parse_hardware(text, f"GPU profile {name}")
    path = Path(name_or_path)
    if not path.is_file():
        raise ConfigError(
            f"unknown GPU {name_or_path!r}: give one of {', '.join(known)}, or a profile file"
        )
    where = f"GPU profile {name_or_path}"
    return parse_hardware(read_text(path, where), where)


def parse_hardware(text: str, where: str) -> Hardware:
    """Profile from a file's text. `where` names the file in errors (ConfigError)."""
    hardware = decode_json(text, Hardware, where)
    if hardware.flop_fraction.value > 1:
        raise ConfigError(f"{where}: flop_fraction.value must be at most 1")
    return hardware


def datasheet_costs(
    hardware: Hardware, shape: ModelShape, link: float, disk: float | None = None
) -> CostModel:
    """Costs of one GPU at `hardware.flops`; see `modelled_costs`."""
    rates = Rates(hardware.flops, hardware.memory_bandwidth, link, disk)
    return modelled_costs(f"data sheet: {hardware.name}, {shape.describe()}", shape, rates)


class Rates(NamedTuple):
    """A machine, per second.

    flops: of the layers' products. memory: bytes/s of device memory. link: bytes/s from host memory
    to the device. disk: bytes/s of all disks together, into host memory; None for no disk.
    """

    flops: float
    memory: float
    link: float
    disk: float | None


class HostWork(NamedTuple):
    """Seconds of host work for each layer. step: a decode step takes them beside its kernels.
    prompt: a layer of a prompt takes so long at least; behind the kernels of a long one they do not
    show."""

    step: float = 0.0
    prompt: float = 0.0


NO_HOST_WORK = HostWork()


def modelled_costs(
    name: str, shape: ModelShape, rates: Rates, host_work: HostWork = NO_HOST_WORK
) -> CostModel:
    """Costs from FLOP counts and bandwidths; nothing is measured.

    Compute runs no faster than the layer's weights can be read once. A decode step also reads the
    weights of the LM head, and K and V of all contexts.
    """
    state = shape.state_shape()
    read = shape.layer_params + shape.vocab * shape.hidden_size / shape.num_layers

    def copy(bandwidth: float) -> TierCopy:
        return TierCopy(
            kv=Fit(0.0, state.kv_bytes / bandwidth),
            hidden=Fit(0.0, state.hidden_bytes / bandwidth),
        )

    copies = {SourceTier.HOST: copy(rates.link)}
    if rates.disk is not None:
        copies[SourceTier.DISK] = copy(rates.disk)
    weight_seconds = shape.element_bytes / rates.memory
    return CostModel(
        fingerprint=name,
        origin="data sheet",
        copies=copies,
        project=Fit(
            0.0,
            2 * shape.kv_projection_params / rates.flops,
            floor=shape.kv_projection_params * weight_seconds,
        ),
        prefill=Fit(
            0.0,
            (2 * shape.layer_params + shape.attention_flops_per_token) / rates.flops,
            shape.attention_flops_per_pair / rates.flops,
            floor=max(shape.layer_params * weight_seconds, host_work.prompt),
            window=shape.window,
            windowed=shape.windowed,
        ),
        step=StepFit(
            Fit(0.0, 2 * read / rates.flops, floor=read * weight_seconds + host_work.step),
            state.kv_bytes / rates.memory,
        ),
    )


RESERVED = 0.1
"""Share of device memory that neither layers nor state get: libraries, activations of a pass."""


class Stored(NamedTuple):
    """Bytes for a weight and for an element of K and V. Hidden states have two an element."""

    weight: float = 2.0
    kv: float = 2.0


def streamed_model(
    rates: Rates, shape: ModelShape, host: float, device: float, stored: Stored
) -> StreamedModel:
    """A model that does not fit the device. Products run at `rates.flops` whatever a weight's size.

    host: bytes for weights and state. device: bytes of the whole device; a share of it (RESERVED)
    and the weights outside the layers, in 16 bits, are taken off. With latent attention nothing is
    made of hidden states. Raises ConfigError when the config has no vocab_size.
    """
    if not shape.embedding_params:
        raise ConfigError("field vocab_size is missing; the size of the embedding follows from it")
    weights = shape.stored_params * stored.weight
    kv = sum(shape.kv_parts) * stored.kv + sum(shape.index_parts)
    act = shape.hidden_size * 2.0
    project = 2 * shape.kv_projection_params / rates.flops
    return StreamedModel(
        layers=shape.num_layers,
        weights=weights,
        kv=kv,
        act=act,
        load_w=weights / rates.link,
        load_kv=kv / rates.link,
        load_act=act / rates.link,
        kv_gen=math.inf if shape.is_latent else project,
        read_w=weights / rates.memory,
        read_kv=kv / rates.memory,
        per_new=(2 * shape.layer_params + shape.attention_flops_per_token) / rates.flops,
        per_pair=shape.attention_flops_per_pair / rates.flops,
        per_round=ROUND_SECONDS + shape.kv_projection_params * stored.weight / rates.memory,
        outside=2.0 * shape.vocab * shape.hidden_size / rates.memory,
        active=shape.layer_params / shape.stored_params,
        host=host,
        device=device * (1 - RESERVED) - shape.embedding_params * 2.0,
    )
