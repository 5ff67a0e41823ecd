"""Notes every tensor operation: on which stream, which bytes it reads and writes.

The scheduler runs as it is, on a CPU. Tensors that would lie in host memory on a GPU are watched
like all others, as if the current stream had them. Reading a value (`item`, `tolist`) orders
nothing, although on a GPU it waits for the stream: no order that rests on it is taken for granted.

Each byte range of interest has a shadow: per cell the last write, and per stream the last read
since (as in FastTrack and ThreadSanitizer). An access conflicts with an earlier one when one of
them writes and the earlier does not come before it by the vector clocks (`happens_before.py`).
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from support.happens_before import ACTORS, Actor, Clocks, Use

Index = Sequence[torch.Tensor | None]

ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
"""Operations whose result nobody has written."""


Cells = Any
"""What numpy takes as an index into the cells of a region."""


@dataclass(frozen=True)
class Op:
    """One access, for a report. places: who asked for it, the nearest first."""

    what: str
    stream: str
    places: tuple[str, ...]

    @property
    def ours(self) -> bool:
        """The nearest of SGLang's and this project's functions is this project's."""
        return bool(self.places) and self.places[0].startswith("sglang_hc/")

    def __str__(self) -> str:
        return f"{self.what} on {self.stream}\n      " + "\n      ".join(self.places)


@dataclass(frozen=True)
class Race:
    """Two accesses to the same cells, `second` submitted later, in no order."""

    region: str
    kind: str
    first: Op
    second: Op

    def __str__(self) -> str:
        return f"{self.region}: {self.kind}\n    {self.first}\n    {self.second}"

    @property
    def sites(self) -> tuple[str, ...]:
        """What makes two reports the same mistake."""
        return (self.region, self.kind, *self.first.places[:2], *self.second.places[:2])


