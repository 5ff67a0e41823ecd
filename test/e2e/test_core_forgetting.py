"""A tenant is forgotten by SGLang's real scheduler: on the device, in host memory, on disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from sglang_hc.tree.identity import Prefix, pack_tokens
from support import waiting
from support.core import Core, Reply, run_in_child
from support.disk_store import store_of
from support.forgetting import forgotten, held_by_host
from support.prompts import SMALL, in_directory, in_store, on_disk, prompt
from support.ranked_core import CORES, run_ranks
from support.ranked_turns import engine

FLAGS = ("--hc-forms", "kv", *SMALL, "--max-total-tokens", "1280", "--hc-host-size-gb", "0.02")
PROMPT, OTHER = prompt(4, 200), prompt(5, 200)


def a_tenant_leaves(directory: str) -> tuple[Any, ...]:
    core = Core(*FLAGS, *on_disk(directory))
    first = core.ask(PROMPT, 24, salt="acme")
    other = core.ask(OTHER, 24, salt="acme2")
    core.ask(OTHER, 1, salt=None)
    core.settle()
    pins = core.tree.tiers.retention
    pins.pin(Prefix("k4:acme", pack_tokens(PROMPT)), "s", 60)
    pins.pin(Prefix("k5:acme2", pack_tokens(OTHER)), "s", 60)
    history = [*PROMPT, *first.tokens]
    answer = forgotten(core)
    core.settle()
    left = len(core.slots(history, "k4:acme")), held_by_host(core, history, "k4:acme")
    sessions = len(pins.pinned("k4:acme")), len(pins.pinned("k5:acme2"))
    again = core.ask(PROMPT, 24, salt="acme")
    theirs = core.ask(OTHER, 24, salt="acme2")
    core.settle()
    returned = core.ask(PROMPT, 24, salt="acme")
    core.settle()
    return first, other, answer, left, sessions, again, theirs, returned


def test_a_tenant_is_forgotten_in_every_tier_and_computed_again(
    models: None, tmp_path: Path
) -> None:
    found = run_in_child(a_tenant_leaves, str(tmp_path / "d"))
    first, other, answer, left, sessions, again, theirs, returned = found
    assert 223 <= answer.pop("device")["tokens"] <= 224, "the token sampled last may be computed"
    assert answer == {
        "status": 200,
        "complete": True,
        "host": {"blocks": 4},
        "disk": {"blocks": 3, "complete": True},
    }
    assert left == (0, 0) and sessions == (0, 1)
    assert again.cached == 0 and again.tokens == first.tokens
    assert theirs.cached > 190 and theirs.tokens == other.tokens
    assert returned.cached > 190 and returned.tokens == first.tokens, "it may be kept again"


def while_running(directory: str) -> tuple[Any, ...]:
    """Two requests of the tenant decode and one waits: what they leave is not kept."""
    plain = ("--max-running-requests", "2", "--disable-overlap-schedule")
    core = Core(*FLAGS, *on_disk(directory), *plain)  # its passes can be interrupted
    truth = [core.ask(PROMPT[:100] + OTHER[:n], 40, salt="truth") for n in (10, 20, 30)]
    shared = core.ask(PROMPT[:100], 1, salt="acme")
    core.settle()
    rids = [core.submit(PROMPT[:100] + OTHER[:n], 40, salt="acme") for n in (10, 20, 30)]
    core.run(6)
    running = [core.requests[rid] for rid in rids]
    busy = [len(req.output_ids) for req in running]
    answer = forgotten(core)
    unfinished = [not req.finished() for req in running]
    core.run()
    core.settle()
    replies = [core.reply(rid).tokens for rid in rids]
    kept = [held_by_host(core, PROMPT[:100] + OTHER[:n], "k4:acme") for n in (10, 20, 30)]
    device = [len(core.slots(PROMPT[:100] + OTHER[:n], "k4:acme")) for n in (10, 20, 30)]
    hidden = [
        node.namespace for node in core.tree.tiers.host.tree.nodes() if node.namespace != "k5:truth"
    ]
    core.evict()
    core.settle()
    again = core.ask(PROMPT[:100] + OTHER[:10], 40, salt="acme")
    return (
        [one.tokens for one in truth], shared, busy, answer, unfinished, replies, kept, device,
        hidden, again,
    )  # fmt: skip


def test_what_is_in_use_is_not_kept_when_it_ends(models: None, tmp_path: Path) -> None:
    found = run_in_child(while_running, str(tmp_path / "d"))
    truth, _, busy, answer, unfinished, replies, kept, device, hidden, again = found
    assert max(busy) > 0 and min(busy) == 0, "some run, one waits"
    assert any(unfinished) and answer["complete"]
    assert replies == truth
    assert kept == device == [0, 0, 0] and hidden == []
    assert again.cached == 0 and again.tokens == truth[0]


def forgets(tokens: list[int], *below: str) -> list[Any]:
    """Two answers: as ever, and, of a directory, when it does not answer. tokens: of a prefix; none
    where all of the tenant is forgotten."""
    core = Core(*FLAGS, *below)
    core.ask(PROMPT, 8, salt="acme")
    core.ask(OTHER, 8, salt="acme2")
    core.settle()
    answers = [forgotten(core, tokens=tokens)]
    if "file" in below:
        store_of(core).directories[0].hangs = True
        answers.append(forgotten(core))
    return answers


def found_below(*below: str) -> tuple[int, int]:
    core = Core(*FLAGS, *below)
    return core.ask(PROMPT, 1, salt="acme").cached, core.ask(OTHER, 1, salt="acme2").storage


def test_killed_after_the_answer_it_is_not_found_by_the_next_server(
    models: None, tmp_path: Path
) -> None:
    """The process is killed as soon as it has answered (`run_in_child`)."""
    (answer,) = run_in_child(forgets, PROMPT, *on_disk(tmp_path))
    assert answer["disk"] == {"blocks": 3, "complete": True}
    for path in filter(Path.is_file, (tmp_path / "sglang-hc").rglob("*")):
        content = path.read_bytes()
        assert b"acme\0" not in content and pack_tokens(PROMPT[:64]) not in content
    assert run_in_child(found_below, *on_disk(tmp_path)) == (0, 192)


def test_a_directory_that_servers_share_forgets_durably(models: None, tmp_path: Path) -> None:
    """It knows namespaces; what failed there is said of it, and never that all should be
    cleared."""
    good, bad = run_in_child(forgets, [], *in_directory(tmp_path))
    assert good["status"] == 200 and good["complete"]
    assert good["remote"] == {"blocks": 3, "complete": True}
    assert bad["status"] == 503 and bad["remote"] == {"blocks": 0, "complete": False}
    assert "the remote store could not erase" in bad["error"]["message"]
    assert "clear" not in bad["error"]["message"]
    assert run_in_child(found_below, *in_directory(tmp_path)) == (0, 192)


def test_a_store_that_knows_no_namespaces_says_that_more_may_be_left(
    models: None, tmp_path: Path
) -> None:
    (answer,) = run_in_child(forgets, [], *in_store(tmp_path))
    assert answer["status"] == 503 and not answer["remote"]["complete"]
    assert "/hicache/storage-backend/clear" in answer["error"]["message"]


def clearing(directory: str | None) -> list[Any]:
    from sglang.srt.managers.io_struct import ClearHiCacheReqInput

    core = Core(*FLAGS, *([*on_disk(directory)] if directory else []))
    core.ask(PROMPT, 8)
    core.settle()
    said: list[Any] = []
    core.scheduler.ipc_channels = SimpleNamespace(
        send_to_tokenizer=SimpleNamespace(
            send_output=lambda output, request=None: said.append(getattr(output, "success", None))
        )
    )

    def clear() -> bool:
        said.clear()
        core.inbox.append(ClearHiCacheReqInput())
        waiting.until(lambda: core.run(1) or said)
        return said[0]

    found = [clear()]
    if directory:
        store = store_of(core)
        found += [store.block_ids(), clear()]
        store.directories[0].hangs = True
        found.append(clear())
    return found


def test_a_clear_says_whether_it_cleared(models: None, tmp_path: Path) -> None:
    assert run_in_child(clearing, str(tmp_path)) == [True, [], True, False]
    assert run_in_child(clearing, None) == [False], "there was nothing to clear"


# -- two ranks or stages -------------------------------------------------------------------------


class Left(NamedTuple):
    """What one rank has of the tenant, before and after: blocks in host memory; and replies."""

    before: int
    answer: dict[str, Any]
    device: int
    host: int
    first: Reply
    again: Reply
    theirs: Reply
    others: Reply


def leave(rank: int, port: int, *server: str) -> Left:
    core = engine(rank, port, *server)
    first, others = core.ask(PROMPT, 24, salt="acme"), core.ask(OTHER, 24, salt="acme2")
    core.settle()
    history = [*PROMPT, *first.tokens]
    before = held_by_host(core, history, "k4:acme")
    answer = forgotten(core)
    core.settle()
    device, host = len(core.slots(history, "k4:acme")), held_by_host(core, history, "k4:acme")
    core.forget()  # what is left is on the disks
    again, theirs = core.ask(PROMPT, 24, salt="acme"), core.ask(OTHER, 24, salt="acme2")
    core.settle()
    forgotten(core)  # it was kept again
    core.settle()
    core.tree.release_host_resources()
    return Left(before, answer, device, host, first, again, theirs, others)


def return_to(rank: int, port: int, *server: str) -> tuple[int, int]:
    core = engine(rank, port, *server)
    return core.ask(PROMPT, 1, salt="acme").cached, core.ask(OTHER, 1, salt="acme2").storage


@pytest.mark.parametrize("kind", ["tp", pytest.param("pp", marks=pytest.mark.slow)])
def test_what_was_forgotten_is_found_by_no_rank(models: None, tmp_path: Path, kind: str) -> None:
    """Two ranks are told once. Neither finds it on its device, in host memory, or on its own disk,
    also after a restart."""
    server = (kind, "hidden:2,kv:2", "llama-gqa", *on_disk(tmp_path / "d"))
    found = run_ranks(leave, *server)
    assert found[0].answer["status"] == 200 and found[0].answer["complete"]
    assert found[0].answer["disk"] == {"blocks": 3, "complete": True}
    for rank in found:
        assert rank.before > 190 and (rank.device, rank.host) == (0, 0)
        assert rank.again.cached == 0 and rank.again.tokens == rank.first.tokens
        assert rank.theirs.storage >= 192 and rank.theirs.tokens == rank.others.tokens
    assert run_ranks(return_to, *server) == [(0, 192), (0, 192)]
    assert set(CORES) == {"tp", "pp"}
