"""Conversations with images under SGLang's real scheduler: what was evicted goes on, about the same
image alone."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from support import aborts, retractions, served, shown, vision_model
from support.core import Core, Reply, run_in_child
from support.forgetting import forgotten
from support.prompts import in_directory, in_store, on_disk, prompt
from support.ranked_core import RankedCore, run_ranks
from support.shown import Picture, text, tokens_of

POOL = 640
FLAGS = (
    "--hc-host-size-gb", "0.2", "--max-total-tokens", str(POOL), "--dtype", "float32",
    "--hc-forms", "kv",
)  # fmt: skip
NEW = 12

WITH_FEW_TOKENS_IN_ITS_BLOCK = [*text(1, 61), Picture(1), *text(2, 30)]
"""Two of the first image's tokens are in the first block."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model.make("qwen2.5-vl", tmp_path_factory.mktemp("vision") / "model")


def started(model: Path, *flags: str) -> Core:
    import torch._dynamo

    torch._dynamo.config.disable = True  # SGLang compiles the rotation of images, for seconds
    return Core(*FLAGS, *flags, model=str(model))


class Talk(NamedTuple):
    replies: list[Reply]
    history: list[Picture | int]


def talk(core: Core, salt: str, evict: bool, turns: int = 3) -> Talk:
    """About a growing number of images. evict: between the turns."""
    history, replies = list(WITH_FEW_TOKENS_IN_ITS_BLOCK), []
    for turn in range(turns):
        if evict:
            core.flood(random.Random(turn), POOL)
        replies.append(shown.ask(core, history, NEW, salt))
        core.settle()
        history += replies[-1].tokens
        history += [*text(10 + turn, 20), Picture(10 + turn, (12, 8)), *text(20 + turn, 9)]
    return Talk(replies, history)


def told(core: Core, *names: str) -> list[int]:
    stats = core.tree.stats()
    return [stats.get(name, 0) for name in names]


def scenes(model: Path) -> dict[str, Any]:
    """One engine. Tokens and hits of each scene."""
    core = started(model)
    kept, evicted = talk(core, "kept", False), talk(core, "evicted", True)
    found: dict[str, Any] = {
        "kept": [(one.tokens, one.device, one.host) for one in kept.replies],
        "evicted": [(one.tokens, one.device, one.host) for one in evicted.replies],
    }
    # In one namespace: the same text with another image, or another grid; the same image with
    # another question.
    core.evict()
    prompts = {
        "other image": [*text(1, 61), Picture(2), *text(2, 30)],
        "other grid": [*text(1, 61), Picture(1, (16, 4)), *text(2, 30)],
        "other question": [*text(1, 61), Picture(1), *text(3, 30)],
    }
    for name, parts in prompts.items():
        core.evict()
        here = shown.ask(core, parts, NEW, "evicted")
        core.settle()
        alone = shown.ask(core, parts, NEW, name)
        core.settle()
        found[name] = (here.tokens, alone.tokens, here.cached)
    # Nothing of a client that is forgotten comes back.
    forgotten(core, client="k7:evicted")
    core.evict()
    found["forgotten"] = shown.ask(core, WITH_FEW_TOKENS_IN_ITS_BLOCK, NEW, "evicted").cached
    core.settle()
    found["counts"] = told(core, "guarded_errors", "unkept_requests")
    return found


@pytest.mark.slow
def test_features_that_go_into_several_layers_come_back(tmp_path: Path) -> None:
    check(run_in_child(scenes, vision_model.make("qwen3-vl", tmp_path)))


def test_what_was_evicted_goes_on_about_the_same_image(model: Path) -> None:
    check(run_in_child(scenes, model))


def check(found: dict[str, Any]) -> None:
    kept, evicted = found["kept"], found["evicted"]
    assert [tokens for tokens, *_ in evicted] == [tokens for tokens, *_ in kept]
    assert [host for *_, host in kept] == [0, 0, 0]
    assert [(device, host) for _, device, host in evicted] == [(0, device) for _, device, _ in kept]
    assert evicted[1][2] == len(tokens_of(WITH_FEW_TOKENS_IN_ITS_BLOCK)) + NEW - 1
    replies = [kept[0][0]]
    for name, most in (("other image", 59), ("other grid", 59), ("other question", 79)):
        here, alone, cached = found[name]
        assert here == alone, name
        assert cached == most, name
        replies.append(alone)
    assert len(set(map(tuple, replies))) == 4, "what is shown or asked makes no difference"
    assert found["forgotten"] == 0
    assert found["counts"] == [0, 0]


