"""Random inputs of the K/V kernels."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from sglang_hc_kernels import Epilogue, KNorm, Rotary

FP8 = torch.float8_e4m3fn


def has_fp8(capability: tuple[int, int]) -> bool:
    """Whether Triton compiles conversions to FP8 for GPUs of a compute capability."""
    return capability >= (8, 9)


FP8_RUNS = os.environ.get("HC_KERNELS_DEVICE", "cpu") == "cpu" or has_fp8(
    torch.cuda.get_device_capability()
)
"""Here: in the interpreter, or on this GPU."""


def examples(count: int) -> int:
    """Drawn shapes of a test: `count` in the interpreter; on a GPU, where each one is compiled,
    an eighth of them."""
    on_gpu = os.environ.get("HC_KERNELS_DEVICE", "cpu") != "cpu"
    return count // 8 if on_gpu else count


@dataclass(frozen=True)
class Case:
    """One drawn shape; `tensors` makes the same values every time."""

    count: int
    heads: int
    dk: int
    dv: int
    rotary_dim: int
    interleaved: bool
    bias: bool
    norm: bool
    fp8: bool
    dtype: torch.dtype
    seed: int

    @property
    def width(self) -> int:
        return self.heads * (self.dk + self.dv)

    def epilogue(self, generator: torch.Generator, device: str) -> Epilogue:
        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        rotary = None
        if self.rotary_dim:
            angles = draw(64, self.rotary_dim // 2) * 3
            cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
            rotary = Rotary(cache, self.interleaved)
        return Epilogue(
            bias=draw(self.width).to(self.dtype).to(device) if self.bias else None,
            k_norm=KNorm((draw(self.dk) + 1).to(self.dtype).to(device), 1e-6)
            if self.norm
            else None,
            rotary=rotary,
            k_scale=0.37 if self.fp8 else 1.0,
            v_scale=1.9 if self.fp8 else 1.0,
        )

    def places(
        self, generator: torch.Generator, device: str
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Positions, slots (distinct, some negative) and the pool's size."""
        size = self.count + 3
        slots = torch.randperm(size, generator=generator)[: self.count]
        slots[torch.rand(self.count, generator=generator) < 0.2] = -1
        positions = torch.randint(0, 64, (self.count,), generator=generator)
        return positions.to(device), slots.to(device), size

    def pools(self, size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V pools full of a mark, K's rows padded as a page-first layout's would be."""
        dtype = FP8 if self.fp8 else self.dtype
        k = torch.full((size, self.heads + 1, self.dk), 7.0).to(dtype).to(device)
        v = torch.full((size, self.heads, self.dv), 7.0).to(dtype).to(device)
        return k[:, : self.heads], v


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> Case:
    dk = 2 * draw(st.integers(1, 20))
    return Case(
        count=draw(st.integers(0, 21)),
        heads=draw(st.integers(1, 3)),
        dk=dk,
        dv=2 * draw(st.integers(1, 20)),
        rotary_dim=2 * draw(st.integers(0, dk // 2)),
        interleaved=draw(st.booleans()),
        bias=draw(st.booleans()),
        norm=draw(st.booleans()),
        fp8=FP8_RUNS and draw(st.booleans()),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 2**31)),
    )


def step(dtype: torch.dtype) -> float:
    """Largest relative distance of two neighbours."""
    return {FP8: 2**-3, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[dtype]


def close(actual: torch.Tensor, expected: torch.Tensor, steps: int, share: float = 1.0) -> None:
    """Equal within `steps` neighbours everywhere, and equal outright but for a `share`.

    Sums in another order round a few values to the neighbour; a wrong formula moves most of them.
    An absolute floor covers cancellation near zero in RoPE and in products.
    """
    dtype = actual.dtype
    left, right = actual.float(), expected.float()
    torch.testing.assert_close(
        left, right, rtol=steps * step(dtype), atol=steps * step(dtype) * 0.5
    )
    differing = (left != right).float().sum().item()
    assert differing <= max(2.0, share * left.numel())
