"""Recurrent layers under SGLang's real scheduler, on a CPU with torch for their kernels: what was
evicted comes back with the state behind it, and goes on word for word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import Lfm2Config

from sglang_hc.forms import BLOCK_TOKENS
from support import (
    aborts,
    ranked_turns,
    retractions,
    state_core,
    state_talks,
)
from support.adapters import MLP, adapter_flags, adapter_ids, write_adapter
from support.core import Once, Reply, run_in_child
from support.prompts import in_directory, in_store, on_disk, prompt
from support.ranked_core import run_ranks
from support.starts import check_left_out, refusal
from support.state_core import KEPT, PROMPT, engine, evicted, never_evicted
from support.state_model import MODELS, PUBLISHED, make

CHUNKS = "--chunked-prefill-size", "128"
UNEVEN = "--chunked-prefill-size", "100"
PLAIN = "--disable-overlap-schedule"
PAGES = "--page-size", "64"
ALONE = "--hc-disable", "--mamba-track-interval", "64"
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("states")
    make(made)
    return made


@pytest.fixture
def model(folder: Path) -> str:
    return str(folder / "qwen3-next")


@pytest.fixture(params=["qwen3-next", "granite-4", "kimi-linear"])
def each(folder: Path, request: pytest.FixtureRequest) -> str:
    """One of each kind: gated delta rule, Mamba2, KDA."""
    return str(folder / request.param)


@slow
@pytest.mark.parametrize("name", list(MODELS))
def test_the_kernels_of_these_tests_compute_these_models(folder: Path, name: str) -> None:
    model = str(folder / name)
    wanted = run_in_child(state_core.by_transformers, model)
    assert run_in_child(never_evicted, model) == wanted


@slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_behind_an_encoder_of_images_they_say_the_same(folder: Path, name: str) -> None:
    model = str(folder / PUBLISHED[name])
    wanted = run_in_child(state_core.by_transformers, model)
    assert run_in_child(never_evicted, str(folder / name)) == wanted


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("qwen3-next", (*UNEVEN, "--enable-mixed-chunk")),
        pytest.param("qwen3-next", PAGES, marks=slow),
        pytest.param("qwen3-next", (*CHUNKS, PLAIN), marks=slow),
        pytest.param("qwen3-next", (*CHUNKS, *PAGES), marks=slow),
        pytest.param("qwen3-next", (*PAGES, PLAIN), marks=slow),
        pytest.param("qwen3.5", (), marks=slow),
        pytest.param("qwen3.5-vl", (), marks=slow),
        pytest.param("qwen3.5-vl", (*PAGES, *CHUNKS), marks=slow),
        pytest.param("qwen3.5-moe-vl", (), marks=slow),
        pytest.param("qwen3.5-moe-vl", (*PAGES, PLAIN), marks=slow),
        pytest.param("granite-4", (), marks=slow),
        pytest.param("granite-4", (*PAGES, *CHUNKS), marks=slow),
        pytest.param("granite-4", (*UNEVEN, PLAIN, "--enable-mixed-chunk"), marks=slow),
        pytest.param("qwen3.5", (*PAGES, *CHUNKS), marks=slow),
        pytest.param("nemotron-h", (), marks=slow),
        pytest.param("falcon-h1", (), marks=slow),
        pytest.param("falcon-h1", (*PAGES, *CHUNKS), marks=slow),
        pytest.param("kimi-linear", (*UNEVEN, "--enable-mixed-chunk"), marks=slow),
        pytest.param("kimi-linear", (*PAGES, PLAIN), marks=slow),
    ],
)
def test_what_left_the_device_comes_back(
    folder: Path, once: Once, name: str, flags: tuple[str, ...]
) -> None:
    model = str(folder / name)
    wanted = once(never_evicted, model, *flags)
    (found,) = run_in_child(evicted, model, *flags)
    assert [found.first, found.second.tokens] == wanted
    assert found.same, "the device has other bytes than before"
    assert (found.second.device, found.second.host) == (0, state_core.kept_of(model))
    layers = 4 if name == "falcon-h1" else 2
    assert found.stats["layer_plan"] == f"kv:{layers}" and "guarded_errors" not in found.stats


@pytest.mark.parametrize(
    "name",
    ["qwen3-next", *(pytest.param(name, marks=slow) for name in ("granite-4", "kimi-linear"))],
)
def test_a_wrong_state_is_noticed(folder: Path, once: Once, name: str) -> None:
    """The control: the state behind the last end is another one, the rows of K and V are right."""
    model = str(folder / name)
    wanted = once(never_evicted, model)
    spoils = (
        None, state_core.stale, state_core.another, state_core.missing, state_core.without_a_layer,
    )  # fmt: skip
    right, *wrong = run_in_child(partial(evicted, spoils=spoils), model)
    assert [right.first, right.second.tokens] == wanted and right.same
    for found in wrong:
        assert found.first == wanted[0] and found.second.host == KEPT
        assert not found.same and found.second.tokens != wanted[1]


@slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        *(("qwen3-next", flags) for flags in ((), CHUNKS, PAGES, (*CHUNKS, PLAIN))),
        ("granite-4", CHUNKS),
        ("kimi-linear", CHUNKS),
    ],
)
def test_a_returning_turn_computes_less_than_a_block_again(
    folder: Path, once: Once, name: str, flags: tuple[str, ...]
) -> None:
    model = str(folder / name)
    wanted = once(state_talks.talk, model, 10, False, *flags, *ALONE)
    found = run_in_child(state_talks.talk, model, 10, True, *flags)
    assert [turn.reply for turn in found] == [turn.reply for turn in wanted]
    assert all(turn.computed - turn.new < BLOCK_TOKENS for turn in found)


@slow
def test_where_prompts_branch_the_second_one_leaves_a_state(model: str, once: Once) -> None:
    wanted = once(state_talks.branches, model, False)
    found = run_in_child(state_talks.branches, model, True)
    assert [reply.tokens for reply in found] == [reply.tokens for reply in wanted]
    assert [reply.host for reply in found] == [0, 0, 192]


@slow
def test_who_leaves_a_known_path_leaves_a_state_at_the_end_of_its_prompt_too(
    model: str, once: Once
) -> None:
    wanted = once(state_talks.leaves, model, False)
    found = run_in_child(state_talks.leaves, model, True)
    assert [reply.tokens for reply in found] == [reply.tokens for reply in wanted]
    assert [reply.host for reply in found] == [0, 0, 320]


@slow
def test_a_state_alone_comes_back(model: str, once: Once) -> None:
    """What the device has of K and V stays there."""
    wanted = once(state_talks.parted, model, False)
    found = run_in_child(state_talks.parted, model, True)
    assert found.reply.tokens == wanted.reply.tokens
    assert (wanted.reply.device, found.reply.host) == (192, 192)
    assert found.stats["restored_states"] == 1 and "restored_tokens" not in found.stats


def aborted(
    model: str, passes: Sequence[int], *flags: str
) -> tuple[list[list[int]], dict[str, Any]]:
    """passes: as for `aborts.talk`."""
    core = engine(model, "--chunked-prefill-size", "64", *flags)
    more = [prompt(number, 150) for number in range(3)]
    replies = aborts.talk(core, PROMPT, more, passes)
    return replies, core.tree.stats() if passes else {}


@slow
def test_aborts_leave_what_can_be_continued(each: str) -> None:
    wanted, _ = run_in_child(aborted, each, (), *ALONE)
    found, stats = run_in_child(aborted, each, range(1, 14))
    assert found == wanted
    assert stats["restored_states"] > 5 and "guarded_errors" not in stats


def first_turn(model: str, *flags: str, start: state_core.Start = engine) -> list[int]:
    core = start(model, *flags)
    reply = core.ask(PROMPT, 24)
    core.settle()
    return reply.tokens


def second_turn(
    model: str, first: list[int], *flags: str, start: state_core.Start = engine
) -> Reply:
    core = start(model, *flags)
    reply = core.ask(state_core.history(first), 24)
    core.settle()
    return reply


@slow
@pytest.mark.parametrize("below", [on_disk, in_directory, in_store])
def test_the_next_server_goes_on(
    each: str, once: Once, tmp_path: Path, below: Callable[[object], tuple[str, ...]]
) -> None:
    wanted = once(never_evicted, each)
    flags = below(tmp_path)
    first = run_in_child(first_turn, each, *flags)
    second = run_in_child(second_turn, each, first, *flags)
    assert [first, second.tokens] == wanted
    assert second.storage == KEPT


# -- two ranks ------------------------------------------------------------------------------------


def talk_on_rank(rank: int, port: int, model: str, *flags: str) -> ranked_turns.Turns:
    return ranked_turns.talk(state_core.engine_of_rank(rank, port, model, *flags), "away")


@pytest.mark.parametrize(
    "name", [name if name == "qwen3.5" else pytest.param(name, marks=slow) for name in MODELS]
)
def test_two_ranks_divide_states(folder: Path, tmp_path: Path, name: str) -> None:
    found = run_ranks(talk_on_rank, str(folder / name), *on_disk(tmp_path))
    ranked_turns.check_tokens(found)
    assert found[0].counted["restored_tokens"] == found[0].stored == ranked_turns.BLOCKS
    assert [turns.counted["restored_states"] for turns in found] == [1, 1]


def on_rank(rank: int, port: int, body: Callable[..., Any], *args: Any) -> Any:
    """What a body gives that takes an engine's start."""
    return body(*args, start=partial(state_core.engine_of_rank, rank, port))


