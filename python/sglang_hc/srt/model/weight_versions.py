"""Which weights a model has now: a digest of their bytes, which is in the namespace of all that
they make (`tree.namespaces`).

Neither a name nor a counter says it: an update may be of some tensors only, may fail half way, and
may bring weights back that were there before. So every tensor is read again where it lies, when an
update is over. On a GPU each row of ROW_WORDS words becomes four sums of products with fixed random
numbers, modulo 2**64: two rows that differ have the same ones with a chance of about 2**-128. That
is no defence against somebody who forges weights.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
import xxhash

from sglang_hc.srt.model.identity import cache_scales
from sglang_hc.srt.ranks.start_group import StartGroup
from sglang_hc.tree.namespaces import weights_of

logger = logging.getLogger(__name__)

ROW_WORDS = 1 << 16
"""Words of 32 bits in one row."""
ROWS_AT_ONCE = 64
"""Rows that are widened together: their words take 32 MiB as 64 bits."""
SUMS = 4

SHOWN_DIGITS = 8

Models = Callable[[], Sequence[torch.nn.Module]]
"""Names them anew each time: an update may put another object in the place of one."""


class WeightVersions:
    """Belongs to the scheduler thread. Where several ranks have parts of a model, `settled` is a
    collective, and the version is of all their parts: a rank whose update failed makes it another.

    name: digest of the weights; None for those that the model was started with. While they change
    it is one that they have no second time. changing: whether they do. changes: how often they
    were settled.
    """

    def __init__(self, group: StartGroup) -> None:
        """group: the ranks of the model."""
        self._group = group
        self._first: str | None = None
        self.name: str | None = None
        self.changing = False
        self.changes = 0
        self._begun = 0
        self._models: Models = list

    @property
    def shown(self) -> str:
        """For people."""
        return "changing" if self.changing else (self.name or "started")[:SHOWN_DIGITS]

    def made(self, namespace: str | None) -> bool:
        """Whether the weights of now made what is in a namespace."""
        return weights_of(namespace) == self.name

    def change(self, models: Models) -> None:
        """The weights of these models are about to change, those of drafts included."""
        self._models = models
        if self._first is None:
            self._first = self._digest()
        self._begun += 1
        self.name, self.changing = f"changing {self._begun}", True

    def settled(self) -> None:
        """They do not change any more."""
        began = time.monotonic()
        found = self._digest()
        self.name = None if found == self._first else found
        self.changing = False
        self.changes += 1
        seconds = time.monotonic() - began
        logger.info("sglang-hc: weights %s, known in %.2f s", self.shown, seconds)

    def _digest(self) -> str:
        return self._group.digest(digest_of(self._models()))


def digest_of(models: Sequence[torch.nn.Module]) -> str:
    """Digest over all tensors of some models, name, shape and dtype included, and the scales of an
    8-bit KV cache: 128 bits in hexadecimal digits. Reads each weight once."""
    state = hashlib.blake2b(digest_size=16, person=b"hc version")
    found: list[bytes | torch.Tensor] = []
    for number, model in enumerate(models):
        state.update(f"{number}:{cache_scales(model)}\n".encode())
        for name, tensor in tensors_of(model):
            state.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
            found.append(_content(tensor.detach()))
    for part in found:
        state.update(part if isinstance(part, bytes) else part.cpu().numpy().tobytes())
    return state.hexdigest()


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a module of the model holds: parameters, buffers, and what was made of them
    when they were loaded, which an update that fails half way leaves behind."""
    seen: set[int] = set()
    for place, module in model.named_modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        for name, tensor in sorted(held.items()):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{place}.{name}", tensor


def _content(tensor: torch.Tensor) -> bytes | torch.Tensor:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return row_sums(raw) if raw.is_cuda else xxhash.xxh3_128_digest(raw.numpy())


def row_sums(raw: torch.Tensor) -> torch.Tensor:
    """(n,) uint8 -> (rows, SUMS) int64, see the module. Zeros stand behind the last byte."""
    size = ROW_WORDS * torch.int32.itemsize
    if raw.storage_offset() % torch.int32.itemsize:
        raw = raw.clone()
    whole = len(raw) // size
    tail = raw.new_zeros(size)
    tail[: len(raw) - whole * size] = raw[whole * size :]
    rows = raw[: whole * size].view(torch.int32).view(whole, ROW_WORDS)
    keys = _keys(raw.device)
    found = []
    for part in (*rows.split(ROWS_AT_ONCE), tail.view(torch.int32)[None]):
        wide = part.to(torch.int64)
        found.append(torch.stack([(wide * key).sum(dim=1) for key in keys], dim=1))
    return torch.cat(found)


@lru_cache(maxsize=8)
def _keys(device: torch.device) -> torch.Tensor:
    """(SUMS, ROW_WORDS) int64, the same everywhere."""
    raw = hashlib.shake_128(b"sglang-hc weights").digest(SUMS * ROW_WORDS * 8)
    keys = np.frombuffer(raw, dtype="<i8").astype(np.int64).reshape(SUMS, ROW_WORDS)
    return torch.from_numpy(keys).to(device)
