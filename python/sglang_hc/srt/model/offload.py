"""`--hc-offload-gb`: which of a model's weights lie in host memory, and how its layers get them.

SGLang hands every decoder layer that `make_layers` builds to its offloader; ours moves each to the
host, so that the device never holds more than one while a model is loaded. Behind the load, when
quantised weights have their last shape, some layers are chosen. They stay, in one piece of locked
memory; the others go to the device. Vectors (norms, biases) stay on the device in any case.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.utils import offloader

from sglang_hc.config import GIB, ConfigError, HcConfig
from sglang_hc.device.copy_stream import copy_stream_for
from sglang_hc.device.pinning import give_back_pinned
from sglang_hc.device.weight_ring import Parked, WeightRing
from sglang_hc.policy.offload import fitting, holding
from sglang_hc.policy.streaming import ThroughputSpec
from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.engine.streams import model_streams
from sglang_hc.srt.model.families import held_layers
from sglang_hc.srt.model.scratch_layer import model_shape
from sglang_hc.srt.ranks.replicas import place_of
from sglang_hc.srt.ranks.start_group import StartGroup

logger = logging.getLogger(__name__)

WEIGHTS = "_hc_weights"
"""Attribute of a ModelRunner that holds our `HostedWeights`."""

WHY = (
    "with --hc-offload-gb weights are neither replaced nor read while the server runs: restart it "
    "with the new ones, or without the flag"
)
"""Said to who asks for it."""

KV_SHARE = 4
PASS_SHARE = 8
"""`auto` leaves a quarter of the device for KV where no number of tokens is given, and an eighth
for what passes need beside SGLang's own reserve: longer chunks, and rows on their way."""


class HostedWeights:
    """Of one model runner: which of its layers, numbered as this rank has them, are in a ring."""

    def __init__(self, ring: WeightRing | None, numbers: Mapping[int, int], layers: int) -> None:
        """ring: None where all layers are on the device. numbers: of layers, within the ring.
        layers: that this rank has."""
        self.ring = ring
        self._numbers = numbers
        self._layers = layers
        self._owners = {} if ring is None else ring.numbers()

    @property
    def layer_bytes(self) -> float:
        """That come to the device for each layer, on average over all."""
        return 0.0 if self.ring is None else self.ring.bytes / self._layers

    def ready(self, layer: int) -> None:
        """The weights of `layer` are valid for the work submitted from now on, up to the next call.
        Whoever uses them outside the model's own pass has to ask."""
        if layer in self._numbers:
            assert self.ring is not None
            self.ring.ready(self._numbers[layer])

    def ready_to_read(self, tensor: torch.Tensor) -> None:
        """The same for one tensor of the model, whichever layer it belongs to."""
        number = self._owners.get(id(tensor))
        if number is not None:
            assert self.ring is not None
            self.ring.ready(number)


ALL_RESIDENT = HostedWeights(None, {}, 1)


def weights_of(runner: Any) -> HostedWeights:
    """Where a model runner has its weights, once the model is loaded."""
    found: HostedWeights = getattr(runner, WEIGHTS, ALL_RESIDENT)
    return found


class HostOffloader(offloader.BaseOffloader):
    """SGLang's offloader while a model is loaded: it moves the decoder layers to the host."""

    def __init__(self) -> None:
        self.stacks: list[list[torch.nn.Module]] = []

    def wrap_modules(
        self,
        all_modules_generator: Iterator[torch.nn.Module],
        submodule_accessor: object = None,
        whitelist_param_names_creator: object = None,
    ) -> list[torch.nn.Module]:
        """Called by `make_layers`. A stack without attention over the pool, such as the layers of
        an encoder of images, stays as it is."""
        layers = []
        for layer in all_modules_generator:
            layers.append(layer)
            if _attends(layer):
                _to_host(layer)
        if any(map(_attends, layers)):
            self.stacks.append(layers)
        return layers


def before_load_model(self: Any) -> None:
    """BEFORE ModelRunner.load_model: the layers are built in host memory if some are to stay."""
    config = config_of(arguments.of(self))
    if config is not None and config.offload_gb and not self.is_draft_worker:
        offloader.set_offloader(HostOffloader())


