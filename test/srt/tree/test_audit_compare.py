"""How far what was computed again lies from what is stored."""

from __future__ import annotations

import pytest
import torch

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.audit import WIDEST, bound
from sglang_hc.srt.tree.audit_compare import error_of

WIDTH = 32


def rows(seed: int) -> torch.Tensor:
    return torch.randn(BLOCK_TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("most", [False, True])
def test_the_same_is_right_and_what_belongs_to_other_tokens_is_wrong(most: bool) -> None:
    assert error_of(rows(0), rows(0).clone(), most) == 0.0
    assert error_of(rows(0), rows(1), most) > WIDEST


def test_behind_a_choice_a_token_may_differ_and_a_block_may_not() -> None:
    one = rows(0)
    one[7] += 10.0
    assert error_of(rows(0), one, most=False) > WIDEST
    assert error_of(rows(0), one, most=True) == 0.0
    shifted = rows(0).roll(1, 0)
    assert error_of(rows(0), shifted, most=True) > bound(1e-5, 5, behind_choice=True)


@pytest.mark.parametrize("most", [False, True])
def test_what_is_no_number_is_wrong(most: bool) -> None:
    one = rows(0)
    one[3, 0] = torch.nan
    assert not error_of(rows(0), one, most) <= WIDEST


def test_a_state_is_one_row_whatever_its_shape() -> None:
    state = rows(0).unsqueeze(0)
    other = state.clone()
    other[0, 5, 5] += 1.0
    assert error_of(state, other, most=True) == error_of(state, other, most=False) > 0.1
