import math
from dataclasses import replace

import pytest

from sglang_hc.errors import ConfigError
from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_model import SourceTier, TierCopy
from sglang_hc.policy.fit import Fit
from sglang_hc.profile_file import decode, encode
from sglang_hc.tools.datasheet import datasheet_costs, load_hardware
from support.papers import A100 as SHEET
from support.papers import SHAPE


def test_datasheet_costs_are_bytes_and_flops_over_rates():
    flops = 312e12 * 0.65
    assert SHEET.copy_hidden(SourceTier.HOST, 1000) == pytest.approx(1000 * 8192 / 26e9)
    assert SHEET.copy_kv(SourceTier.HOST, 1000) == pytest.approx(1000 * 16384 / 26e9)
    assert SHEET.copy_kv(SourceTier.DISK, 1000) == pytest.approx(1000 * 16384 / 6.9e9)
    assert SHEET.project_kv(4096) == pytest.approx(4096 * 4 * 4096**2 / flops)
    attention = 4 * 4096 * 1000 * (8192 + 500)
    assert SHEET.prefill_layer(1000, 8192) == pytest.approx(
        (2 * 1000 * SHAPE.layer_params + attention) / flops
    )


def test_what_comes_from_disk_is_copied_once_more_behind_it():
    model = datasheet_costs(load_hardware("A100-40G"), SHAPE, 10e9, 40e9)
    far, near = (model.copy_kv(tier, 64) for tier in (SourceTier.DISK, SourceTier.HOST))
    assert far == near / 4
    assert model.layer_times(SourceTier.DISK, 64).copy_kv == far + near
    assert model.layer_times(SourceTier.HOST, 64).copy_kv == near


def test_stored_layers_are_copied_each_in_its_form():
    plan = LayerPlan(3, 4, 5)
    kv, hidden = (f(SourceTier.DISK, 640) for f in (SHEET.copy_kv, SHEET.copy_hidden))
    assert SHEET.copy_stored(SourceTier.DISK, plan, 640) == 4 * hidden + 5 * kv
    bare = replace(SHEET, project=None, copies={SourceTier.DISK: TierCopy(Fit(0.0, 1e-6))})
    assert bare.copy_stored(SourceTier.DISK, LayerPlan(0, 0, 5), 640) == 5 * 640 * 1e-6


def test_few_tokens_take_as_long_as_reading_the_weights():
    assert SHEET.prefill_layer(1, 0) == pytest.approx(SHAPE.layer_params * 2 / 1555e9)
    assert SHEET.prefill_layer(1, 0) == SHEET.prefill_layer(64, 0)


def test_a_model_without_hidden_form_has_no_hidden_costs():
    kv = {tier: replace(copy, hidden=None) for tier, copy in SHEET.copies.items()}
    model = replace(SHEET, copies=kv, project=None)
    times = model.layer_times(SourceTier.HOST, 64)
    assert (times.copy_hidden, times.project) == (math.inf, math.inf)
    assert decode(encode(model), "x") == model


def test_half_of_the_hidden_costs_is_an_error():
    with pytest.raises(ConfigError, match="both be known, or neither"):
        replace(SHEET, project=None)


def test_layer_times_put_the_new_tokens_behind_the_restored_ones():
    times = SHEET.layer_times(SourceTier.DISK, 512, context=1024, new=100)
    assert times.recompute == SHEET.prefill_layer(512, 1024)
    assert times.new == SHEET.prefill_layer(100, 1536)
    both = SHEET.copy_kv(SourceTier.DISK, 512) + SHEET.copy_kv(SourceTier.HOST, 512)
    assert times.copy_kv == both
    assert (times.start, times.pieces) == (0.0, 1)