class Shadow:
    """The history of a byte range. One cell for all of it, or one for every `cell` bytes."""

    def __init__(self, name: str, base: int, size: int, cell: int | None = None) -> None:
        self.name, self.base, self.size = name, base, size
        self.cell = cell or max(size, 1)
        cells = -(-max(size, 1) // self.cell)
        self._writer = np.full(cells, -1, dtype=np.int16)
        self._written = np.zeros(cells, dtype=np.int64)
        self._write_op = np.zeros(cells, dtype=np.int64)
        self._read = np.zeros((cells, ACTORS), dtype=np.int64)
        self._read_op = np.zeros((cells, ACTORS), dtype=np.int64)

    def access(self, cells: Cells, use: Use, op: int, write: bool) -> tuple[str, int] | None:
        """Take note of an access. Returns (kind, number of the earlier op) where one conflicts."""
        clock = use.actor.clock
        writer = self._writer[cells]
        found = None
        unordered = (writer >= 0) & (self._written[cells] > clock[writer])
        if unordered.any():
            kind = "written twice" if write else "read after a write"
            found = kind, int(self._write_op[cells][unordered][0])
        elif write:
            early = self._read[cells] > clock
            if early.any():
                found = "written after a read", int(self._read_op[cells][early][0])
        if write:
            self._writer[cells] = use.actor.index
            self._written[cells] = use.at
            self._write_op[cells] = op
            self._read[cells] = 0
        else:
            self._read[cells, use.actor.index] = use.at
            self._read_op[cells, use.actor.index] = op
        return found


def places() -> tuple[str, ...]:
    """Functions of SGLang and of this project that are being called, the nearest first."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < 5:
        path = frame.f_code.co_filename
        for package in ("sglang_hc", "sglang"):
            _, there, rest = path.rpartition(f"/{package}/")
            if there:
                found.append(f"{package}/{rest}:{frame.f_lineno} {frame.f_code.co_name}")
                break
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


class Storage(Shadow):
    """A tensor's memory that torch allocated while we watched; one cell."""

    def __init__(self, name: str, base: int, size: int, born: Op, by: Actor) -> None:
        super().__init__(name, base, size)
        self.born, self.by = born, by
        self.foreign: dict[int, tuple[int, Op]] = {}
        """Last use by other streams than the one it was allocated for."""
        self.kept: set[int] = set()
        """Streams that the allocator was told of."""


class Watch(TorchDispatchMode):
    """While entered, compares all accesses. `races` has each mistake once."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self.clocks = clocks
        self.races: list[Race] = []
        self.accesses: dict[str, int] = {}
        """How often each named region was touched: a checker that sees nothing finds nothing."""
        self.read_before: tuple[str, Use] | None = None
        """A region whose reads by the current stream count as made at an earlier step of it."""
        self._seen: set[tuple[str, ...]] = set()
        self._ops: list[Op] = []
        self._regions: list[Shadow] = []
        self._bases: list[int] = []
        self._storages: dict[int, tuple[StorageWeakRef, Storage]] = {}
        self._shared: dict[int, tuple[StorageWeakRef, Storage]] = {}

    # -- what is watched ------------------------------------------------------------------------

    def region(self, name: str, tensor: torch.Tensor, cell: int | None = None) -> None:
        """Watch a long-lived tensor's memory by cells of so many bytes; None: as a whole."""
        assert tensor.is_contiguous()
        self._regions.append(Shadow(name, tensor.data_ptr(), tensor.nbytes, cell))
        self._regions.sort(key=lambda region: region.base)
        self._bases = [region.base for region in self._regions]

    @property
    def names(self) -> set[str]:
        """Of the regions."""
        return {region.name for region in self._regions}

    def keep(self, tensor: torch.Tensor, stream: Actor) -> None:
        """The allocator is told that `stream` uses the tensor (`Tensor.record_stream`)."""
        found = self._shadow_of(tensor)
        if isinstance(found, Storage):
            found.kept.add(stream.index)

    # -- what happens ---------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        shape = _shape(func)
        if not shape.view:
            use = self.clocks.submit()
            op = Op(str(func), use.actor.name, places())
            number = len(self._ops)
            self._ops.append(op)
            tensors = list(shape.tensors(args, kwargs or {}))
            known = set()
            for tensor, write, index in tensors:
                if tensor.numel():
                    known.add(tensor.untyped_storage()._cdata)
                    self._touch(tensor, index, use, number, write)
            for tensor in _flat(out):
                if tensor.numel() and tensor.untyped_storage()._cdata not in known:
                    self._born(tensor, op, use)
                    if not shape.allocates:
                        self._touch(tensor, None, use, number, True)
            self._dead()
        return out

    def on_host(self, what: str, tensor: torch.Tensor, write: bool) -> None:
        """The host, or a thread it handed the work to, reads or writes a watched tensor itself."""
        use = self.clocks.on_host()
        self._ops.append(Op(what, use.actor.name, places()))
        self._touch(tensor, None, use, len(self._ops) - 1, write)

    def _touch(
        self, tensor: torch.Tensor, index: Index | None, use: Use, number: int, write: bool
    ) -> None:
        shadow = self._shadow_of(tensor)
        if shadow is None:
            return
        self.accesses[shadow.name] = self.accesses.get(shadow.name, 0) + 1
        if self.read_before is not None and not write and shadow.name == self.read_before[0]:
            use = self.read_before[1]
        found = shadow.access(cells(shadow, tensor, index), use, number, write)
        op = self._ops[number]
        if isinstance(shadow, Storage) and use.actor is not shadow.by:
            shadow.foreign[use.actor.index] = use.at, op
            key = tensor.untyped_storage()._cdata
            self._shared[key] = self._storages[key]
        if found is not None:
            self._report(Race(shadow.name, found[0], self._ops[found[1]], op))

    def _report(self, race: Race) -> None:
        if race.sites not in self._seen:
            self._seen.add(race.sites)
            self.races.append(race)

    def _shadow_of(self, tensor: torch.Tensor) -> Shadow | None:
        address = tensor.data_ptr()
        at = bisect_right(self._bases, address) - 1
        if at >= 0 and address < self._regions[at].base + self._regions[at].size:
            return self._regions[at]
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def _born(self, tensor: torch.Tensor, op: Op, use: Use) -> None:
        storage = tensor.untyped_storage()
        name = f"made in {op.places[0].rpartition(':')[0] if op.places else '?'}"
        made = Storage(name, storage.data_ptr(), storage.nbytes(), op, use.actor)
        self._storages[storage._cdata] = StorageWeakRef(storage), made
        if len(self._storages) % 512 == 0:
            gone = [key for key, (ref, _) in self._storages.items() if ref.expired()]
            for key in gone:
                del self._storages[key]

    def _dead(self) -> None:
        """Memory that Python gave back: the allocator may hand it out on its own stream at once."""
        gone = [key for key, (ref, _) in self._shared.items() if ref.expired()]
        for key in gone:
            _, made = self._shared.pop(key)
            for actor, (at, op) in made.foreign.items():
                early = at > made.by.clock[actor] and actor not in made.kept
                if early and (op.ours or made.born.ours):
                    self._report(Race(made.name, "freed while in use", made.born, op))


# -- which bytes --------------------------------------------------------------------------------


def cells(shadow: Shadow, tensor: torch.Tensor, index: Index | None) -> Cells:
    """Cells of a region that a tensor covers; with `index`, those its elements [index] cover."""
    if shadow.cell >= shadow.size:
        return slice(0, 1)
    strides = [stride * tensor.itemsize for stride in tensor.stride()]
    dims = list(zip(tensor.shape, strides, strict=True))
    starts = np.array([tensor.data_ptr() - shadow.base], dtype=np.int64)
    if index is not None and all(part is not None for part in index):
        parts = _integers(index)
        for part, (size, stride) in zip(parts, dims, strict=False):
            starts = starts + (part % size) * stride
        dims = dims[len(parts) :]
    span = tensor.itemsize
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if stride == span:
            span *= size
        elif size > 1:
            starts = (starts[:, None] + np.arange(size) * stride).ravel()
    first, last = starts // shadow.cell, (starts + span - 1) // shadow.cell
    if len(starts) == 1:
        return slice(int(first[0]), int(last[0]) + 1)
    wide = int((last - first).max()) + 1
    return np.unique(np.minimum(first[:, None] + np.arange(wide), last[:, None]))


def _integers(index: Index) -> list[np.ndarray[Any, Any]]:
    """Index tensors of the first dimensions, broadcast to one length."""
    found: list[torch.Tensor] = []
    for part in index:
        assert part is not None
        found += list(part.nonzero(as_tuple=True)) if part.dtype == torch.bool else [part]
    return [part.numpy().ravel() for part in torch.broadcast_tensors(*found)]


# -- what an operation does ---------------------------------------------------------------------


class _Shape:
    """Which arguments of an operation it reads and writes, from torch's own declaration."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        name = schema.name.removeprefix("aten::")
        self.allocates = name in ALLOCATES
        self.view = bool(schema.returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        self._arguments = [
            (i, a.name, a.alias_info is not None and a.alias_info.is_write)
            for i, a in enumerate(schema.arguments)
        ]
        self._by_rows = name in ("index_select", "index_copy_", "index_fill_", "index_add_")
        self._by_index = name in ("index", "index_put_", "index_put", "_index_put_impl_")

    def tensors(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Iterator[tuple[torch.Tensor, bool, Index | None]]:
        """(tensor, written, index): each that is touched; the first one by index, if any."""
        for i, name, write in self._arguments:
            value = args[i] if i < len(args) else kwargs.get(name)
            index = self._index(args) if i == 0 else None
            for tensor in _flat(value):
                yield tensor, write, index

    def _index(self, args: Sequence[Any]) -> Index | None:
        if self._by_index:
            return list(args[1])
        if self._by_rows and args[1] == 0:
            return [args[2]]
        return None


@lru_cache(None)
def _shape(func: Any) -> _Shape:
    return _Shape(func)


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
