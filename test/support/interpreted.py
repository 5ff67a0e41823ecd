"""Runs models' projections with the kernels in Triton's interpreter; a process of its own.

    PYTHONPATH=python:test:sgl-kernel-ext/python TRITON_INTERPRET=1 \
        python -m support.interpreted MODEL ...

The interpreter must be chosen before Triton is imported. Prints JSON by model: which ways
there are, which agree with the model's own, and which are left when a kernel is wrong.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from support.core import Core, run_in_child


def interpreted() -> SimpleNamespace:
    """The package's interface, with Triton on CPU tensors instead of its torch reference."""
    from sglang_hc_kernels import (
        Epilogue,
        KNorm,
        PointerTable,
        Rotary,
        triton_kv,
        triton_project,
        triton_rows,
    )  # fmt: skip

    def kv_epilogue(*tensors: Any, epilogue: Epilogue) -> None:
        triton_kv.kv_epilogue(*tensors, epilogue)

    def project_kv(*tensors: Any, epilogue: Epilogue) -> None:
        triton_project.project_kv(*tensors, epilogue)

    return SimpleNamespace(
        Epilogue=Epilogue, KNorm=KNorm, Rotary=Rotary, kv_epilogue=kv_epilogue,
        project_kv=project_kv, PointerTable=PointerTable, gather_rows=triton_rows.gather_rows,
    )  # fmt: skip


def bytes_stay(pool: Any, slots: Any) -> bool:
    """KV rows go through SGLang's pool write as they are, in every layer."""
    import torch

    from sglang_hc.srt.model.kv_pool import KvPoolRows

    rows = KvPoolRows(pool, None)
    same = True
    for layer in range(rows.num_layers):
        parts = [
            torch.randint(0, 256, (slots.numel(), width), dtype=torch.uint8)
            for width in rows.part_bytes
        ]
        before = [part.clone() for part in rows.rows(layer)]
        rows.write_kv_by_sglang(layer, parts, slots)
        for part, old, new in zip(rows.rows(layer), before, parts, strict=True):
            old[slots] = new
            same &= torch.equal(part, old)
    return same


def gathers(pool: Any, slots: Any) -> dict[str, Any]:
    """Reads of the KV pool by both ways, with a ring for `rows` rows in a piece; then with kernels
    that are wrong."""
    import torch
    from sglang_hc_kernels import choice

    from sglang_hc.capture.direct import DeviceRing
    from sglang_hc.srt.model.kv_pool import KvPoolRows, gather

    rows = KvPoolRows(pool, None)
    layers = range(1, rows.num_layers)
    kernels = interpreted()
    made: list[int] = []
    timed: list[tuple[str, int]] = []

    def table(buffers: Any) -> Any:
        made.append(len(buffers))
        return kernels.PointerTable(buffers)

    def seconds(work: Any) -> float:
        name = "torch" if work.args[0] is gather else "kernel"
        work.func(lambda pool, layers, slots, targets, at: timed.append((name, len(slots))))
        return 1.0 if name == "torch" else 0.5

    def chosen(piece: int, **changed: Any) -> str:
        ring = DeviceRing(4 * piece * len(layers) * sum(rows.part_bytes), torch.device("cpu"))
        kernel = choice.KernelGather(SimpleNamespace(**vars(kernels) | changed))
        ways = {"torch": gather, "kernel": kernel}
        return choice.choose_gather(rows, layers, ways, slots, ring, seconds)

    def one_row_on(table: Any, slots: Any, staging: Any) -> None:
        kernels.gather_rows(table, slots.roll(1), staging)

    def fails(*_: Any) -> None:
        raise RuntimeError("no such instruction")

    found = {"chosen": chosen(20, PointerTable=table), "tables": made, "timed": sorted(set(timed))}
    found["when_wrong"] = chosen(20, gather_rows=one_row_on)
    found["when_it_fails"] = chosen(20, gather_rows=fails)
    found["all_slots"] = chosen(10**4)
    ring = DeviceRing(1 << 20, torch.device("cpu"))
    found["served"] = getattr(
        choice.fastest_gather(rows, layers, slots, ring), "__name__", "kernel"
    )
    # What a commit calls: rows of some layers into the middle of its target.
    rows = KvPoolRows(pool, None, read=choice.KernelGather(kernels))
    target = [
        torch.full((len(layers), 9, width), 7, dtype=torch.uint8) for width in rows.part_bytes
    ]
    wanted = [part.clone() for part in target]
    rows.gather(layers, slots[3:8], target, 2)
    gather(rows, layers, slots[3:8], wanted, 2)
    same = all(torch.equal(a, b) for a, b in zip(target, wanted, strict=True))
    found["into_the_middle"] = same and any(bool(part.ne(7).any()) for part in target)
    return found