def planted(model: Path) -> list[tuple[list[int], list[int], int]]:
    """SGLang takes all images for one. Replies with another image than before, what they are
    without the plant, and what was cached: on the device, and when it was evicted."""
    from unittest import mock

    from sglang.srt.managers import schedule_batch

    core = started(model)
    other = [*text(1, 61), Picture(2), *text(2, 30)]
    wanted = shown.ask(core, other, NEW, "wanted").tokens
    core.settle()
    found = []
    with mock.patch.object(schedule_batch, "_compute_pad_values", lambda identity: (1 << 61,) * 4):
        first = shown.ask(core, WITH_FEW_TOKENS_IN_ITS_BLOCK, NEW, "salt")
        core.settle()
        for evict in (False, True, False):
            if evict:
                core.evict()
            reply = shown.ask(core, other, NEW, "salt")
            core.settle()
            found.append((reply.tokens, wanted, reply.cached))
        core.evict()
        again = shown.ask(core, WITH_FEW_TOKENS_IN_ITS_BLOCK, NEW, "salt")
        core.settle()
    found.append((again.tokens, first.tokens, again.host))
    assert told(core, "guarded_errors", "unkept_requests") == [0, 3]
    return found


@pytest.mark.slow
def test_images_that_sglang_takes_for_one_share_nothing(model: Path) -> None:
    *others, own = run_in_child(planted, model)
    for tokens, wanted, cached in others:
        assert tokens == wanted and cached == 0
    tokens, wanted, cached = own
    assert tokens == wanted and cached > 100


Start = Callable[..., Core]
"""As `started`."""


def begun(model: Path, *below: str, start: Start = started) -> Talk:
    core = start(model, *below)
    found = talk(core, "salt", False)
    core.tree.release_host_resources()
    return found


def undisturbed(model: Path, start: Start = started) -> Reply:
    """To the fourth prompt."""
    return talk(start(model), "salt", False, turns=4).replies[3]


def gone_on(
    model: Path, history: list[Picture | int], *below: str, start: Start = started
) -> Reply:
    core = start(model, *below)
    reply = shown.ask(core, history, NEW, "salt")
    core.settle()
    assert told(core, "guarded_errors") == [0]
    return reply


SECOND = Picture(10, (12, 8))


@pytest.mark.slow
@pytest.mark.parametrize("below", [on_disk, in_directory, in_store])
def test_a_new_process_goes_on_about_the_same_images(
    model: Path, tmp_path: Path, below: Callable[[object], tuple[str, ...]]
) -> None:
    flags = below(tmp_path / "d")
    first = run_in_child(begun, model, *flags)
    reply = run_in_child(gone_on, model, first.history, *flags)
    wanted = run_in_child(undisturbed, model)
    assert reply.storage == 192 and reply.tokens == wanted.tokens  # two images
    swapped = [Picture(99, (12, 8)) if part == SECOND else part for part in first.history]
    assert swapped != first.history
    other = run_in_child(gone_on, model, swapped, *flags)
    assert other.storage == 128 and other.tokens != wanted.tokens


# -- several ranks -------------------------------------------------------------------------------


def on_rank(rank: int, port: int, body: Callable[..., Any], *args: Any) -> Any:
    """What a body gives that takes an engine's start."""
    return body(*args, start=partial(started_rank, rank, port))


def started_rank(rank: int, port: int, model: Path, *flags: str) -> RankedCore:
    return RankedCore(rank, port, *FLAGS, *flags, model=str(model))


def kept_and_evicted(model: Path, start: Start) -> list[list[tuple[list[int], int, int]]]:
    core = start(model)
    talks = talk(core, "kept", False), talk(core, "evicted", True)
    assert told(core, "guarded_errors", "unkept_requests") == [0, 0]
    return [[(one.tokens, one.device, one.host) for one in each.replies] for each in talks]


@pytest.mark.slow
def test_two_ranks_go_on_about_the_same_images(model: Path) -> None:
    (kept, evicted), other = run_ranks(on_rank, kept_and_evicted, model)
    assert other == [kept, evicted]
    assert [tokens for tokens, *_ in evicted] == [tokens for tokens, *_ in kept]
    assert [(device, host) for _, device, host in evicted] == [(0, device) for _, device, _ in kept]


