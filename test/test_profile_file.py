"""Profile files: given ones that fit, and a cache that is never trusted blindly."""

from __future__ import annotations

import json
import logging
import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc import profile_file
from sglang_hc.errors import ConfigError
from sglang_hc.forms import LayerPlan
from sglang_hc.policy.correction import WINDOW, Resource
from sglang_hc.policy.cost_model import CostModel, SourceTier, TierCopy
from sglang_hc.policy.fit import Fit
from sglang_hc.profile_file import CachedProfile, decode, encode
from support.papers import A100 as SHEET
from support.profiles import FREE_LOADING, cost_model, write
from support.waiting import until

HERE = "llama 1234, H200"
COST = replace(cost_model(host=1e-6), fingerprint=HERE)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sglang-hc"


def test_the_profile_that_engines_of_tests_start_with_can_be_read() -> None:
    """It is a file of its own because scripts name it: a new version must write it anew."""
    assert decode(FREE_LOADING.read_text(), "free_loading.json", HERE) == cost_model()


def test_what_was_measured_is_found_at_the_next_start(cache: Path) -> None:
    assert profile_file.load_cached(HERE) is None
    profile_file.save_cached(COST)
    assert profile_file.load_cached(HERE) == COST
    assert profile_file.load_cached("llama 1234, A100") is None
    assert [path.name for path in cache.iterdir()] == [profile_file.cache_path(HERE).name]


