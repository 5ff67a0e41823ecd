"""The ranks of one model while they start: what they have to agree on.

A rank is a process with a part of every layer (`--tp-size`), with some of the layers (`--pp-size`:
a stage of the pipeline), or both. Each rank has its own memory and its own clock, yet all of them
must build tiers of as many blocks, with the same plan and the same costs, and run the same number
of collectives meanwhile. What depends on the rank is exchanged here, over SGLang's gloo group of
the CPUs. Every call is a collective: all ranks make the same calls in the same order. While
requests are served, ranks agree in another way (`sglang_hc.ranks`), which costs a quiet pass
nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from sglang_hc.errors import ConfigError
from sglang_hc.srt.binding import parallel

T = TypeVar("T")


@dataclass(frozen=True)
class StartGroup:
    """Rank `rank` of `size`. cpu_group: a gloo group of all of them; not looked at for one rank."""

    rank: int
    size: int
    cpu_group: Any = None

    @classmethod
    def of_model(cls) -> StartGroup:
        """All ranks of the model, those of the first pipeline stage first."""
        stage_size = parallel.tp_size()
        size = stage_size * parallel.pp_size()
        if size == 1:
            return cls(0, 1)
        rank = parallel.pp_rank() * stage_size + parallel.tp_rank()
        return cls(rank, size, parallel.world_cpu_group())

    @classmethod
    def of_stage(cls) -> StartGroup:
        """The ranks that have this rank's layers, each its part of them."""
        size = parallel.tp_size()
        if size == 1:
            return cls(0, 1)
        return cls(parallel.tp_rank(), size, parallel.tp_group().cpu_group)

    def each(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks. The value is pickled."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.cpu_group)
        return cast("list[T]", found)

    def first(self, make: Callable[[], T]) -> T:
        """What `make` gives on rank 0, where alone it is called. Raises on every rank the
        ConfigError that it raises there."""
        if self.size == 1:
            return make()
        value: object = None
        if self.rank == 0:
            try:
                value = make()
            except ConfigError as error:
                value = error
        value = self.each(value)[0]
        if isinstance(value, ConfigError):
            raise value
        return cast("T", value)

    def least(self, value: int) -> int:
        return min(self.each(value))

    def most(self, value: float) -> float:
        return max(self.each(value))

    def reason(self, found: str | None) -> str | None:
        """The reason of the first rank that has one: what one rank cannot do, no rank does."""
        return next((reason for reason in self.each(found) if reason is not None), None)

    def digest(self, own: str) -> str:
        """One digest of all ranks' own ones; for a single rank its own."""
        if self.size == 1:
            return own
        text = "\x00".join(self.each(own)).encode()
        return hashlib.blake2b(text, digest_size=16, person=b"hc ranks").hexdigest()