def right_and_wrong(model: str, start: state_core.Start) -> list[state_core.Told]:
    """The second conversation finds a state of another place, in the part of one rank."""

    def stale(core: Any, name: str) -> None:
        if core.rank == 1:
            state_core.stale(core, name)

    return evicted(model, spoils=(None, stale), start=start)


@slow
def test_a_wrong_state_of_one_rank_is_noticed(model: str) -> None:
    """The control: its heads are part of what both ranks go on with."""
    wanted, _ = run_ranks(on_rank, never_evicted, model)
    first, second = run_ranks(on_rank, right_and_wrong, model)
    for right, wrong in (first, second):
        assert [right.first, right.second.tokens] == wanted and right.same
        assert wrong.first == wanted[0] and wrong.second.host == KEPT
        assert wrong.second.tokens != wanted[1]
    assert not second[1].same


@slow
@pytest.mark.parametrize("below", [on_disk, in_store])
def test_the_next_server_of_two_ranks_goes_on(
    each: str, tmp_path: Path, below: Callable[[object], tuple[str, ...]]
) -> None:
    wanted, _ = run_ranks(on_rank, never_evicted, each)
    flags = below(tmp_path)
    first, other = run_ranks(on_rank, first_turn, each, *flags)
    assert first == other == wanted[0]
    for second in run_ranks(on_rank, second_turn, each, first, *flags):
        assert second.tokens == wanted[1] and second.storage == KEPT


