"""SGLang's own kernels of the sparse-attention index, in Triton's interpreter, beside our rows; a
process of its own, because the interpreter must be chosen before Triton is imported.

    PYTHONPATH=python:test TRITON_INTERPRET=1 python -m support.interpreted_index

Prints JSON: whether we read what they write, and they what we write.
"""

from __future__ import annotations

import json

import torch

from sglang_hc.srt.model.kv_pool import KvPoolRows
from support.sparse_kernels import DIM, PAGE
from support.sparse_pool import pool_of

SLOTS, LAYER = [64, 70, 255, 3, 128], 1


def main() -> dict[str, bool]:
    pool, count = pool_of(), len(SLOTS)
    keys, scales = torch.randn(count, DIM).to(torch.float8_e4m3fn), torch.rand(count, 1)
    written = [keys.view(torch.uint8), scales.view(torch.uint8)]
    pool.set_index_k_scale_buffer(LAYER, torch.tensor(SLOTS), keys, scales)
    rows = KvPoolRows(pool, None)
    saved = [torch.zeros((1, count, width), dtype=torch.uint8) for width in rows.part_bytes]
    rows.gather([LAYER], torch.tensor(SLOTS), saved, 0)
    # To the first slots of another page, whose rows SGLang reads by its number.
    rows.write_kv(LAYER, [part[0] for part in saved], torch.arange(3 * PAGE, 3 * PAGE + count))
    length, pages = torch.tensor([count]), torch.tensor([[3]], dtype=torch.int32)
    read = pool.get_index_k_scale_buffer(LAYER, length, pages, count, count)
    return {
        "we_read": all(torch.equal(part[0], a) for part, a in zip(saved[1:], written, strict=True)),
        "they_read": all(map(torch.equal, (part.view(torch.uint8) for part in read), written)),
    }


if __name__ == "__main__":
    print(json.dumps(main()))
