"""Where the kernels run: Triton's interpreter on CPU, or `HC_KERNELS_DEVICE=cuda`.

The interpreter is chosen when Triton is imported, so run this folder by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

DEVICE = os.environ.get("HC_KERNELS_DEVICE", "cpu")

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
        raise pytest.UsageError(
            "Triton was imported before its interpreter was chosen; run sgl-kernel-ext/test alone"
        )


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(scope="session", autouse=True)
def exact_interpreter() -> Iterator[None]:
    """Conversions and products of the interpreter as the hardware does them.

    Triton 3.6 interprets a bfloat16 product on the bit patterns, truncates float32 to bfloat16 and
    loses the carry when rounding to fp8. With torch's conversions results can be compared exactly.
    """
    if DEVICE != "cpu":
        yield
        return
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    torch_types = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
    }
    bits = {4: np.int32, 2: np.int16, 1: np.uint8}

    def convert(values, source, target, rounding_mode):
        raw = torch.from_numpy(np.ascontiguousarray(values).view(bits[values.dtype.itemsize]))
        wide = raw.view(torch_types[source])
        if target == tl.float8e4nv:
            limit = torch.finfo(torch.float8_e4m3fn).max
            wide = wide.float().clamp(-limit, limit)  # cvt.satfinite
        narrow = wide.to(torch_types[target])
        raw = narrow.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[narrow.element_size()])
        return raw.numpy().view(getattr(np, f"uint{target.primitive_bitwidth}"))

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right = (
            convert(side.data, side.dtype.scalar, tl.float32, None).view(np.float32)
            for side in (a, b)
        )
        return interpreter.TensorHandle(left @ right + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield


def pytest_report_header() -> str:
    return f"kernels run on: {'Triton interpreter' if DEVICE == 'cpu' else DEVICE}"