# -- others beside --------------------------------------------------------------------------------


def retracted(model: str, often: bool) -> dict[str, Any]:
    if often:
        retractions.retract_often()
    prompts = [prompt(i, 100 + 10 * i) for i in range(3)]
    return retractions.serve(engine(model), prompts)


@slow
def test_what_was_retracted_comes_back(each: str) -> None:
    """Up to its last state: what is behind it is computed again."""
    calm, found = (run_in_child(retracted, each, often) for often in (False, True))
    assert found["replies"] == calm["replies"] and found["retractions"] > 0
    assert found["again"] <= BLOCK_TOKENS * found["retractions"]
    assert found["stats"]["retracted_restored_tokens"] > 0


@slow
@pytest.mark.parametrize("flags", [(), (*PAGES, PLAIN)])
def test_what_made_room_comes_back(each: str, flags: tuple[str, ...]) -> None:
    """With the state at 128 tokens, which the reply has passed."""
    room = run_in_child(state_talks.makes_room, each, *flags)
    assert room.both == room.alone and room.retractions == 1
    assert room.stats["retracted_restored_tokens"] == 2 * BLOCK_TOKENS
    assert 0 < room.again < BLOCK_TOKENS and "guarded_errors" not in room.stats


def adapted(model: str, adapters: dict[str, str], *flags: str) -> dict[str, list[Reply]]:
    """By adapter, and "none": two turns, the second one of which repeats what "a" has said first.
    Where there are tiers everything leaves the device between them."""
    core = engine(model, "--max-total-tokens", "2048", *adapter_flags(adapters, 2), *flags)
    names = {**adapter_ids(core), "none": None}
    found: dict[str, list[Reply]] = {name: [] for name in names}

    def ask_all(tokens: list[int]) -> None:
        for name, adapter in names.items():
            rid = core.submit(tokens, 24, lora=adapter)
            core.run()
            found[name].append(core.reply(rid))
        core.settle()

    ask_all(PROMPT)
    if "--hc-disable" not in flags:
        core.evict()
    ask_all(state_core.history(found["a"][0].tokens))
    return found


