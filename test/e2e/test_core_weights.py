"""Sessions in which weights are changed, and weights that may not be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from sglang_hc.tree.namespaces import Namespace
from support.core import Core, run_in_child
from support.prompts import SMALL, prompt
from support.ranked_core import StagedCore, run_ranks


def in_a_session() -> tuple[list[int], list[int]]:
    """Blocks in host memory before a session that changes nothing, while it is open and somebody
    asks, and behind its end; and what three requests find: while it is open, and behind it what was
    asked before and what was asked meanwhile."""
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

    core = Core("--hc-forms", "kv", *SMALL)
    updater, blocks = core.scheduler.weight_updater, []

    def asked(seed: int) -> int:
        reply = core.ask(prompt(seed, 200), 8)
        core.push_out()
        core.settle()
        return reply.cached

    def held() -> None:
        nodes = core.tree.tiers.host.tree.nodes()
        blocks.append(sum(Namespace.of(node.namespace).client.key != "flood" for node in nodes))

    assert not asked(2)
    held()
    assert updater.begin_weight_update(BeginWeightUpdateReqInput()).success
    hits = [asked(2)]
    asked(3)
    held()
    assert updater.end_weight_update(EndWeightUpdateReqInput()).success
    held()
    return blocks, [*hits, asked(2), asked(3)]


def without_a_session() -> tuple[int, int]:
    """Blocks in host memory before and behind an update that SGLang refuses."""
    from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

    core = Core("--hc-forms", "kv", *SMALL)
    core.ask(prompt(2, 200), 8)
    core.settle()
    before = core.tree.stats()["host_blocks"]
    assert not core.scheduler.weight_updater.end_weight_update(EndWeightUpdateReqInput()).success
    core.settle()
    return before, core.tree.stats()["host_blocks"]


def test_an_update_that_changes_nothing_forgets_nothing(models: None) -> None:
    before, behind = run_in_child(without_a_session)
    assert before == behind > 0


def test_nothing_is_kept_or_found_while_a_session_is_open(models: None) -> None:
    blocks, hits = run_in_child(in_a_session)
    assert blocks[0] >= 3 and blocks == [blocks[0]] * 3
    assert hits == [0, 199, 0]


def in_a_pipeline(rank: int, port: int) -> list[tuple[bool, bool, str]]:
    """(whether something runs, whether a session is open then, what is answered) of each request to
    open one: while a batch is under way, and when none is."""
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager as Updater,
    )

    asked: list[tuple[bool, bool, str]] = []
    begin: Any = Updater.begin_weight_update

    def noted(self: Any, request: Any) -> Any:
        busy = core.tree.scheduler.is_between_stages
        answer = begin(self, request)
        asked.append((busy, self._session is not None, answer.message))
        return answer

    Updater.begin_weight_update = noted  # type: ignore[method-assign]
    core = StagedCore(rank, port, "--hc-forms", "kv", *SMALL)
    core.submit(prompt(2, 200), 12)

    def open_one(number: int) -> None:
        if number == 8:
            core.inbox.append(BeginWeightUpdateReqInput())

    core.run(each_pass=open_one)
    for request in (BeginWeightUpdateReqInput(), EndWeightUpdateReqInput()):
        core.inbox.append(request)
        core.run()
    assert core.scheduler.weight_updater._session is None
    return asked


def test_a_busy_pipeline_opens_no_session(models: None) -> None:
    """One was opened: one stage had unpacked its weights while a batch was on its way to it, and
    what came next was refused."""
    for stage in run_ranks(in_a_pipeline):
        (busy, is_open, said), idle = stage
        assert busy and not is_open and "try again" in said
        assert idle == (False, True, "Success")


SENT = ("init_weights_send_group_for_remote_instance", "send_weights_to_remote_instance")
"""How another server gets the weights of this one."""


def in_host_memory() -> tuple[list[bool], object, str]:
    """What is answered where weights lie in host memory: whether updates and checks succeed, a
    parameter, what is said to who wants to save or send them. And the reply behind it."""
    from sglang_hc.srt.scheduling.weights import OTHERS, UPDATES

    core = Core("--hc-offload-gb", "1", *SMALL)
    before = core.ask(prompt(2, 200), 8).tokens
    updater, asked = core.scheduler.weight_updater, SimpleNamespace()
    saving = [name for name, made in OTHERS.items() if made is None]
    answers = {
        name: getattr(updater, name)(asked) for name in (*UPDATES, *OTHERS) if name not in saving
    }
    parameter = answers.pop("get_weights_by_name").parameter
    said = set()
    for name in saving:
        try:
            getattr(updater, name)(asked)
        except ValueError as error:
            said.add(str(error))
    for name in SENT:
        answer = getattr(core.scheduler, name)(mock.MagicMock())
        assert not answer.success
        said.add(answer.message)
    core.push_out()
    assert core.ask(prompt(2, 200), 8).tokens == before
    (sentence,) = said | {answer.message for answer in answers.values()}
    return [answer.success for answer in answers.values()], parameter, sentence


def test_weights_in_host_memory_are_neither_replaced_nor_read(models: None) -> None:
    good, parameter, sentence = run_in_child(in_host_memory)
    assert len(good) == 7 and not any(good) and parameter is None
    assert "--hc-offload-gb" in sentence and "restart" in sentence
