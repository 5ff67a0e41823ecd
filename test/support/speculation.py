"""SGLang's speculative decoding on a machine without an accelerator.

Its workers, batches, allocations and bookkeeping run as they are. What its wheel has for a GPU only
is replaced by torch (`speculation_kernels.py`). The corpus that NGRAM proposes from, which would
have to be compiled, is replaced by `Oracle`: it proposes trees of which a known path is right.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from sglang_hc.srt.engine import cpu
from support import speculation_kernels as kernels
from support.core import Core

ROWS = 6
"""Tokens that a verify pass computes for each request."""

NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(ROWS))

CHAIN = (*NGRAM, "--speculative-ngram-max-bfs-breadth", "1")
"""Without branches, which SGLang allows with larger pages."""


class Oracle:
    """Proposes trees in the place of SGLang's n-gram corpus.

    What follows every sequence is taught. Where a tree's right path lies and how long it is depends
    on the sequence's length alone, so two engines propose the same for the same sequence.
    """

    taught: list[list[int]] = []  # noqa: RUF012  SGLang makes the object; tests teach the class

    def __init__(self, *, draft_token_num: int, max_bfs_breadth: int, **_: Any) -> None:
        self._rows, self._is_chain = draft_token_num, max_bfs_breadth == 1

    def batch_get(
        self, rids: list[str], ends: list[list[int]], lengths: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (requests * rows,) and masks (requests * rows * rows,), as SGLang's corpus."""
        trees = [self._tree(end, length) for end, length in zip(ends, lengths, strict=True)]
        tokens = np.concatenate([tree[0] for tree in trees])
        return tokens, np.concatenate([tree[1].reshape(-1) for tree in trees])

    def _tree(self, end: list[int], length: int) -> tuple[np.ndarray, np.ndarray]:
        rng = random.Random(length)
        right = self._right(end, length)[: rng.randrange(self._rows)]
        wrong = rng.randrange(self._rows - len(right))
        tokens, parents = [end[-1]], [-1]

        def chain(added: Sequence[int]) -> None:
            parent = 0
            for token in added:
                parents.append(parent)
                parent = len(tokens)
                tokens.append(token)

        def other(count: int) -> list[int]:
            return [rng.randrange(900, 1000) for _ in range(count)]

        if self._is_chain:
            chain([*right, *other(self._rows - 1 - len(right))])
        else:
            chain(other(wrong))  # before the right path, whose rows are then not the first ones
            chain(right)
            chain(other(self._rows - len(tokens)))
        mask = np.zeros((self._rows, self._rows), dtype=np.int64)
        for row, parent in enumerate(parents):
            if parent >= 0:
                mask[row] = mask[parent]
            mask[row, row] = 1
        return np.asarray(tokens, dtype=np.int64), mask

    def _right(self, end: list[int], length: int) -> list[int]:
        for known in self.taught:
            if known[length - len(end) : length] == end:
                return known[length : length + self._rows - 1]
        return []

    def _nothing(self, *_: Any) -> None:
        return None

    batch_put = erase_match_state = synchronize = reset = _nothing


def helped(original: Any, *args: Any, **more: Any) -> Any:
    """In place of SGLang's way from proposed tokens to a tree: where they are a chain, the first
    ones of it are right, as many as the sequence's length says."""
    bonus, _, _, tokens, lengths, _, topk, *_ = args
    for row, length in enumerate(lengths.tolist() if topk == 1 else ()):
        for known in Oracle.taught:
            right = known[length + 1 : length + 1 + length % (tokens.shape[1] + 1)]
            if right and known[length] == int(bonus[row]):
                tokens[row, : len(right)] = torch.tensor(right)
    return original(*args, **more)