@slow
def test_a_state_belongs_to_its_adapter(folder: Path, tmp_path: Path) -> None:
    model = str(folder / "qwen3.5")
    adapters = {name: write_adapter(tmp_path / name, i, model, MLP) for i, name in enumerate("ab")}
    wanted, found = (run_in_child(adapted, model, adapters, *flags) for flags in (ALONE, ()))
    for name, turns in found.items():
        assert [turn.tokens for turn in turns] == [turn.tokens for turn in wanted[name]], name
        assert turns[0].cached == turns[1].device == 0, "state of another adapter was found"
    assert len({tuple(first.tokens) for first, _ in found.values()}) == len(found)
    restored = [second.host for _, second in found.values()]
    assert restored == [KEPT, 256, 256], "the others up to the end of the prompt"


@slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("flags", [(), (*CHUNKS, *PAGES), (*CHUNKS, PLAIN)])
def test_random_conversations_say_what_they_say_on_the_device(
    model: str, seed: int, flags: tuple[str, ...]
) -> None:
    wanted, _ = run_in_child(state_talks.stormy, model, seed, False, *flags, *ALONE)
    found, stats = run_in_child(state_talks.stormy, model, seed, True, *flags)
    assert found == wanted
    assert "guarded_errors" not in stats


@slow
def test_hidden_form_is_left_out_and_the_log_says_why(model: str) -> None:
    check_left_out(engine, model, "kv:2", "Qwen3NextForCausalLM")


@slow
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            ("--mamba-radix-cache-strategy", "no_buffer", PLAIN),
            "it keeps states where requests end, and not where blocks do",
        ),
        (("--hc-forms", "recompute:1,kv:1"), "is not among the families whose first layers"),
        (("--hc-overflow", "reembed"), "a state has no tokens that move"),
    ],
)
def test_what_cannot_be_right_is_refused(model: str, flags: tuple[str, ...], why: str) -> None:
    assert why in refusal(engine, model, *flags)


@slow
def test_a_model_whose_states_lie_elsewhere_is_refused(tmp_path: Path) -> None:
    """SGLang chooses for it to keep them where requests end."""
    Lfm2Config(architectures=["Lfm2ForCausalLM"], num_hidden_layers=2).save_pretrained(tmp_path)
    why = refusal(engine, str(tmp_path))
    assert "--mamba-radix-cache-strategy no_buffer" in why and "where requests end" in why
