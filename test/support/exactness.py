"""What may be asserted about restored state on the machine the tests run on.

KV form is a copy, and its bits never differ. Hidden form runs a matrix product again with another
number of rows. Whether that gives the same bits is up to the CPU and its library: tests ask first
(`asks`), and assert bit identity, or else the bound of docs/design.md ("What is bit-exact").
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from sglang_hc.device.exactness import cancelling, row_dependence

BOUND = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
"""Largest difference of K and V rebuilt from hidden states, relative to the largest magnitude of
the layer's K or V: of 16-bit types one unit in the last place there."""

SHARE = 1 / 256
"""At most so many of a layer's elements differ at all in a 16-bit type: a sum that is rounded to 16
bits seldom shows the order of its additions. Anything wrong (a bias, a norm, a rotation, a row)
shows in most of them."""

NEAR_TIE = 0.25
"""Where greedy replies part, the two tokens' log probabilities differ by at most this."""

TOP = 64
"""Most likely tokens that are looked at per step."""

ISAS = ("AVX2", "AVX512_CORE")
"""Values of ONEDNN_MAX_CPU_ISA that tests add to this machine's own instructions."""


def use_isa(isa: str | None) -> None:
    """Limit oneDNN to the instructions of `isa` in this process, a child of `run_in_child`.

    oneDNN reads the limit at its first use and never again. A process whose parent has used it
    already would run with all instructions and prove nothing, so that is an AssertionError.
    """
    if isa is None:
        return
    os.environ |= {"ONEDNN_MAX_CPU_ISA": isa, "ONEDNN_VERBOSE": "1"}
    # Large enough for torch to hand it to oneDNN, on every CPU.
    said = _said_by(lambda: torch.conv2d(torch.ones(1, 64, 32, 32), torch.ones(64, 64, 3, 3)))
    torch._C._verbose.mkldnn_set_verbose(0)  # type: ignore[attr-defined]
    (line,) = [line for line in said.splitlines() if "cpu,isa:" in line] or [""]
    late = "Intel DL Boost" in line or (isa == "AVX2" and "AVX-512" in line)
    assert line and not late, f"oneDNN was used in this process before it was limited: {line}"


def _said_by(work: Callable[[], object]) -> str:
    """What `work` prints, from whatever language."""
    sys.stdout.flush()
    before = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            work()
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(before, 1)
            os.close(before)
        file.seek(0)
        return file.read().decode()


def depends_on_rows(qkv: Any) -> str | None:
    """What shows that this machine's product of the model's fused QKV projection depends on the
    number of rows; None when nothing does."""
    out, size = qkv.weight.shape
    states, weight, bias = cancelling(
        size, out, qkv.bias is not None, qkv.weight.dtype, torch.device("cpu")
    )
    first = qkv.num_heads * qkv.head_size
    part = None if bias is None else bias[first:]
    linear = torch.nn.functional.linear
    return row_dependence(
        lambda rows: linear(rows, weight, bias)[:, first:],
        lambda rows: linear(rows, weight[first:], part),
        states,
    )


def near_tie(kept: dict[str, list], evicted: dict[str, list]) -> list[str]:
    """Complaints about replies that part where the never-evicted run had no near tie.

    Only the first turn that differs counts: what follows has another history.
    """
    for turn, (a, b) in enumerate(zip(kept["tokens"], evicted["tokens"], strict=True)):
        for step, (wanted, got) in enumerate(zip(a, b, strict=True)):
            if wanted == got:
                continue
            top = kept["top"][turn][step]
            gap = top[wanted] - top.get(got, -float("inf"))
            if gap <= NEAR_TIE:
                return []
            return [f"turn {turn}, token {step}: {got} is {gap:.2f} less likely than {wanted}"]
    return []
