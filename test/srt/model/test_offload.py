"""Which tensors of a layer may leave the device: none that another one shares, and no vectors. What
is said where they cannot, and where a layer runs without them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_hc.config import GIB, ConfigError, HcConfig
from sglang_hc.device.copy_stream import HostCopyStream
from sglang_hc.device.weight_ring import Parked, WeightRing
from sglang_hc.srt.model import offload
from sglang_hc.srt.ranks.replicas import Place
from sglang_hc.srt.ranks.start_group import StartGroup


def layer() -> Any:
    made = torch.nn.Module()
    made.first = torch.nn.Linear(6, 4)
    made.second = torch.nn.Linear(6, 4, bias=False)
    made.second.weight = torch.nn.Parameter(torch.zeros(6, 4).t())  # as quantised weights are
    made.experts = torch.nn.Parameter(torch.zeros(2, 4, 6))
    made.norm = torch.nn.LayerNorm(4)
    return made


def movable(module: Any) -> set[str]:
    shared = offload._shared_memory(module)
    return {name for name, p in module.named_parameters() if offload._is_matrix(p, shared)}


EVERY = {"first.weight", "second.weight", "experts"}


def test_matrices_leave_and_vectors_stay() -> None:
    assert movable(layer()) == EVERY


def tie(made: Any) -> None:
    made.second.weight = made.first.weight


def alias(made: Any) -> None:
    made.first.weight = torch.nn.Parameter(made.second.weight.data)


def view(made: Any) -> None:
    """As MLA's w_kc may be one of kv_b_proj."""
    made.first.part = made.first.weight.data[:2]
    made.second.part = made.second.weight.data[1:]


def gaps(made: Any) -> None:
    made.first.weight = torch.nn.Parameter(torch.zeros(4, 12)[:, ::2])
    made.second.weight = torch.nn.Parameter(torch.zeros(4, 1).expand(4, 6))


@pytest.mark.parametrize("change", [tie, alias, view, gaps])
def test_what_cannot_be_moved_alone_stays(change: Any) -> None:
    made = layer()
    change(made)
    assert movable(made) == {"experts"}


class Attention(RadixAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x


class Layer(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 4, bias=False)
        self.proj.weight.data.fill_(number)
        self.attn = Attention(1, 4, 1.0, 1, number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attn(self.proj(x))
        return found


@torch.no_grad()
def test_a_layer_that_runs_by_another_call_ends_the_pass() -> None:
    """As where layers are fused, which no hook of theirs sees: it computed with what lay there."""
    layers = [Layer(number) for number in range(4)]
    parked = [Parked([layer.proj.weight]) for layer in layers]
    ring = WeightRing(parked, torch.device("cpu"), HostCopyStream())
    for number, layer in enumerate(layers):
        offload._enter_first(layer, ring, number)
    x = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"--hc-offload-gb: .* runs Layer by .*leave the flag"):
        layers[0].forward(x)
    assert [float(layer(x)[0]) for layer in layers] == [0.0, 4.0, 8.0, 12.0]
    layers[2](x)
    ring.ready(0)
    assert float(layers[2].forward(x)[0]) == 8.0, "what others need does not disturb it"
    assert float(layers[0].forward(x)[0]) == 0.0, "it may be used by who asked for it"
    layers[3](x)
    with pytest.raises(RuntimeError, match="weights do not come"):
        layers[0].forward(x)


RUNNER = SimpleNamespace(model=layer(), device="cpu")
ALONE = StartGroup(0, 1)


@pytest.fixture
def one_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "place_of", lambda runner: Place(0, 1, 0, 1))
    monkeypatch.setattr(offload, "model_streams", lambda runner: [])


@pytest.mark.parametrize("gib", [1.0, "auto"])
def test_a_model_of_which_nothing_can_be_moved_is_refused(gib: float | str) -> None:
    with pytest.raises(ConfigError, match=r"--hc-offload-gb: no weights of Module .* leave the fl"):
        offload._chosen(RUNNER, HcConfig(offload_gb=gib), [0, 0, 0], ALONE)


@pytest.mark.usefixtures("one_scheduler")
def test_who_asks_for_more_than_can_be_moved_hears_of_it(caplog: Any) -> None:
    sizes = [GIB] * 4
    with caplog.at_level(logging.WARNING):
        assert offload._chosen(RUNNER, HcConfig(offload_gb=4.0), sizes, ALONE) == (0, 1, 2, 3)
        assert not caplog.records
        assert offload._chosen(RUNNER, HcConfig(offload_gb=6.0), sizes, ALONE) == (0, 1, 2, 3)
    assert "of 6 GiB for this scheduler only 4 GiB" in caplog.text


NOT_LOCKED = ConfigError("4 GiB cannot be locked: lower --hc-host-size-gb, or raise the limit")


@pytest.mark.usefixtures("one_scheduler")
@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), NOT_LOCKED])
@pytest.mark.parametrize(
    ("gib", "remedy"),
    [(4.0, "lower --hc-offload-gb"), ("auto", "give --hc-offload-gb a size")],
)
def test_without_enough_host_memory_the_remedy_is_said(
    monkeypatch: pytest.MonkeyPatch, error: Exception, gib: float | str, remedy: str
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(offload, "WeightRing", fails)
    with pytest.raises(ConfigError, match=remedy) as refused:
        offload._ring(RUNNER, HcConfig(offload_gb=gib), [Parked([torch.zeros(4, 4)])])
    assert "--hc-host-size-gb" not in str(refused.value)


@pytest.mark.usefixtures("one_scheduler")
@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize("masks", [True, False])
def test_a_model_that_masks_images_has_no_mixed_chunks(
    monkeypatch: pytest.MonkeyPatch, images: bool, masks: bool
) -> None:
    """SGLang makes the mask in passes of prompts alone, and there are mixed ones with the flag."""
    kind = type("Masking", (torch.nn.Module,), {"prepare_attn_masks": None} if masks else {})
    layers = offload.HostOffloader()
    model = kind()
    model.layers = torch.nn.ModuleList(layers.wrap_modules(Layer(number) for number in range(4)))
    runner = SimpleNamespace(
        model=model, device="cpu", model_config=SimpleNamespace(is_multimodal=images)
    )
    said: list[Any] = []
    arguments = SimpleNamespace(
        of=lambda runner: None, makes_graphs=lambda args: False, leave_out_mixed_chunks=said.append
    )
    monkeypatch.setattr(offload, "arguments", arguments)
    monkeypatch.setattr(offload.offloader, "get_offloader", lambda: layers)
    monkeypatch.setattr(offload, "held_layers", lambda model, count: list(range(count)))
    assert offload.settle(runner, HcConfig(offload_gb=1.0), ALONE).ring is not None
    assert bool(said) == (images and masks)
