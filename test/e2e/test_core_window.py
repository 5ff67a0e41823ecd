"""Sliding windows with a pool of their own under SGLang's real scheduler, on a CPU with torch for
its kernels: what was evicted comes back up to an end, and goes on word for word."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from support import leaks, ranked_turns, retractions, window_core, window_kernels, window_model
from support.core import Core, Once, Reply, run_in_child
from support.prompts import in_directory, in_store, on_disk, prompt
from support.ranked_core import RankedCore
from support.speculation import NGRAM
from support.speculative_kinds import with_windows
from support.starts import check_left_out, refusal
from support.window_core import (
    KEPT,
    MORE,
    PROMPT,
    engine,
    evicted,
    exchange,
    history,
    never_evicted,
)

CHUNKS = "--chunked-prefill-size", "128"
PLAIN = "--disable-overlap-schedule"
PAGES = "--page-size", "64"

slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("window")
    window_model.make(made)
    return made


@pytest.fixture
def model(folder: Path) -> str:
    """Its window is a block and a half."""
    return str(folder / "gpt-oss-96")


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("gpt-oss-96", ()),
        slow("gpt-oss-96", (*CHUNKS, *PAGES)),
        slow("gpt-oss-96", (PLAIN,)),
        slow("gpt-oss", (*CHUNKS, PLAIN, "--enable-mixed-chunk")),
        slow("gpt-oss", PAGES),
        slow("gemma4", ("--dtype", "bfloat16")),
        slow("gemma4", ("--page-size", "16")),
        slow("gemma4", CHUNKS),
        slow(window_model.PUBLISHED, ()),
        slow(window_model.PUBLISHED, (*CHUNKS, *PAGES)),
    ],
)
def test_what_left_the_device_comes_back(
    folder: Path, once: Once, name: str, flags: tuple[str, ...]
) -> None:
    model = str(folder / name)
    wanted = once(never_evicted, model, *flags)
    found = run_in_child(evicted, model, *flags)
    assert [found.first, found.second.tokens] == wanted
    assert (found.second.device, found.second.host) == (0, KEPT)
    assert found.stats["layer_plan"] == "kv:2" and "guarded_errors" not in found.stats


def test_accepted_tokens_come_back_and_rejected_ones_do_not(model: str, once: Once) -> None:
    wanted = once(never_evicted, model)
    start = partial(with_windows, taught=[history(wanted[0]) + wanted[1]], overlap=True)
    found = run_in_child(partial(evicted, start=start), model, *NGRAM)
    assert [found.first, found.second.tokens] == wanted and found.second.host == KEPT


@pytest.mark.parametrize(
    ("spoil", "plant"),
    [
        (exchange, None),
        slow(None, window_core.without_a_block),
        slow(None, window_core.without_a_layer),
    ],
    ids=["of another block", "without a block", "without a layer"],
)
def test_a_wrong_end_is_noticed(
    model: str, once: Once, spoil: Callable[[Core], object] | None, plant: Any
) -> None:
    """The control: the reply is another one."""
    wanted = once(never_evicted, model)
    found = run_in_child(partial(evicted, spoil=spoil, plant=plant), model)
    assert found.first == wanted[0] and found.second.host == KEPT
    assert found.second.tokens != wanted[1]


@pytest.mark.slow
def test_a_wrong_window_is_noticed(model: str) -> None:
    """The control: SGLang's tree does not go on behind what it has not."""
    with pytest.raises(AssertionError, match=f"of {KEPT} tokens are on the device|was guarded"):
        run_in_child(partial(evicted, plant=window_core.shorter_window), model)


# -- branches -------------------------------------------------------------------------------------

SHARED, ONE, OTHER, END = (
    prompt(name, length) for name, length in (("s", 300), ("one", 140), ("other", 50), ("end", 70))
)


def branches(model: str, *flags: str) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Replies to prompts that begin alike, and what came from (the device, host memory). With the
    tiers all windows leave the device behind the second prompt, and everything behind the fourth.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    core, replies = engine(model, *flags), list[Reply]()
    tiers = getattr(core.tree, "tiers", None)
    for number, tokens in enumerate(
        (SHARED, SHARED + ONE, SHARED + OTHER, SHARED + ONE + END, SHARED + OTHER + END)
    ):
        replies.append(core.ask(tokens, 8))
        if tiers is not None:
            core.settle()
        if tiers is not None and number == 1:
            core.tree.evict(EvictParams(num_tokens=0, swa_num_tokens=400))
        if tiers is not None and number == 3:
            core.evict()
    core.check_device()
    return [reply.tokens for reply in replies], [(one.device, one.host) for one in replies]


