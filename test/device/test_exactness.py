"""The check that a product does not depend on its number of rows, against products that do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.device.exactness import (
    MOST_ROWS,
    ROWS,
    TILE_ROWS,
    Exactness,
    Product,
    cancelling,
    row_dependence,
    tiled,
    windows,
)
from support.products import backwards_where, by_count, in_order

SIZE, OUT, FIRST = 32, 24, 8
"""A fused weight of 24 rows whose K and V part begins at row 8."""

KvColumns = Callable[[torch.Tensor], torch.Tensor]


def by_remainder(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Another order for the rows behind the last full group of four, as gemm kernels have."""
    full = states.shape[0] // 4 * 4
    rest = in_order(states[full:], weight, bias, backwards=True)
    return torch.cat([in_order(states[:full], weight, bias), rest])


by_columns = backwards_where(lambda _, columns: columns != OUT)
"""Another order where the weight is not the whole fused one."""


def ways(
    product: Product, bias: bool, dtype: torch.dtype
) -> tuple[KvColumns, KvColumns, torch.Tensor]:
    """Forward pass over the fused weight, restoration over its K and V part, and the rows."""
    states, weight, b = cancelling(SIZE, OUT, bias, dtype, torch.device("cpu"))
    part = None if b is None else b[FIRST:]
    return (
        lambda rows: product(rows, weight, b)[:, FIRST:],
        lambda rows: product(rows, weight[FIRST:], part),
        states,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_products_that_depend_on_rows_or_columns_are_found(dtype: torch.dtype, bias: bool) -> None:
    assert row_dependence(*ways(in_order, bias, dtype)) is None
    assert "1 rows of the forward pass" in str(row_dependence(*ways(by_count, bias, dtype)))
    assert "1 rows of the forward pass" in str(row_dependence(*ways(by_remainder, bias, dtype)))
    assert "1 rows of a restoration" in str(row_dependence(*ways(by_columns, bias, dtype)))


@pytest.mark.parametrize("count", ROWS[:-1])
def test_a_single_row_count_that_differs_is_found(count: int) -> None:
    odd_one = backwards_where(lambda rows, _: rows == count)
    found = row_dependence(*ways(odd_one, False, torch.bfloat16))
    assert found is not None and found.startswith(f"{count} rows of the forward pass")


def test_cancelling_operands_show_an_order_that_ordinary_ones_hide() -> None:
    """Why the check has operands of its own: the sum is rounded to 16 bits after the additions."""
    states, weight, _ = cancelling(256, OUT, False, torch.bfloat16, torch.device("cpu"))
    plain = torch.randn(states.shape, generator=torch.Generator().manual_seed(1)).bfloat16()

    def share(rows: torch.Tensor) -> float:
        other = in_order(rows, weight, None, backwards=True)
        return float((in_order(rows, weight, None) != other).float().mean())

    assert share(states) > 0.5
    assert share(plain) < 0.01


@given(count=st.integers(1, 100), rows=st.integers(1, 20))
def test_tiles_have_one_shape_and_keep_every_row(count: int, rows: int) -> None:
    seen = set()

    def noting(
        states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        seen.add(states.shape[0])
        return in_order(states, weight, bias)

    states, weight, bias = cancelling(SIZE, OUT, True, torch.bfloat16, torch.device("cpu"))
    got = tiled(noting, rows)(states[:count], weight, bias)
    assert seen == {rows}
    assert torch.equal(got, in_order(states[:count], weight, bias))


def test_tiles_cure_a_product_that_depends_on_the_row_count() -> None:
    assert row_dependence(*ways(tiled(by_count), True, torch.bfloat16)) is None
    assert row_dependence(*ways(tiled(by_remainder), True, torch.bfloat16)) is None


def test_tiles_do_not_cure_a_product_that_depends_on_the_place_in_a_tile() -> None:
    """One shape is not enough when the kernel treats the tile's last rows in another way."""
    assert row_dependence(*ways(tiled(by_remainder, 6), True, torch.bfloat16)) is not None


def test_windows_cover_all_counts_and_all_places_of_a_tile() -> None:
    found = list(windows(MOST_ROWS))
    assert {last - first for first, last in found} == set(ROWS)
    assert all(0 <= first < last <= MOST_ROWS for first, last in found)
    single = [first % TILE_ROWS for first, last in found if last - first == 1]
    assert len(set(single)) >= 3


def test_what_server_info_says() -> None:
    assert Exactness(True, 0.0).stats() == {"exactness": "bit", "exactness_difference": 0.0}
    assert Exactness(False, 2e-3).stats()["exactness"] == "rounding"