@pytest.mark.parametrize(
    "text", ["", "{", '{"format": "sglang-hc cost model"}', encode(COST)[:-40], "\x00" * 99]
)
def test_a_damaged_cache_file_is_said_and_not_used(
    cache: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    profile_file.save_cached(COST)
    profile_file.cache_path(HERE).write_text(text)
    assert profile_file.load_cached(HERE) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "measuring again" in caplog.text


def test_a_cache_file_of_another_server_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    profile_file.save_cached(COST)
    profile_file.cache_path(HERE).write_text(encode(replace(COST, fingerprint="A100")))
    assert profile_file.load_cached(HERE) is None
    assert "measured for 'A100'" in caplog.text


def test_a_cache_that_cannot_be_written_does_no_harm(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    profile_file.save_cached(COST)
    assert "not kept for later starts" in caplog.text
    assert profile_file.load_cached(HERE) is None


def test_a_given_profile_must_be_this_servers_and_name_its_tiers(tmp_path: Path) -> None:
    both = (SourceTier.HOST, SourceTier.DISK)
    path = write(COST, tmp_path)
    assert profile_file.load_given(path, HERE, both) == COST
    with pytest.raises(ConfigError, match=r"--hc-profile: .*measured for .*sglang-hc profile"):
        profile_file.load_given(path, "llama 1234, A100", both)
    only_host = replace(COST, copies={SourceTier.HOST: COST.copies[SourceTier.HOST]})
    path = write(only_host, tmp_path)
    assert profile_file.load_given(path, HERE, both[:1]) == only_host
    with pytest.raises(ConfigError, match=r"no costs for disk; write a new one with sglang-hc"):
        profile_file.load_given(path, HERE, both)
    with pytest.raises(ConfigError, match=r"--hc-profile: .*cannot be read.*; give a file"):
        profile_file.load_given(str(tmp_path / "none.json"), HERE, both)


def server(learned: float) -> CachedProfile:
    """Has read its costs from the cache, and learned."""
    cost = profile_file.load_cached(HERE)
    assert cost is not None
    one = CachedProfile(cost, cost)
    for _ in range(WINDOW):
        cost.observe({Resource.PREFILL: 1.0}, learned)
    return one


def test_what_a_server_learned_is_where_the_next_one_begins() -> None:
    profile_file.save_cached(COST)
    server(4.0).close()
    found = profile_file.load_cached(HERE)
    assert found is not None and found.learned == {Resource.PREFILL: pytest.approx(4.0)}
    assert replace(found, learned={}) == COST
    server(5.0).close()
    found = profile_file.load_cached(HERE)
    assert found is not None and found.prefill_layer(100, 0) == pytest.approx(500.0)


def test_what_was_measured_is_kept_and_not_what_this_start_made_of_it() -> None:
    """A model with recurrent layers began each time with costs that were higher once more."""
    profile_file.save_cached(COST)
    made = replace(COST, prefill=COST.prefill.of_layers(3.0))
    one = CachedProfile(made, COST)
    for _ in range(WINDOW):
        made.observe({Resource.PREFILL: 1.0}, 4.0)
    one.close()
    found = profile_file.load_cached(HERE)
    assert found is not None and found.learned == {Resource.PREFILL: pytest.approx(4.0)}
    assert replace(found, learned={}) == COST


def test_large_changes_are_kept_at_once_and_nothing_else_is_written(cache: Path) -> None:
    """A server that is killed has kept them."""
    profile_file.save_cached(COST)
    quiet = CachedProfile(replace(COST), COST)
    profile_file.cache_path(HERE).unlink()
    quiet.poll()
    quiet.close()
    assert list(cache.iterdir()) == []
    profile_file.save_cached(COST)
    one = server(4.0)
    one.poll()
    until(lambda: profile_file.load_cached(HERE) != COST)


def test_a_cache_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    profile_file.save_cached(COST)
    one, answers = server(4.0), threading.Event()
    monkeypatch.setattr(profile_file, "CLOSE_S", 0.01)
    monkeypatch.setattr(profile_file, "save_cached", lambda _: answers.wait())
    threads = threading.active_count()
    one.poll()
    one.poll()
    one.close()
    assert threading.active_count() == threads + 1
    answers.set()


number = st.floats(0, 1e3)
lines = st.builds(Fit, number, number, floor=number)
copies = st.dictionaries(
    st.sampled_from(SourceTier), st.builds(TierCopy, kv=lines, hidden=lines), min_size=1
)
fits = st.builds(Fit, number, number, number, floor=number)
plans = st.sampled_from([None, LayerPlan(1, 2, 3)])
learned = st.dictionaries(st.sampled_from(Resource), st.floats(1e-6, 16))


@settings(max_examples=40)
@given(copies, fits, lines, st.text(min_size=1, max_size=20), st.booleans(),
       st.one_of(st.just(math.inf), st.floats(0, 9)), learned, plans)  # fmt: skip
def test_profile_file_round_trip(
    copies, prefill, project, fingerprint, overlap, ahead, learned, plan
):
    model = CostModel(
        fingerprint, "measured", copies, prefill, project, overlap, ahead, learned, plan
    )
    assert decode(encode(model), "x", fingerprint) == model


def test_another_machines_profile_is_refused():
    with pytest.raises(ConfigError, match=r"p\.json: measured for 'data sheet.*this server is"):
        decode(encode(SHEET), "p.json", "H200, llama")


def change(path: str, value: object) -> str:
    """The data-sheet profile's text with one field replaced, or removed for None."""
    data = json.loads(encode(SHEET))
    *parents, last = path.split(".")
    inner = data
    for name in parents:
        inner = inner[name]
    inner[last] = value
    if value is None:
        del inner[last]
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "not a cost model"),
        (change("format", "recipe"), "not a cost model"),
        (change("version", 1), "format version 1, this release reads version 5; measure again"),
        (change("version", 99), "format version 99, this release reads version 5"),
        (change("copies.host.kv.per_token", None), r"`per_token` - at `\$\.copies\[\.\.\.\]\.kv`"),
        (
            change("copies.host.kv.per_token", -1),
            r">= 0.0 - at `.*\.kv\.per_token`",
        ),
        (change("copies.host.kv.fixed", "fast"), "Expected `float`, got `str`"),
        (change("copies.host.kv.fixed", True), "Expected `float`, got `bool`"),
        (change("copies.tape", {}), "Invalid enum value 'tape'"),
        (change("copies", {}), r"length >= 1 - at `\$\.copies`"),
        (change("copies.host.hidden", None), "from host and their projection must both be known"),
        (change("prefill.per_token", None), r"`per_token` - at `\$\.prefill`"),
        (change("overlap", 1), r"Expected `bool`, got `int` - at `\$\.overlap`"),
        (change("learned", {"prefill": 0.0}), r"> 0.0 - at `\$\.learned"),
        (change("learned", {"weather": 2.0}), "Invalid enum value 'weather'"),
        (change("origin", None), "missing required field `origin`"),
        (change("prefill.fixed", 1e999), "not valid JSON"),
    ],
)
def test_nonsense_in_a_profile_is_named(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        decode(text, "p.json")
    assert str(caught.value).startswith("p.json: ")