def settle(runner: Any, config: HcConfig, group: StartGroup) -> HostedWeights:
    """Behind ModelRunner.load_model: choose the layers that stay in host memory, and give each
    layer its weights before it runs. Raises ConfigError."""
    if not config.offload_gb:
        return ALL_RESIDENT
    if arguments.makes_graphs(arguments.of(runner)):
        raise ConfigError(
            "--hc-offload-gb: SGLang makes CUDA graphs for this model, which wait for no weights; "
            "add --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"
        )
    layers, device = _stack(runner.model), torch.device(runner.device)
    shared = _shared_memory(runner.model)
    matrices = [[p for p in layer.parameters() if _is_matrix(p, shared)] for layer in layers]
    sizes = [Parked(found).bytes for found in matrices]
    chosen = _chosen(runner, config, sizes, group)
    for number, layer in enumerate(layers):
        staying = matrices[number] if number in chosen else ()
        _to_device(layer, staying, device)
    give_back_pinned()  # SGLang pins quantised weights behind the load, one by one
    if not chosen:
        return ALL_RESIDENT
    if masks_images(runner):
        arguments.leave_out_mixed_chunks(arguments.of(runner))
        logger.info(
            "sglang-hc: --hc-offload-gb: no mixed chunks: in them this model masks no image"
        )
    ring = _ring(runner, config, [Parked(matrices[number]) for number in chosen])
    logger.info(
        "sglang-hc: weights of %d of %d layers, %.2f GiB, lie in host memory and pass through "
        "%.2f GiB on the device",
        *(len(chosen), len(layers), ring.bytes / GIB),
        sum(place.numel() for place in ring.places) / GIB,
    )
    numbers = {layer: number for number, layer in enumerate(chosen)}
    for layer, number in numbers.items():
        _enter_first(layers[layer], ring, number)
    runner.model._weight_export_error = WHY  # where SGLang looks before it sends weights to others
    weights = HostedWeights(ring, numbers, len(layers))
    setattr(runner, WEIGHTS, weights)
    return weights


def masks_images(runner: Any) -> bool:
    """Whether images attend in both directions, by a mask that SGLang makes in passes of prompts
    alone (Gemma 3 and 4)."""
    return runner.model_config.is_multimodal and hasattr(runner.model, "prepare_attn_masks")


def _ring(runner: Any, config: HcConfig, layers: Sequence[Parked]) -> WeightRing:
    """Raises ConfigError when there is not so much host memory, or it cannot be locked."""
    device = torch.device(runner.device)
    copies = copy_stream_for(device, model_streams(runner))
    remedy = "lower --hc-offload-gb"
    if config.offload_gb == "auto":
        remedy = "give --hc-offload-gb a size"
    try:
        return WeightRing(layers, device, copies)
    except ConfigError as error:
        raise ConfigError(str(error).replace("lower --hc-host-size-gb", remedy)) from None
    except OSError as error:
        size = sum(layer.bytes for layer in layers) / GIB
        raise ConfigError(
            f"--hc-offload-gb: {size:.3g} GiB of host memory for weights: {error}; {remedy}"
        ) from None


def _enter_first(layer: torch.nn.Module, ring: WeightRing, number: int) -> None:
    """Have a layer's weights come before it runs, and end the pass of a model that runs it by
    another call than the layer's own, which no hook sees."""

    def check(module: object, inputs: object) -> None:
        if not ring.is_valid(number):
            raise RuntimeError(
                f"--hc-offload-gb: this model runs {type(layer).__name__} by a way on which its "
                "weights do not come from host memory; leave the flag out"
            )

    layer.register_forward_pre_hook(lambda module, inputs: ring.enter(number))
    for module in layer.modules():
        if isinstance(module, RadixAttention):
            module.register_forward_pre_hook(check)


