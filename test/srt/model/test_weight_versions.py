"""The version of the weights: the same for the same bytes, another for any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.srt.model import weight_versions
from sglang_hc.srt.model.weight_versions import WeightVersions, digest_of, row_sums
from sglang_hc.srt.ranks.start_group import StartGroup
from support.start_groups import on_ranks


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Linear(16, 8)).to(torch.bfloat16)
    made[0].w_kc = made[0].weight.detach().t()
    made.register_buffer("angles", torch.ones(4), persistent=False)
    return made


def flip_two(m: torch.nn.Module) -> None:
    """One element one bit up, another one down: their sum stays."""
    words = m[0].weight.data.view(torch.int16).view(-1)
    even, odd = (words % 2 == 0).nonzero()[5], (words % 2 != 0).nonzero()[5]
    words[even] += 1
    words[odd] -= 1


def half_done(m: torch.nn.Module) -> None:
    """What was made of a weight when it was loaded is still of the old one."""
    m[0].w_kc = m[0].w_kc.clone()
    m[0].w_kc[0, 0] += 1


def swap(m: torch.nn.Module) -> None:
    m[0].weight.data = m[0].weight.data.flip(0)


@pytest.mark.parametrize("change", [flip_two, half_done, swap])
def test_any_change_shows(change: Callable[[torch.nn.Module], None]) -> None:
    changed = model()
    assert digest_of([changed]) == digest_of([model()])
    change(changed)
    assert digest_of([changed]) != digest_of([model()])


def test_a_draft_counts_and_its_place_does() -> None:
    one, other = model(), model(1)
    found = {digest_of(models) for models in ([one], [one, other], [other, one], [one, one])}
    assert len(found) == 4


@given(st.binary(min_size=1, max_size=70), st.data())
def test_sums_of_rows_tell_bytes_apart(raw: bytes, data: st.DataObject) -> None:
    """As a GPU reads them, with rows that are short enough for a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_versions, "ROW_WORDS", 4)
        weight_versions._keys.cache_clear()
        own = torch.tensor(list(raw), dtype=torch.uint8)
        other = own.clone()
        place = data.draw(st.integers(0, len(raw) - 1))
        other[place] ^= data.draw(st.integers(1, 255))
        assert not torch.equal(row_sums(own), row_sums(other))
        shifted = torch.cat([own.new_zeros(1), own])[1:]  # does not begin with a word
        assert torch.equal(row_sums(own), row_sums(shifted))
    weight_versions._keys.cache_clear()


@given(st.lists(st.integers(0, 2), max_size=8))
def test_a_version_is_that_of_its_bytes(seeds: list[int]) -> None:
    """Whatever was between, and None for those of the start."""
    served = model()
    versions, known = WeightVersions(StartGroup(0, 1)), {0: None}
    for seed in seeds:
        versions.change(lambda: [served])
        between = versions.name
        assert versions.changing and between not in known.values()
        served.load_state_dict(model(seed).state_dict())
        served[0].w_kc = model(seed)[0].w_kc
        versions.settled()
        assert not versions.changing
        assert known.setdefault(seed, versions.name) == versions.name
    assert len(set(known.values())) == len(known)


def test_a_rank_whose_update_failed_makes_another_version() -> None:
    def names(fails: int | None) -> str | None:
        def one(group: StartGroup) -> str | None:
            served, versions = model(group.rank), WeightVersions(group)
            versions.change(lambda: [served])
            if group.rank != fails:
                swap(served)
            versions.settled()
            return versions.name

        first, second = on_ranks(2, one)
        assert first == second
        return first

    assert len({names(None), names(0), names(1), None}) == 4
