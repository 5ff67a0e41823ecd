"""Pages of the KV pool under SGLang's real scheduler: what was evicted comes back word for word,
whatever the page, the scheduling and the chunks. SGLang's own checks of pages are on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from support.core import Core, Once, run_in_child
from support.prompts import SMALL, on_disk, prompt

PROMPT, MORE = prompt("pages", 300), prompt("more", 90)
CHUNKS = "--chunked-prefill-size", "128"
TAILS_FIRST = (
    *("--radix-eviction-policy", "tlru", "--radix-eviction-policy-config"),
    '{"threshold": 200, "next_prompt_estimate": 100}',
)


def two_turns(page: int, form: str, *flags: str) -> tuple[list[int], Any, dict[str, Any]]:
    """The replies to both turns; the history is evicted between them, and again at the end."""
    core = Core("--page-size", str(page), "--hc-forms", form, *SMALL, *flags)
    first = core.ask(PROMPT, 20).tokens
    core.settle()
    core.evict()
    others = [core.submit(prompt(n, 100), 30) for n in range(2)]
    second = core.submit([*PROMPT, *first, *MORE], 20)
    core.run()
    core.settle()
    assert all(len(core.reply(rid).tokens) == 30 for rid in others)
    core.evict()
    assert core.scheduler.flush_cache(), "nothing is left that is in use"
    return first, core.reply(second), core.tree.stats()


def never_evicted() -> list[list[int]]:
    core = Core(*SMALL, "--hc-disable")
    first = core.ask(PROMPT, 20).tokens
    return [first, core.ask([*PROMPT, *first, *MORE], 20).tokens]


@pytest.fixture
def wanted(models: None, once: Once) -> list[list[int]]:
    return once(run_in_child, never_evicted)


@pytest.mark.parametrize(
    ("page", "form", "flags"),
    [
        (16, "kv", CHUNKS),
        (16, "hidden:2,kv:2", ("--disable-overlap-schedule",)),
        (16, "recompute:1,kv:3", ("--enable-mixed-chunk", *CHUNKS)),
        (64, "hidden", CHUNKS),
        (128, "hidden:2,kv:2", ("--max-total-tokens", "1280", *CHUNKS)),
        (1, "kv", (*TAILS_FIRST, *CHUNKS)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (64, "kv", ("--enable-mixed-chunk", *CHUNKS, "--disable-overlap-schedule")),
                (1, "hidden:2,kv:2", ("--enable-mixed-chunk", *CHUNKS)),
            )
        ),
    ],
)
def test_what_left_the_device_comes_back(
    wanted: list[list[int]], page: int, form: str, flags: tuple[str, ...]
) -> None:
    first, second, counted = run_in_child(two_turns, page, form, *flags)
    assert [first, second.tokens] == wanted
    whole = max(page, BLOCK_TOKENS)
    assert len(PROMPT) // whole * whole <= second.host <= len(PROMPT) + len(first)
    assert second.host % page == 0 and second.device == 0
    assert "guarded_errors" not in counted


@pytest.mark.parametrize("page", [16, 64])
def test_the_next_server_finds_them_on_disk(
    wanted: list[list[int]], page: int, tmp_path: Path
) -> None:
    """Blocks know no pages: they were stored by a server with others."""
    disk = on_disk(tmp_path)
    first, _, _ = run_in_child(two_turns, 1, "kv", *disk)
    again = run_in_child(next_server, page, first, *disk)
    assert again.tokens == wanted[1]
    assert again.storage >= len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS


def next_server(page: int, first: list[int], *flags: str) -> Any:
    core = Core("--page-size", str(page), "--hc-forms", "kv", *SMALL, *flags)
    return core.ask([*PROMPT, *first, *MORE], 20)
