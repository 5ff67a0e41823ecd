"""What the tiers cost the scheduler thread, in one process without a model.

    python -m benchmark.hooks.run [--out benchmark/results/cpu-hooks.json]

Workloads:
  idle    everything the hooks do in one decode pass with nothing to restore, stage or file
  match   match_prefix of a 10,000-token request against SGLang's own tree, arms interleaved
  evict   one leaf leaves a full device of 1,000 conversations, against stock, arms interleaved
  queue   a pass over 1,000 waiting requests of 32 blocks each, without a disk and with one, and
          what it costs beyond that to bring one request's blocks to the host (waiting.py)
  memory  the block index at 100,000 blocks, counted by tracemalloc

Host and device sizes are in tokens; chunks of the toy model are as small as chunks can be, because
no state is moved here.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from benchmark.harness import machine
from benchmark.hooks.parts import cache_over, fill, microseconds, stock_cache, summary, tiers_of
from benchmark.hooks.waiting import BLOCKS, WAITING, measure_queue
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.eviction import LruPolicy
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.queue.requests import Serial
from sglang_hc.srt.engine import guard
from sglang_hc.srt.tree.device_eviction import DeviceOrder
from sglang_hc.srt.tree.tree_backend import HcRadixCache
from sglang_hc.tree.block_tree import BlockTree
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import TOKEN_BYTES, Prefix, pack_tokens

TOKENS = 10_000
TURN = 200
LEAVES = 1000
AGAIN = "a waiting request matched again"


def measure_idle(passes: int) -> dict[str, Any]:
    """A decode pass as the scheduler makes it: events, start of restorations, capture."""
    rows: dict[str, Any] = {}
    for running in (1, 16):
        cache = cache_over(tiers_of(64))
        requests = [
            SimpleNamespace(
                rid=f"r{n}", input_embeds=None, positional_embed_overrides=None, extra_key=None
            )
            for n in range(running)
        ]
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            seq_lens_cpu=torch.full((running,), 500),
        )

        def one_pass(
            cache: HcRadixCache = cache, batch: Any = batch, requests: list[Any] = requests
        ) -> None:
            cache.check_hicache_events()
            cache.ready_to_load_host_cache()
            cache.after_forward(batch, requests)

        rows[f"{running} running"] = summary([microseconds(one_pass) for _ in range(passes)])
    return rows


def caches(on_host: bytes) -> tuple[UnifiedRadixCache, HcRadixCache]:
    """Both arms, the host tier with a path in it."""
    ours = cache_over(tiers_of(512))
    if on_host:
        fill(ours.tiers, None, on_host)
    return stock_cache(), ours


def grow(cache: UnifiedRadixCache, tokens: array[int], start: int, stop: int) -> None:
    """The device holds a conversation as turns of TURN tokens leave it."""
    for end in range(start, stop + 1, TURN):
        cache.insert(InsertParams(key=RadixKey(tokens[:end]), value=torch.arange(end)))


def request() -> Any:
    return SimpleNamespace(rid="r0", session=None)


def timed_match(
    cache: UnifiedRadixCache, tokens: array[int], on_device: int, on_host: int, req: Any
) -> float:
    """Microseconds of one match; checks what it found. `on_host` counts for our arm only."""
    params = MatchPrefixParams(key=RadixKey(tokens), req=req)
    start = time.perf_counter_ns()
    result = cache.match_prefix(params)
    taken = (time.perf_counter_ns() - start) / 1000
    assert result.device_prefix_len == on_device
    if isinstance(cache, HcRadixCache):
        assert result.host_hit_length == max(on_host - on_device, 0)
    return taken


def measure_match(rounds: int) -> list[dict[str, Any]]:
    """Requests of about 10,000 tokens, by where their history is. Both arms take turns."""
    rng = random.Random(0)
    tokens = array("q", [rng.randrange(100_000) for _ in range(TOKENS)])
    packed = pack_tokens(tokens)
    history = TOKENS - TURN
    cases = [compared("each turn of a chat, 8,000 to 12,000 tokens", chat_turns(rounds))]
    for name, on_device, on_host in (
        (AGAIN, history, history),
        ("the whole prompt is on the device", TOKENS, TOKENS),
        ("on the device, nothing in the host tier", history, 0),
        ("in the host tier only", 0, history),
    ):
        arms = caches(packed[: on_host * TOKEN_BYTES])
        for cache in arms:
            grow(cache, tokens, TURN, on_device)
        times: list[tuple[float, float]] = []
        same = name == AGAIN
        waits = {id(cache): request() for cache in arms}
        for number in range(rounds):
            order = arms if number % 2 else arms[::-1]
            reqs = [waits[id(cache)] if same else request() for cache in order]
            pair = [
                timed_match(cache, tokens, on_device, on_host, req)
                for cache, req in zip(order, reqs, strict=True)
            ]
            times.append((pair[0], pair[1]) if number % 2 else (pair[1], pair[0]))
        cases.append(compared(name, times))
    return cases


def chat_turns(rounds: int) -> list[tuple[float, float]]:
    """(stock, ours) of the one match per turn, then the turn is kept in both tiers."""
    times: list[tuple[float, float]] = []
    rng = random.Random(1)
    while len(times) < rounds:
        tokens = array("q", [rng.randrange(100_000) for _ in range(12_000)])
        packed = pack_tokens(tokens)
        stock, ours = arms = caches(packed[: 8_000 * TOKEN_BYTES])
        for cache in arms:
            grow(cache, tokens, TURN, 8_000)
        for known in range(8_000, 12_000, TURN):
            asked = tokens[: known + TURN]
            order = arms if len(times) % 2 else arms[::-1]
            taken = {cache: timed_match(cache, asked, known, known, request()) for cache in order}
            times.append((taken[stock], taken[ours]))
            for cache in arms:
                grow(cache, tokens, known + TURN, known + TURN)
            fill(ours.tiers, None, packed[: (known + TURN) * TOKEN_BYTES])
    return times


def compared(case: str, times: list[tuple[float, float]]) -> dict[str, Any]:
    stock, ours = ([pair[arm] for pair in times] for arm in (0, 1))
    medians = statistics.median(stock), statistics.median(ours)
    return {
        "case": case,
        "stock": summary(stock),
        "ours": summary(ours),
        "ratio": round(medians[1] / medians[0], 3),
        "extra_us": round(medians[1] - medians[0], 2),
    }


def measure_evict(rounds: int) -> list[dict[str, Any]]:
    """A conversation comes, another has to leave. All have copies below the device."""
    return [
        compared(f"{waiting} of them are waited for", evictions(waiting, rounds))
        for waiting in (0, 100)
    ]


def evictions(waiting: int, rounds: int) -> list[tuple[float, float]]:
    """(stock, ours) of one call each, the longest unused `waiting` conversations needed."""
    window = LookAhead()
    tiers = tiers_of(64)
    order = DeviceOrder(tiers.host.tree.fingerprint, window)
    stock, ours = stock_cache(), cache_over(tiers, order)
    arms: list[UnifiedRadixCache] = [stock, ours]
    for cache in arms:
        for number in range(LEAVES):
            arrive(cache, number)
    for number in range(waiting):
        needs = tiers.host.tree.identities(Prefix(None, pack_tokens(conversation(number))))
        request = Serial(number)
        window.update([*window.order, request], waiting, {request: needs}.__getitem__)
    times = []
    for number in range(rounds):
        taken: dict[int, float] = {}
        for cache in arms if number % 2 else arms[::-1]:
            arrive(cache, LEAVES + number)
            start = time.perf_counter_ns()
            cache.evict(EvictParams(num_tokens=1))
            taken[id(cache)] = (time.perf_counter_ns() - start) / 1000
        times.append((taken[id(stock)], taken[id(ours)]))
    return times


def conversation(number: int) -> array[int]:
    return array("q", range(number * TURN, (number + 1) * TURN))


def arrive(cache: UnifiedRadixCache, number: int) -> None:
    key = RadixKey(conversation(number))
    cache.insert(InsertParams(key=key, value=torch.arange(TURN)))


def measure_memory(blocks: int) -> dict[str, Any]:
    """Python memory of tree, slots and eviction policy; the pool's bytes are not counted."""
    rng = random.Random(0)
    paths = 100  # conversations of a thousand blocks each would be as dear; nothing is shared
    gc.collect()
    tracemalloc.start()
    host = HostTier(BlockTree(b"f" * 16), blocks, LruPolicy())
    for _ in range(paths):
        node = host.tree.root(None)
        for _ in range(blocks // paths):
            tokens = pack_tokens([rng.randrange(100_000) for _ in range(BLOCK_TOKENS)])
            slot = host.stage(0.0)
            assert slot is not None
            node = host.publish(node, tokens, slot, 0.0).node
            node.ready = True
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert host.published_blocks == blocks
    return {"blocks": blocks, "bytes": used, "bytes_per_block": round(used / blocks, 1)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=5000, help="passes timed for idle")
    parser.add_argument("--rounds", type=int, default=2000, help="matches timed per arm")
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks of the memory run")
    parser.add_argument("--old", type=Path, help="result of an old commit, to be kept beside")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    result = {
        "command": machine.command(),
        "machine": machine.describe(),
        "idle": measure_idle(args.passes),
        "match": {"tokens": TOKENS, "rounds": args.rounds, "cases": measure_match(args.rounds)},
        "queue": {"waiting": WAITING, "blocks": BLOCKS, "passes": measure_queue(args.passes // 5)},
        "evict": {"leaves": LEAVES, "tokens": TURN, "cases": measure_evict(args.rounds)},
        "memory": measure_memory(args.blocks),
    }
    if guard.counters["guarded_errors"]:  # what was timed is what an error costs
        parser.exit(1, "hooks: a hook of ours failed; the log above says which\n")
    if args.old is not None:
        result["old_commit"] = json.loads(args.old.read_text())
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