@pytest.mark.slow
def test_what_the_device_has_without_its_windows_gets_them_back(model: str, once: Once) -> None:
    """Slots of a shared beginning stay on the device, while the windows behind it leave. Behind
    host memory's end nothing else is brought back then."""
    wanted, _ = once(branches, model, "--hc-disable")
    found, came = run_in_child(branches, model)
    assert found == wanted
    assert came == [(0, 0), (300, 0), (0, 256), (300, 84), (0, 320)]


def first_failing(model: str) -> tuple[list[list[int]], list[int], int]:
    """Two replies, to prompts of which host memory has the beginning; of the first restoration
    only the attempt is made. What the second one found there, and errors."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    from sglang_hc.restore.restorer import Restorer

    leaks.errors_are_planted = True
    core, queue, fails = engine(model), Restorer.queue, iter([True])

    def failing(self: Restorer, *args: Any) -> None:
        if next(fails, False):
            raise RuntimeError("planted")
        queue(self, *args)

    core.ask(SHARED, 1)
    core.ask(SHARED + ONE, 8)
    core.settle()
    core.tree.evict(EvictParams(num_tokens=0, swa_num_tokens=400))
    Restorer.queue = failing  # type: ignore[method-assign]
    replies = [core.ask(tokens, 8) for tokens in (SHARED + ONE + END, SHARED + OTHER)]
    core.check_device()
    guarded = core.tree.stats()["guarded_errors"]
    return [one.tokens for one in replies], [one.host for one in replies], guarded


@pytest.mark.slow
def test_nobody_reads_what_was_promised_in_vain(model: str, once: Once) -> None:
    """An error of ours behind the slots: they leave the tree, new ones and second ones alike."""
    replies, _ = once(branches, model, "--hc-disable")
    found, host, guarded = run_in_child(first_failing, model)
    assert found == [replies[3], replies[2]]
    assert host[0] == 0 and guarded == 1


# -- below host memory ----------------------------------------------------------------------------


def first_turn(model: str, *flags: str) -> list[int]:
    core = engine(model, *flags)
    reply = core.ask(PROMPT, 24)
    core.settle()
    return reply.tokens


def second_turn(model: str, first: list[int], *flags: str) -> tuple[Reply, dict[str, Any]]:
    core = engine(model, *flags)
    reply = core.ask(history(first), 24)
    core.settle()
    return reply, core.tree.stats()


@pytest.mark.slow
@pytest.mark.parametrize("below", [on_disk, in_directory, in_store])
@pytest.mark.parametrize("flags", [(), PAGES])
def test_the_next_server_goes_on(
    model: str, once: Once, tmp_path: Path, flags: tuple[str, ...],
    below: Callable[[object], tuple[str, ...]],
) -> None:  # fmt: skip
    wanted = once(never_evicted, model, *flags)
    flags = *flags, *below(tmp_path)
    first = run_in_child(first_turn, model, *flags)
    second, _ = run_in_child(second_turn, model, first, *flags)
    assert [first, second.tokens] == wanted
    assert second.storage == KEPT


# -- others beside --------------------------------------------------------------------------------


def retracted(model: str, often: bool, *flags: str) -> dict[str, Any]:
    if often:
        retractions.retract_often()
    prompts = [prompt(i, 100 + 10 * i) for i in range(3)]
    return retractions.serve(engine(model, *flags), prompts)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), (*PAGES, PLAIN)])
def test_what_was_retracted_comes_back(model: str, flags: tuple[str, ...]) -> None:
    """In whole blocks: what is behind the last one is computed again."""
    calm, found = (run_in_child(retracted, model, often, *flags) for often in (False, True))
    assert found["replies"] == calm["replies"] and found["retractions"] > 0
    assert found["again"] <= BLOCK_TOKENS * found["retractions"]
    assert found["stats"]["retracted_restored_tokens"] > 0


def held_back(model: str, *flags: str) -> int:
    """Most slots of windows that one long reply has at a time."""
    core, most = engine(model, *flags), 0

    def look(_: int) -> None:
        nonlocal most
        allocator = core.scheduler.token_to_kv_pool_allocator
        free = allocator.swa_available_size() + core.tree.swa_evictable_size()
        most = max(most, allocator.size_swa - free)

    core.submit(PROMPT[:130], 300)
    core.run(each_pass=look)
    return most


@pytest.mark.slow
def test_windows_are_held_back_by_less_than_a_block(model: str) -> None:
    """And by the rows between a window and whole blocks, here 32."""
    plain, ours = (run_in_child(held_back, model, *flags) for flags in (("--hc-disable",), ()))
    assert plain <= ours <= plain + BLOCK_TOKENS + 32 + 4


def needed_windows(model: str) -> tuple[list[int], list[int]]:
    """Tokens on the device of two prompts, before and behind the eviction of windows of one, while
    a request waits for the one that was used first."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    core = engine(model, "--max-running-requests", "1")
    prompts = [prompt("needed", 150), prompt("not needed", 150)]
    for tokens in prompts:
        core.ask(tokens, 1)
    found: list[list[int]] = []

    def look(number: int) -> None:
        if len(core.scheduler.waiting_queue) and not found:
            keys = [RadixKey(array("q", tokens)) for tokens in prompts]
            found.append([core.tree.has(key) for key in keys])
            core.tree.evict(EvictParams(num_tokens=0, swa_num_tokens=100))
            found.append([core.tree.has(key) for key in keys])

    from array import array

    from sglang.srt.mem_cache.radix_cache import RadixKey

    core.submit(prompt("running", 100), 20)
    core.submit(prompts[0] + [5, 6, 7], 4)
    core.run(each_pass=look)
    before, behind = found
    return before, behind