def scratch_is_gone(runner: Any, layers: list[Any]) -> bool:
    """What a measurement had on the device goes with it, without the garbage collector: SGLang
    sizes its KV pool by what is free right afterwards."""
    import gc
    import weakref

    from sglang_hc.restore.probe import probe
    from sglang_hc.srt.model.scratch_layer import subject_of
    from sglang_hc.srt.ranks.start_group import StartGroup

    gc.collect()
    gc.disable()
    subject = subject_of(runner, layers, True, StartGroup(0, 1))
    rows = [part for parts in subject.sink._rows for part in parts]
    left = [weakref.ref(thing) for thing in (subject, subject.sink, *rows)]
    probe(subject, "here")
    del subject, rows
    gone = [ref() is None for ref in left]
    gc.enable()
    return len(gone) >= 4 and all(gone)


def found_of(model: str) -> dict[str, Any]:
    core = Core("--max-total-tokens", "256", "--dtype", "float32", "--hc-disable", model=model)
    import torch
    from sglang_hc_kernels import choice

    from sglang_hc.srt.model import families, projection

    runner = core.scheduler.tp_worker.model_runner
    family = families.family_of(runner.model)
    assert family is not None
    layers = families.layer_modules(runner.model, family)
    context = runner.model_config.context_len
    slots = core.scheduler.token_to_kv_pool_allocator.alloc(choice.CHECKED_ROWS)
    kernels = interpreted()
    timed: list[str] = []

    def seconds(work: Any) -> float:
        way = work.args[0]
        timed.append(getattr(way, "func", way).__name__.removeprefix("by_"))
        return 1.0 - len(timed) / 1000  # the last one is the fastest

    ways = choice.projections(layers, context, kernels)
    chosen = choice.choose_projection(
        runner.token_to_kv_pool, layers, ways, slots.to(torch.int64), context, seconds
    )
    found = {"ways": list(ways), "agree": sorted(set(timed)), "chosen": chosen}

    def off(*tensors: Any, epilogue: Any) -> None:
        other = replace(epilogue, k_norm=None, rotary=None, bias=None)
        kernels.kv_epilogue(tensors[0] + 0.01, *tensors[1:], epilogue=other)

    wrong = SimpleNamespace(**{**vars(kernels), "kv_epilogue": off})
    timed.clear()
    ways = choice.projections(layers, context, wrong)
    choice.choose_projection(
        runner.token_to_kv_pool, layers, ways, slots.to(torch.int64), context, seconds
    )
    found["agree_when_wrong"] = sorted(set(timed))
    found["ways_beyond_the_table"] = list(choice.projections(layers, 10**9, kernels))
    # The server's own entrance; on a CPU the package's calls are torch's.
    served = projection.projection_for(
        runner.token_to_kv_pool, layers, slots.to(torch.int64), context
    )
    found["served"] = getattr(served, "func", served).__name__
    layers[0].models_product = True
    found["ways_where_bits_matter"] = list(choice.projections(layers, context, kernels))
    layers[0].models_product = False
    # What the chosen way is run with before it serves, so that nothing is left to compile.
    ways = choice.projections(layers, context, kernels)
    ran: list[int] = []

    def counted(*args: Any) -> None:
        ran.append(len(args[-1]))
        choice.by_fused(kernels, *args)

    ways["fused"] = counted
    found["chosen_when_counted"] = choice.choose_projection(
        runner.token_to_kv_pool, layers, ways, slots.to(torch.int64), context,
        lambda work: 0.0 if work.args[0] is counted else 1.0, (1, 7, 900),
    )  # fmt: skip
    found["warmed_rows"] = ran[:3]
    found["scratch_is_gone"] = scratch_is_gone(runner, layers)
    found["gathers"] = gathers(runner.token_to_kv_pool, slots.to(torch.int64))
    found["bytes_stay"] = bytes_stay(runner.token_to_kv_pool, slots.to(torch.int64))
    return found


if __name__ == "__main__":
    print("RESULT " + json.dumps({model: run_in_child(found_of, model) for model in sys.argv[1:]}))