@pytest.mark.slow
@pytest.mark.parametrize("below", [on_disk, in_store])
def test_the_next_server_of_two_ranks_goes_on(
    model: Path, tmp_path: Path, below: Callable[[object], tuple[str, ...]]
) -> None:
    flags = below(tmp_path / "d")
    first, _ = run_ranks(on_rank, begun, model, *flags)
    wanted, _ = run_ranks(on_rank, undisturbed, model)
    swapped = [Picture(99, (12, 8)) if part == SECOND else part for part in first.history]
    for reply in run_ranks(on_rank, gone_on, model, first.history, *flags):
        assert reply.storage == 192 and reply.tokens == wanted.tokens
    for reply in run_ranks(on_rank, gone_on, model, swapped, *flags):
        assert reply.storage == 128 and reply.tokens != wanted.tokens


# -- in the middle of an image -------------------------------------------------------------------

LARGE = (24, 16)
"""The grid of an image of 96 tokens: a block or a chunk ends in it, wherever it begins."""

UNEVEN = "--chunked-prefill-size", "50"
PAGES = "--page-size", "64"


def aborted(model: Path, passes: Sequence[int], *flags: str) -> tuple[list[list[int]], list[int]]:
    """passes: as for `aborts.talk`. Its replies, and tokens that were restored, errors, and
    requests of which nothing is kept."""
    core = started(model, *UNEVEN, *flags)
    more = [[*text(5, 20), Picture(seed, LARGE), *text(6, 20)] for seed in (50, 51, 52)]
    replies = aborts.talk(core, WITH_FEW_TOKENS_IN_ITS_BLOCK, more, passes, shown.submit)
    names = "restored_tokens", "guarded_errors", "unkept_requests"
    return replies, told(core, *names) if passes else []


@pytest.mark.slow
def test_an_abort_in_the_middle_of_an_image_leaves_what_can_be_continued(model: Path) -> None:
    """Prompts with the same text and other images are aborted in each of their first passes."""
    wanted, _ = run_in_child(aborted, model, (), "--hc-disable")
    found, (restored, *wrong) = run_in_child(aborted, model, range(1, 14))
    assert found == wanted and len(set(map(tuple, found))) == len(found)
    assert restored > 13 * 64 and wrong == [0, 0]


def retracted(model: Path, often: bool, *flags: str) -> dict[str, Any]:
    if often:
        retractions.retract_often()
    prompts = [[*text(seed, 20 + 15 * seed), Picture(seed, LARGE), *text(7, 3)] for seed in (1, 2)]
    return retractions.serve(started(model, *flags), prompts, shown.submit)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [UNEVEN, PAGES, (*PAGES, "--disable-overlap-schedule")])
def test_what_was_retracted_behind_an_image_comes_back(model: Path, flags: tuple[str, ...]) -> None:
    """With pages up to the last whole one, which ends in the image."""
    calm, found = (run_in_child(retracted, model, often, *flags) for often in (False, True))
    assert found["replies"] == calm["replies"] and found["retractions"] > 0
    assert found["stats"]["retracted_restored_tokens"] > 0
    assert "guarded_errors" not in found["stats"]


# -- from a client's bytes on --------------------------------------------------------------------


def picture(seed: int) -> str:
    """A PNG of 112 * 84 pixels, as clients send it."""
    rng = np.random.default_rng(seed)
    raw = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (84, 112, 3), dtype=np.uint8)).save(raw, "PNG")
    return "data:image/png;base64," + base64.b64encode(raw.getvalue()).decode()


WORDS = " the water long little very after" * 20


def asked(image: str) -> dict[str, Any]:
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    return {"text": f"{WORDS}{shown}{WORDS}", "image_data": [image], "sampling_params": sampling}


@pytest.mark.slow
@pytest.mark.server
def test_a_server_knows_the_images_of_its_clients(model: Path, tmp_path: Path) -> None:
    def ask(image: str) -> tuple[list[int], dict[str, int], int]:
        reply = served.post(server, "/generate", asked(image))
        meta = reply["meta_info"]
        return reply["output_ids"], meta["cached_tokens_details"] or {}, meta["prompt_tokens"]

    with served.start(tmp_path / "log", "--model-path", str(model)) as server:
        wanted, _, length = ask(picture(1))
        for seed in range(8):
            served.ask(server, prompt(seed, 300))
        found, cached, _ = ask(picture(1))
        assert found == wanted and cached.get("host", 0) == length - 1
        for seed in range(8):
            served.ask(server, prompt(seed, 300))
        other, cached, _ = ask(picture(2))
        assert other != wanted and 0 < cached.get("host", 0) < length // 2
        numbers = served.numbers(server)
    assert "guarded_errors" not in numbers and "unkept_requests" not in numbers