@pytest.mark.slow
def test_windows_that_a_waiting_request_needs_leave_last(model: str) -> None:
    before, behind = run_in_child(needed_windows, model)
    assert before == [150, 150] and behind == [150, 0]


def of_rank(rank: int, port: int, kind: str, form: str, model: str, *flags: str) -> RankedCore:
    window_kernels.use()
    return ranked_turns.engine(rank, port, kind, form, model, *window_core.flags_of(model), *flags)


@pytest.mark.slow
@pytest.mark.parametrize("below", [on_disk, in_store])
def test_two_ranks_divide_heads(
    model: str, tmp_path: Path, below: Callable[[object], tuple[str, ...]]
) -> None:
    ranked_turns.check_two_servers(of_rank, "tp", "kv", model, *below(tmp_path))


# -- what plain SGLang says, and what is refused ---------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", window_model.MODELS)
def test_the_stand_ins_answer_as_transformers_does(folder: Path, once: Once, name: str) -> None:
    model = str(folder / name)
    assert once(never_evicted, model) == run_in_child(window_core.by_transformers, model)


@pytest.mark.slow
def test_behind_an_encoder_of_images_it_says_the_same(folder: Path, once: Once) -> None:
    published, alone = (str(folder / name) for name in (window_model.PUBLISHED, "gemma4"))
    assert once(never_evicted, published) == run_in_child(window_core.by_transformers, alone)


@pytest.mark.slow
def test_hidden_form_is_left_out_and_the_log_says_why(model: str) -> None:
    check_left_out(engine, model, "kv:2", "GptOssForCausalLM")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--hc-forms", "recompute:1,kv:3"), "is not among the families whose first layers"),
        (("--page-size", "128"), "a page must divide 64 tokens"),
        (("--hc-overflow", "reembed"), "sliding windows"),
    ],
)
def test_what_cannot_be_right_is_refused(model: str, flags: tuple[str, ...], why: str) -> None:
    assert why in refusal(engine, model, *flags)


def tiny_pool(model: str, share: str, *flags: str) -> tuple[list[int], int]:
    """The second turn where the pool of windows holds little more than two of them. share: of the
    640 tokens of the other one."""
    core = engine(model, "--swa-full-tokens-ratio", share, *flags)
    first = core.ask(PROMPT[:120], 4).tokens
    if "--hc-disable" not in flags:
        core.settle()
        core.evict()
    reply = core.ask([*PROMPT[:120], *first, *MORE], 4)
    return reply.tokens, reply.host


@pytest.mark.slow
def test_nobody_waits_for_windows_that_the_pool_never_has(model: str) -> None:
    """What SGLang's admission would not let in is computed again."""
    chunked = "--chunked-prefill-size", "64"
    wanted, _ = run_in_child(tiny_pool, model, "0.35", *chunked, "--hc-disable")
    assert run_in_child(tiny_pool, model, "0.35", *chunked) == (wanted, 0)
    assert run_in_child(tiny_pool, model, "0.5", *chunked) == (wanted, 64)


def long_reply(model: str, *flags: str) -> list[int]:
    core = engine(model, *flags)
    reply = core.ask(PROMPT[:160], 300)
    core.check_device()
    return reply.tokens


@pytest.mark.slow
def test_what_is_held_back_ends_nobody(model: str) -> None:
    """In a pool of 256 tokens of windows. The last request that ran was ended with an error there,
    after fewer tokens than by SGLang alone."""
    wanted = run_in_child(long_reply, model, "--hc-disable")
    assert run_in_child(long_reply, model, "--swa-full-tokens-ratio", "0.4") == wanted