def _stack(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder layers of this rank. Raises ConfigError."""
    used = offloader.get_offloader()
    stacks = used.stacks if isinstance(used, HostOffloader) else []
    name = type(model).__name__
    held = held_layers(model, sum(map(len, stacks)))
    if len(stacks) != 1 or len(stacks[0]) != len(held):
        raise ConfigError(
            f"--hc-offload-gb: SGLang builds the layers of {name} in one piece, not layer by layer,"
            " so none can be left in host memory; leave the flag out"
        )
    return stacks[0]


def _chosen(
    runner: Any, config: HcConfig, sizes: Sequence[int], group: StartGroup
) -> tuple[int, ...]:
    """Layers that stay in host memory. sizes: bytes of the matrices of each. Raises ConfigError."""
    if not sum(sizes):
        raise ConfigError(
            f"--hc-offload-gb: no weights of {type(runner.model).__name__} can be moved; leave the "
            "flag out"
        )
    if config.offload_gb != "auto":
        place = place_of(runner)
        processes = place.replicas * place.stages * place.shards
        wanted = int(float(config.offload_gb) * GIB) // processes
        if sum(sizes) < wanted:
            logger.warning(
                "sglang-hc: --hc-offload-gb: of %.3g GiB for this scheduler only %.3g GiB can be "
                "moved to host memory",
                *(wanted / GIB, sum(sizes) / GIB),
            )
        return holding(wanted, sizes)
    room = group.least(_room(runner, config))
    chosen = fitting(room, sizes)
    missing = group.reason(None if chosen is not None else f"{sum(sizes) / GIB:.3g}")
    if missing is not None:
        raise ConfigError(
            f"--hc-offload-gb auto: beside KV and what a pass needs the device has "
            f"{max(room, 0) / GIB:.3g} GiB for {missing} GiB of layers, too little even for two of "
            "them; give a smaller --max-total-tokens, or a higher --mem-fraction-static"
        )
    assert chosen is not None
    if not chosen:
        logger.info(
            "sglang-hc: --hc-offload-gb auto: all weights fit on the device; leave the flag out: "
            "CUDA graphs are off with it"
        )
    return chosen


def _room(runner: Any, config: HcConfig) -> int:
    """Bytes of the device that are left for layers; no bound on a device without memory of its own.
    Now it holds the model's other weights."""
    free = device_room(runner)
    if free is None:
        return 1 << 62
    _, total = torch.cuda.mem_get_info(runner.gpu_id)
    tokens, shape = arguments.pool_tokens(arguments.of(runner)), model_shape(runner)
    state = total // KV_SHARE
    if config.throughput is not None:  # slots are in host memory
        given = ThroughputSpec.parse(config.throughput).device_gb
        state = state if given is None else int(given * GIB)
    elif tokens is not None:
        state = tokens * shape.kv_bytes * shape.num_layers
    return free - state


def device_room(runner: Any) -> int | None:
    """Bytes of the device that are free beside what passes need; None where the device has no
    memory of its own."""
    if torch.device(runner.device).type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(runner.gpu_id)
    _, static = arguments.first_gpu(arguments.of(runner))
    return int(free - total * (1 - static) - total // PASS_SHARE)


# -- what of a layer can be moved ----------------------------------------------------------------


def _attends(layer: torch.nn.Module) -> bool:
    return any(isinstance(module, RadixAttention) for module in layer.modules())


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers and other tensors of a module and those in it, each once or more."""
    for owner in module.modules():
        yield from owner.parameters(recurse=False)
        yield from owner.buffers(recurse=False)
        yield from (value for value in vars(owner).values() if isinstance(value, torch.Tensor))


def _memory(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _shared_memory(module: torch.nn.Module) -> set[tuple[torch.device, int]]:
    """Memory that more than one tensor of a module looks at, or one that belongs to two modules:
    moving one would leave the other behind."""
    owners: Counter[tuple[torch.device, int]] = Counter()
    for tensor in _tensors(module):
        if not tensor.is_meta and tensor.numel():
            owners[_memory(tensor)] += 1
    return {memory for memory, count in owners.items() if count > 1}


def _is_matrix(parameter: torch.Tensor, shared: set[tuple[torch.device, int]]) -> bool:
    """Whether a parameter can be moved, and is large enough to pay for it."""
    return (
        parameter.dim() >= 2
        and parameter.numel() > 0
        and type(parameter.data) is torch.Tensor
        and _is_dense(parameter)
        and _memory(parameter) not in shared
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _to_host(layer: torch.nn.Module) -> None:
    """Move a layer that was built. What others are made of behind the load is left where kernels
    find it: MLA makes matrices of its own of `kv_b_proj`."""
    shared, kept = _shared_memory(layer), set()
    for owner in layer.modules():
        if hasattr(owner, "w_kc") and hasattr(owner, "kv_b_proj"):
            kept |= {id(parameter) for parameter in owner.kv_b_proj.parameters()}
    for parameter in layer.parameters():
        if _is_matrix(parameter, shared) and id(parameter) not in kept:
            parameter.data = parameter.data.to("cpu")


def _to_device(
    layer: torch.nn.Module, staying: Sequence[torch.Tensor], device: torch.device
) -> None:
    """Move what SGLang or we have left in host memory to the device, but for `staying`."""
    stays = {id(parameter) for parameter in staying}
    for tensor in (*layer.parameters(), *layer.buffers()):
        if id(tensor) not in stays and tensor.device.type != device.type:
            tensor.data = tensor.data.to(device)
