"""The dispatch: Triton for CUDA tensors, the torch reference otherwise.

Every function returns nothing, writes only the pool or staging it is given, and on CUDA only
enqueues on the current stream: no synchronisation and no host read, so CUDA graphs can hold it
(for `gather_rows`: its `PointerTable` is made beforehand).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sglang_hc_kernels import reference
from sglang_hc_kernels.contracts import (
    Epilogue,
    check_epilogue,
    check_index,
    check_rows,
    check_staging,
    require,
    row_bytes,
)

_PLAIN = Epilogue()

WARM_ROWS = (1, 512, 513)
"""Row counts that between them compile every kernel that `kv_epilogue` and `project_kv` launch for
one set of weights and pools, whatever the count. Triton compiles at the first launch, which takes
seconds; a server launches these before its first request."""


def kv_epilogue(
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    *,
    epilogue: Epilogue = _PLAIN,
) -> None:
    """Bias, k-norm, RoPE and the scatter of K and V into the pool (HCache section 4.1 restore).

    kv: [n, Hkv * Dk + Hkv * Dv], K first, rows may be strided, not modified.
    positions, slots: int64 [n]; a row with a negative slot is skipped, its position is not read.
    k_pool: [slots, Hkv, Dk], v_pool: [slots, Hkv, Dv]; dtype of `kv` or float8_e4m3fn.
    A slot given twice holds either row. Raises ArgumentError. A slot or position past the end
    raises IndexError on CPU; a kernel cannot raise and leaves that row unwritten.
    """
    require(kv.dim() == 2 and kv.stride(1) == 1, "kv: must be [n, width] with unit column stride")
    check_epilogue(kv.shape[1], kv, positions, slots, k_pool, v_pool, epilogue)
    if not kv.is_cuda:
        reference.kv_epilogue(kv, positions, slots, k_pool, v_pool, epilogue)
        return
    from sglang_hc_kernels import triton_kv

    triton_kv.kv_epilogue(kv, positions, slots, k_pool, v_pool, epilogue)


def project_kv(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    *,
    epilogue: Epilogue = _PLAIN,
) -> None:
    """`hidden` [n, D] times `weight` [Hkv * Dk + Hkv * Dv, D] transposed, then `kv_epilogue`.

    Products are summed in float32; the bias joins the sum, as in a GEMM with bias, and the result
    is rounded once to the dtype of `hidden` before the k-norm. Raises as `kv_epilogue` does.
    """
    require(hidden.dim() == 2 and hidden.stride(1) == 1, "hidden: must be [n, D], unit stride")
    require(
        weight.dim() == 2 and weight.shape[1] == hidden.shape[1] and weight.stride(1) == 1,
        f"weight: must be [width, {hidden.shape[1]}] with unit column stride",
    )
    require(
        weight.dtype == hidden.dtype and weight.device == hidden.device,
        "weight: dtype and device must be those of hidden",
    )
    check_epilogue(weight.shape[0], hidden, positions, slots, k_pool, v_pool, epilogue)
    if hidden.is_cuda and hidden.dtype != torch.float32:
        from sglang_hc_kernels import triton_project

        triton_project.project_kv(hidden, weight, positions, slots, k_pool, v_pool, epilogue)
        return
    # float32 takes the library GEMM: tensor cores would round its inputs to TF32.
    kv = F.linear(hidden, weight, epilogue.bias)
    rest = Epilogue(
        k_norm=epilogue.k_norm,
        rotary=epilogue.rotary,
        k_scale=epilogue.k_scale,
        v_scale=epilogue.v_scale,
    )
    kv_epilogue(kv, positions, slots, k_pool, v_pool, epilogue=rest)


class PointerTable:
    """Buffers of several layers and, on CUDA, the device table of their addresses.

    buffers: [rows, ...] tensors of one shape, dtype and stride with contiguous rows. Holds them
    alive. Build it once per pool: building copies to the device, using it does not.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        check_rows("buffers", buffers)
        self.buffers = tuple(buffers)
        self.row_bytes = row_bytes(buffers[0])
        self.rows = buffers[0].shape[0]
        self.stride_bytes = buffers[0].stride(0) * buffers[0].element_size()
        self.device = buffers[0].device
        addresses = [buffer.data_ptr() for buffer in buffers]
        self.alignment_bits = self.stride_bytes | self.row_bytes
        for address in addresses:
            self.alignment_bits |= address
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=self.device)


def gather_rows(pool: PointerTable, slots: torch.Tensor, staging: torch.Tensor) -> None:
    """Row `slots[i]` of every pool buffer to row i of its layer of `staging`, in one launch.

    slots: int64 [n]; a negative one leaves its staging row as it is. staging: uint8
    [layers, rows, row bytes], at least n rows, contiguous rows that lie any stride apart; it may be
    another tensor at every call, because only its address and strides are handed to the kernel.
    Raises ArgumentError; a slot past the end raises IndexError on CPU and is skipped on CUDA.
    """
    check_index("slots", slots)
    check_staging(staging, len(pool.buffers), slots.shape[0], pool.row_bytes)
    require(
        pool.device == slots.device == staging.device, "pool, slots, staging: must be on one device"
    )
    if pool.device.type != "cuda":
        reference.gather_rows(pool.buffers, slots, staging)
        return
    from sglang_hc_kernels import triton_rows

    triton_rows.gather_rows(pool, slots, staging)
