"""What ranks agree on while they start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_hc.config import HcConfig
from sglang_hc.errors import ConfigError
from sglang_hc.forms import LayerPlan
from sglang_hc.srt.model import model_state
from sglang_hc.srt.model.columns import all_columns, columns_of
from sglang_hc.srt.model.exactness import HiddenProof, of_all_ranks
from sglang_hc.srt.model.model_state import _for_all, _plan, refuse_model
from sglang_hc.srt.ranks.start_group import StartGroup
from support.start_groups import as_rank, on_ranks


def test_the_smallest_size_the_largest_time_and_the_first_reason_count() -> None:
    def on_rank(group: StartGroup) -> tuple:
        reasons = [None, "layer 1 differs", "layer 0 differs"]
        return (
            group.least([7, 5, 9][group.rank]),
            group.most([0.5, 2.0, 1.0][group.rank]),
            group.reason(reasons[group.rank]),
            group.reason(None),
        )

    assert on_ranks(3, on_rank) == [(5, 2.0, "layer 1 differs", None)] * 3


def test_only_the_first_rank_makes_what_it_gives_to_all() -> None:
    made: list[int] = []

    def on_rank(group: StartGroup) -> str:
        def make() -> str:
            made.append(group.rank)
            return f"of {group.rank}"

        return group.first(make)

    assert on_ranks(3, on_rank) == ["of 0"] * 3 and made == [0]


def test_a_users_mistake_on_the_first_rank_is_said_by_all() -> None:
    def on_rank(group: StartGroup) -> str:
        def make() -> str:
            raise ConfigError("--hc-profile x: cannot be read")

        with pytest.raises(ConfigError, match="cannot be read"):
            group.first(make)
        return "told"

    assert on_ranks(2, on_rank) == ["told", "told"]


class GPT2LMHeadModel(torch.nn.Module):
    """Of SGLang's this is the name."""


def test_a_model_whose_ranks_have_all_heads_is_refused_on_several() -> None:
    refuse_model(GPT2LMHeadModel(), StartGroup(0, 1))
    refuse_model(torch.nn.Module(), StartGroup(1, 2))
    with pytest.raises(ConfigError, match="-size or --pp-size above 1 with GPT2LMHeadModel"):
        refuse_model(GPT2LMHeadModel(), StartGroup(1, 2))


@pytest.mark.parametrize(
    ("forms", "wrong"),
    [
        ("recompute:2,kv:4", None),
        ("recompute:3,kv:3", "recompute at most 2"),
        ("hidden:2,kv:4", None),
        ("hidden:1,kv:5", "none as hidden"),
    ],
)
def test_every_stage_of_a_pipeline_keeps_a_layer_of_each_form(
    forms: str, wrong: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_state, "kept_layers", lambda runner: 6)

    def plan() -> LayerPlan:
        return _plan(SimpleNamespace(), HcConfig(forms=forms), None, None, [3, 3])

    if wrong is None:
        assert str(plan()) == forms
        return
    with pytest.raises(ConfigError, match=f"--hc-forms {forms} with --pp-size 2: .*{wrong}"):
        plan()


def test_a_plan_that_was_chosen_fits_all_stages() -> None:
    assert _for_all(LayerPlan(0, 2, 4), [3, 3]) == LayerPlan(0, 2, 4)
    assert _for_all(LayerPlan(0, 1, 5), [3, 3]) == LayerPlan(0, 0, 6)
    assert _for_all(LayerPlan(0, 5, 1), [3, 3]) == LayerPlan(0, 6, 0)


def test_hidden_form_is_exact_where_every_rank_proved_it() -> None:
    proofs = [HiddenProof(None, 0.0, "a"), HiddenProof("K of 3 rows differs", 1e-7, "b")]

    def together(*ranks: HiddenProof) -> HiddenProof:
        first, second = on_ranks(2, lambda group: of_all_ranks(ranks[group.rank], group))
        assert first == second
        return first

    exact = together(proofs[0], proofs[0])
    assert (exact.wrong, exact.difference) == (None, 0.0)
    inexact = together(*proofs)
    assert (inexact.wrong, inexact.difference) == ("K of 3 rows differs", 1e-7)
    assert len({exact.digest, inexact.digest, together(*reversed(proofs)).digest}) == 3
    assert of_all_ranks(proofs[1], StartGroup(0, 1)) == proofs[1]


class Gathering:
    """The group of SGLang, among threads."""

    def __init__(self, group: StartGroup) -> None:
        self.group = group

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.group.each(part), dim=dim)


def test_columns_of_all_ranks_are_the_whole_rows() -> None:
    whole = torch.arange(40.0).view(5, 8)

    def on_rank(group: StartGroup) -> torch.Tensor:
        with as_rank(tp_rank=group.rank, tp_size=4, tp_group=Gathering(group)):
            columns = columns_of(8)
        assert columns.count == 2
        return columns.whole(columns.of(whole))

    for found in on_ranks(4, on_rank):
        assert torch.equal(found, whole)


def test_rows_that_ranks_cannot_divide_are_kept_whole() -> None:
    whole = torch.arange(40.0).view(5, 8)
    for ranks in (1, 3):
        with as_rank(tp_rank=0, tp_size=ranks):
            columns = columns_of(8)
        assert columns == all_columns(8)
        assert torch.equal(columns.of(whole), whole) and columns.whole(whole) is whole