def install(overlap: bool) -> None:
    """Put the stand-ins in place, in a child of `run_in_child`. What SGLang asks `_is_cpu` of has
    kernels for its own CPU build, whose names and arguments the stand-ins have.

    overlap: one pass is launched before the result of the last one is known, as on a GPU; SGLang
    switches that off for speculative decoding on a CPU.
    """
    os.environ["SGLANG_NATIVE_MOVE_KV_CACHE"] = "1"
    import torch._dynamo

    torch.cuda.synchronize = lambda *_: None  # SGLang's models call it whatever the device is
    torch._dynamo.config.disable = True  # compiling how trees grow would take half a minute
    for name in ("sgl_kernel", "sgl_kernel.speculative"):
        sys.modules[name] = ModuleType(name)
    ops = {
        "assign_draft_cache_locs_contiguous_cpu": kernels.assign_draft_locs,
        "assign_extend_cache_locs_cpu": kernels.assign_extend_locs,
        "assign_req_to_token_pool_cpu": kernels.write_locs,
        "fill_accept_out_cache_loc_cpu": kernels.fill_accepted,
        "fill_bonus_tokens_cpu": kernels.fill_bonus,
        "sgl_build_tree_kernel_efficient_cpu": kernels.build_tree,
        "sgl_verify_tree_greedy_cpu": kernels.verify_greedy,
    }
    sys.modules["sgl_kernel.speculative"].__dict__.update(
        reconstruct_indices_from_tree_mask=kernels.reconstruct_indices
    )
    for name in (
        "sglang.kernels.ops.speculative.cache_locs",
        "sglang.kernels.ops.speculative.eagle",
        "sglang.kernels.ops.speculative.spec_tree",
        "sglang.srt.mem_cache.allocation",
        "sglang.srt.speculative.eagle_utils",
        "sglang.srt.speculative.eagle_worker_common",
        "sglang.srt.speculative.eagle_worker_v2",
        "sglang.srt.speculative.ngram_worker",
    ):
        importlib.import_module(name).__dict__.update(ops, _is_cpu=True)
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.managers import overlap_utils
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.speculative import ngram_worker
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    cpu.check_speculation = lambda args: None
    if overlap:
        speculative_hook._disable_overlap_schedule_for_cpu = lambda args: None
        overlap_utils.gather_spec_extras = kernels.gather_extras
        torch.Tensor.record_stream = lambda self, stream: None  # a CPU has no streams
    DraftBackendFactory.create_decode_backend = lambda self: kernels.draft_steps(
        self.draft_model_runner, self.speculative_num_steps, self.topk
    )
    DraftBackendFactory.create_draft_extend_backend = lambda self: kernels.draft_extension(
        self.draft_model_runner
    )
    ngram_worker.NgramCorpus = Oracle
    memory_pool.copy_all_layer_kv_cache_func = lambda *_: None  # runs once, to compile itself
    TorchNativeAttnBackend.forward_extend = kernels.with_verification(
        TorchNativeAttnBackend.forward_extend
    )
    _sample_as_on_a_gpu()


def _sample_as_on_a_gpu() -> None:
    """On a CPU SGLang verifies by the most likely token, whatever temperature was asked for
    (`eagle_sample`); here by its code for GPUs, with coins that depend on the position alone."""
    from sglang.srt.speculative import eagle_utils

    eagle_utils.tree_speculative_sampling_target_only = kernels.verify_sampled
    eagle_utils._verify_coins = kernels.coins_by_position
    throw_known_coins()


def throw_known_coins() -> None:
    """Sampled tokens depend on the place in the sequence, not on chance."""
    from sglang.srt.layers import sampler

    sampler.sampling_from_probs_torch = kernels.sample_by_position


class SpeculativeCore(Core):
    """A `Core` that decodes speculatively.

    flags: with those of an algorithm. taught: whole sequences that its oracle knows. overlap: see
    `install`.
    """

    def __init__(
        self, *flags: str, taught: Sequence[list[int]] = (), overlap: bool = False, **more: Any
    ) -> None:
        install(overlap)
        Oracle.taught = list(taught)
        super().__init__(*flags, **more)
        self.proposed: list[list[int]] = []
        """Tokens of every verify pass."""
        self.accepted: list[list[list[int]]] = []
        """Their rows that were accepted: for each request a path, -1 behind its end."""
        from sglang.srt.speculative import eagle_worker_common, ngram_worker

        for module in (eagle_worker_common, ngram_worker):
            module.eagle_sample = self._noting(module.eagle_sample)
        if taught:
            build = eagle_worker_common.build_tree_kernel_efficient
            eagle_worker_common.build_tree_kernel_efficient = partial(helped, build)

    def verified(self, rid: str) -> tuple[int, dict[int, int]]:
        """Verify passes of a finished request, and how many of them accepted so many proposals."""
        req = self.requests[rid]
        counts = enumerate(req.spec_correct_drafts_histogram)
        return req.spec_verify_ct, {drafts: count for drafts, count in counts if count}

    def draft_kv(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """As `kv`, of the draft model's layers, as bytes."""
        from sglang_hc.srt.model.kv_pool import KvPoolRows
        from sglang_hc.srt.model.window_pool import full_attention

        pool = self.scheduler.draft_worker.draft_worker.draft_runner.token_to_kv_pool
        rows, slots = KvPoolRows(full_attention(pool), None), self.slots(tokens).long()
        found = [
            torch.zeros((rows.num_layers, len(slots), width), dtype=torch.uint8)
            for width in rows.part_bytes
        ]
        rows.gather(range(rows.num_layers), slots, found, 0)
        return [layer.numpy() for part in found for layer in part]

    def _noting(self, original: Any) -> Any:
        from sglang.srt.speculative import eagle_utils

        def eagle_sample(verify_input: Any, batch: Any, *rest: Any, **more: Any) -> Any:
            self.proposed.append(verify_input.draft_token.tolist())
            eagle_utils._is_cpu = batch.sampling_info.is_all_greedy
            found = original(verify_input, batch, *rest, **more)
            eagle_utils._is_cpu = True
            self.accepted.append(found[2].tolist())
            return found

        return eagle_sample
