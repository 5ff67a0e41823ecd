"""Models with sliding windows beside those of test_core_window.py, under SGLang's real scheduler:
windows in chunks (Llama 4), other heads for K and V and for each kind of layer (MiMo-V2), and
others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from support import window_configs, window_core
from support.core import Core, Once, run_in_child
from support.window_configs import FLAGS
from support.window_core import KEPT, Told, exchange

PAGES = "--page-size", "64"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("configs")
    window_configs.make(made)
    return made


def never_evicted(model: Path, *flags: str) -> list[list[int]]:
    window_configs.use()
    return window_core.never_evicted(str(model), *FLAGS, *flags)


def evicted(model: Path, *flags: str, spoil: Callable[[Core], object] | None = None) -> Told:
    window_configs.use()
    return window_core.evicted(str(model), *FLAGS, *flags, spoil=spoil)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), PAGES], ids=["tokens", "pages"])
@pytest.mark.parametrize("name", window_configs.CONFIGS)
def test_what_left_the_device_comes_back(
    folder: Path, once: Once, name: str, flags: tuple[str, ...]
) -> None:
    wanted = once(never_evicted, folder / name, *flags)
    found = run_in_child(evicted, folder / name, *flags)
    assert [found.first, found.second.tokens] == wanted
    assert (found.second.device, found.second.host) == (0, KEPT)
    assert found.stats["kept_ends"] > 0 and "guarded_errors" not in found.stats


@pytest.mark.slow
@pytest.mark.parametrize("name", window_configs.CONFIGS)
def test_windows_of_another_block_are_noticed(folder: Path, once: Once, name: str) -> None:
    """The control: the reply is another one."""
    wanted = once(never_evicted, folder / name)
    found = run_in_child(partial(evicted, spoil=exchange), folder / name)
    assert found.first == wanted[0] and found.second.host == KEPT
    assert found.second.tokens != wanted[1]


@pytest.mark.slow
def test_chunks_of_tokens_end_inside_of_what_is_kept(folder: Path, once: Once) -> None:
    """Llama 4 attends to a chunk of 96 tokens up to its own place. Ends lie at all distances from
    the beginning of one, and the passes behind them at others."""
    flags = "--chunked-prefill-size", "128"
    wanted = once(never_evicted, folder / "llama4", *flags)
    found = run_in_child(evicted, folder / "llama4", *flags)
    assert [found.first, found.second.tokens] == wanted and found.second.host == KEPT
