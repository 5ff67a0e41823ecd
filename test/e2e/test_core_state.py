"""Recurrent layers under SGLang's real scheduler, on a CPU with torch for their kernels: what was
evicted comes back with the state behind it, and goes on word for word."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from support import state_core, state_model
from support.core import Core, Once, run_in_child
from support.state_core import KEPT, evicted, never_evicted

CHUNKS = "--chunked-prefill-size", "128"
UNEVEN = "--chunked-prefill-size", "100"
PLAIN = "--disable-overlap-schedule"
PAGES = "--page-size", "64"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("states")
    state_model.make(made)
    return made


@pytest.fixture
def model(folder: Path) -> str:
    return str(folder / "qwen3-next")


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("qwen3-next", ()),
        ("qwen3-next", PAGES),
        ("qwen3-next", (*CHUNKS, PLAIN)),
        ("qwen3-next", (*UNEVEN, *PAGES)),
        ("qwen3-next", UNEVEN),
        ("qwen3-next", (*CHUNKS, "--enable-mixed-chunk")),
        ("qwen3-next", (*PAGES, PLAIN)),
        ("qwen3.5", ()),
        ("qwen3.5", (*PAGES, *CHUNKS)),
    ],
)
def test_what_left_the_device_comes_back(
    folder: Path, once: Once, name: str, flags: tuple[str, ...]
) -> None:
    model = str(folder / name)
    wanted = once(never_evicted, model, *flags)
    found = run_in_child(evicted, model, *flags)
    assert [found.first, found.second.tokens] == wanted
    assert found.same, "the device has other bytes than before"
    assert (found.second.device, found.second.host) == (0, KEPT)
    assert found.stats["layer_plan"] == "kv:2" and "guarded_errors" not in found.stats


@pytest.mark.parametrize("spoil", [state_core.stale, state_core.another, state_core.missing])
def test_a_wrong_state_is_noticed(model: str, once: Once, spoil: Callable[[Core], None]) -> None:
    """The control: the state behind the last end is another one, the rows of K and V are right."""
    wanted = once(never_evicted, model)
    found = run_in_child(partial(evicted, spoil=spoil), model)
    assert found.first == wanted[0] and found.second.host == KEPT
    assert not found.same and found.second.tokens != wanted[1]
