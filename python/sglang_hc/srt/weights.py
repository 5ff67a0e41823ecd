"""What the weights are, in 16 bytes: a path does not say, neither on another host nor next week."""

from __future__ import annotations

import hashlib

import torch

SAMPLES = 1024
"""Elements of each parameter that enter the digest with their places."""


def weights_digest(model: torch.nn.Module) -> str:
    """Digest over every parameter: name, shape, dtype, the sum of its words, and SAMPLES of them.

    The sum sees a change of any single element, the samples see elements that changed places. Reads
    each weight once, where it lies; no defence against somebody who forges weights.
    """
    state = hashlib.blake2b(digest_size=16, person=b"hc weights")
    sums: list[torch.Tensor] = []
    samples: list[torch.Tensor] = []
    for name, parameter in model.named_parameters():
        state.update(f"{name}:{tuple(parameter.shape)}:{parameter.dtype}\n".encode())
        words = _words(parameter.detach())
        sums.append(words.sum(dtype=torch.int64).reshape(1))
        samples.append(words[:: max(1, len(words) // SAMPLES)].to(torch.int64))
    for found in (sums, samples):
        for part in found:
            state.update(part.cpu().numpy().tobytes())
    return state.hexdigest()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers, shape (n,), of the widest size that fits."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    for dtype in (torch.int32, torch.int16):
        if raw.numel() % dtype.itemsize == 0 and raw.storage_offset() % dtype.itemsize == 0:
            return raw.view(dtype)
    return raw
