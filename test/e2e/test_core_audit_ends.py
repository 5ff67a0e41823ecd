"""Audits where not all layers have full attention: what comes back of an end is compared too, rows
of windows and states, and so are latents with the index of sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

from support import sparse_core, state_core, storm_models, window_core
from support.audits import ALL, audit_all
from support.core import Core, Once, run_in_child
from support.storm_models import SPARSE, STATES, WINDOWS

CORES: dict[Any, Any] = {WINDOWS: window_core, STATES: state_core, SPARSE: sparse_core}
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made = tmp_path_factory.mktemp("audited")

    def path(name: str) -> str:
        if not (made / name).exists():
            storm_models.KINDS[name].make(made)
        return str(made / name)

    return path


class Told(NamedTuple):
    """Of a conversation that left the device between its turns: whether the second reply came from
    host memory, what was counted behind its audit, tokens that the device had of it then, which
    forms were said to be wrong, and the same turn again, behind all that."""

    restored: int
    counts: dict[str, int]
    on_device: int
    wrong: list[str]
    second: list[int]
    again: list[int]
    restored_again: int


def audited(
    name: str, model: str, *flags: str, spoil: Callable[[Core], object] | None = None
) -> Told:
    """spoil: is called between the turns, with what is in host memory."""
    import logging

    wrong: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: wrong.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang_hc").addHandler(handler)
    kind = CORES[storm_models.KINDS[name]]
    core = kind.engine(model, *ALL, *flags)
    first = core.ask(kind.PROMPT, 24).tokens
    core.push_out()
    if spoil is not None:
        spoil(core)
    second = core.ask(kind.history(first), 24)
    counts, on_device = audit_all(core), len(core.slots(kind.history(first)))
    core.evict()
    again = core.ask(kind.history(first), 24)
    audit_all(core)
    return Told(second.host, counts, on_device, wrong, second.tokens, again.tokens, again.host)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("gpt-oss-96", ()),
        ("gpt-oss", ("--page-size", "64", "--chunked-prefill-size", "128")),
        ("gemma4", ("--dtype", "bfloat16")),
        ("qwen3-next", ("--page-size", "64", "--chunked-prefill-size", "128")),
        ("granite-4", ()),
        ("qwen3.5", ()),
        ("kimi-linear", ()),
        ("deepseek-v3.2", ()),
        ("glm-5", ()),
    ],
)
def test_what_is_right_passes(
    folder: Callable[[str], str], name: str, flags: tuple[str, ...]
) -> None:
    found = run_in_child(audited, name, folder(name), *flags)
    assert found.restored == 320 and found.counts["audited_blocks"] >= 5
    assert "audit_differences" not in found.counts, found.wrong
    assert found.again == found.second and found.wrong == []


@pytest.mark.parametrize(
    ("name", "spoil", "form"),
    [
        ("qwen3-next", partial(state_core.stale, name=None), "state"),
        slow("gpt-oss-96", window_core.exchange, "window"),
        slow("gpt-oss", window_core.exchange, "window"),
        slow("gemma4", window_core.exchange, "window"),
        slow("granite-4", partial(state_core.stale, name=None), "state"),
        slow("qwen3.5", partial(state_core.missing, name=None), "state"),
        slow("kimi-linear", partial(state_core.stale, name=None), "state"),
        slow("deepseek-v3.2", partial(sparse_core.exchange, parts=slice(1, None)), "kv"),
    ],
)
def test_what_is_wrong_leaves_with_all_that_was_computed_behind_it(
    folder: Callable[[str], str], once: Once, name: str, spoil: Any, form: str
) -> None:
    """A window of another block, the state of an earlier place, an index of other tokens: found,
    and the same turn once more is answered as if it had never been there."""
    model = folder(name)
    right = once(audited, name, model)
    found = run_in_child(partial(audited, spoil=spoil), name, model)
    assert "audit_differences" not in right.counts and right.counts["audited_blocks"] >= 5
    assert found.restored == 320 and found.second != right.second, "it was not that wrong"
    assert found.counts["audit_differences"] >= 1
    assert f"what its tokens give: {form} form" in found.wrong[0]
    assert found.again == right.second and found.restored_again < 320
    assert found.on_device < 320 <= right.on_device
