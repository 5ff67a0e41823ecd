import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.errors import ConfigError
from sglang_hc.tools.price_file import load_prices, per_million_tokens, saved

SAMPLE = {
    "currency": "EUR", "source": "an invoice", "gpu_hour": {"H200": 3.5}, "dram_gb_hour": 0.01,
    "ssd_gb_hour": 0,
}  # fmt: skip
DRAM, SSD = 128e9, 10e12


@pytest.fixture
def load(tmp_path):
    def load(text: str):
        path = tmp_path / "prices.json"
        path.write_text(text)
        return load_prices(str(path))

    return load


@pytest.mark.parametrize(
    ("gpus", "gain", "percent"), [(2, 4.0, 70), (4, 1.9, 42), (4, 3.3, 67), (4, 3.4, 68)]
)
def test_the_savings_of_attentionstore_follow_from_its_gains_and_prices(gpus, gain, percent):
    """13B, 65B, 70B, Falcon: GPU-time gains of figure 16; figure 17 says 70, 43, 66, 68 %."""
    prices = load_prices("aws")
    alone = prices.hour("A100-80G", gpus)
    with_tiers = prices.hour("A100-80G", gpus, DRAM, SSD)
    assert 100 * saved(alone, with_tiers, gain) == pytest.approx(percent, abs=1)
    assert 1 - alone / with_tiers == pytest.approx({2: 0.164, 4: 0.09}[gpus], abs=0.002)


def test_a_price_file_of_ones_own(load):
    prices = load(json.dumps(SAMPLE))
    assert (prices.currency, prices.source) == ("EUR", "an invoice")
    assert prices.hour("h200", 8, dram=1e12, ssd=1e15) == pytest.approx(8 * 3.5 + 1000 * 0.01)


def test_a_million_tokens():
    assert per_million_tokens(36.0, 1000.0) == pytest.approx(10.0)


@given(*(st.floats(0.01, 1e4) for _ in range(3)))
def test_what_is_saved_is_the_difference_of_the_costs_of_a_token(before, after, gain):
    costs = per_million_tokens(before, 1.0), per_million_tokens(after, gain)
    assert saved(before, after, gain) == pytest.approx(1 - costs[1] / costs[0], rel=1e-6, abs=1e-9)


def test_what_ships_says_its_currency_and_its_source():
    prices = load_prices("aws")
    assert prices.currency == "USD" and "AttentionStore" in prices.source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"currency": "dollars"}, r"matching regex .* - at `\$\.currency`"),
        ({"source": ""}, r"length >= 1 - at `\$\.source`"),
        ({"source": None}, r"Expected `str`, got `null` - at `\$\.source`"),
        ({"gpu_hour": {}}, r"length >= 1 - at `\$\.gpu_hour`"),
        ({"gpu_hour": 3.5}, r"Expected `object`, got `float` - at `\$\.gpu_hour`"),
        ({"gpu_hour": {"H200": 0}}, r"> 0.0 - at `\$\.gpu_hour\[\.\.\.\]`"),
        ({"gpu_hour": {"H200": "3"}}, r"`float`, got `str` - at `\$\.gpu_hour"),
        ({"dram_gb_hour": -1}, r">= 0.0 - at `\$\.dram_gb_hour`"),
        ({"ssd_gb_hour": 1e300}, r"<= 1000000000.0 - at `\$\.ssd_gb_hour`"),
        ({"ssd_hour": 1}, "unknown field `ssd_hour`"),
    ],
)
def test_one_clear_error_per_mistake(load, change, message):
    with pytest.raises(ConfigError, match=f"^price file .*prices.json: .*{message}"):
        load(json.dumps(SAMPLE | change))


@pytest.mark.parametrize("field", SAMPLE)
def test_every_field_is_needed(load, field):
    kept = {name: value for name, value in SAMPLE.items() if name != field}
    with pytest.raises(ConfigError, match=f"missing required field `{field}`"):
        load(json.dumps(kept))


def test_a_file_that_is_no_json_or_not_there(load, tmp_path):
    with pytest.raises(ConfigError, match="not valid JSON"):
        load("{")
    with pytest.raises(ConfigError, match=r"price file azure: there is none; .* one of aws"):
        load_prices("azure")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"price file .*: cannot be read"):
        load_prices(str(tmp_path / "bytes"))


def test_a_gpu_without_a_price(load):
    with pytest.raises(ConfigError, match="are of A100-40G, A100-80G; add one of 'B300' to gpu_h"):
        load_prices("aws").hour("B300")
    with pytest.raises(ConfigError, match="are of A100-40G, A100-80G; say which it is"):
        load_prices("aws").hour(None)
    assert load(json.dumps(SAMPLE)).hour(None) == 3.5
