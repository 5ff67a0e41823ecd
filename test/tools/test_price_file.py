import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.errors import ConfigError
from sglang_hc.tools.price_file import Prices, read_prices, sample_prices

OWN = {
    "currency": "euro", "source": "an invoice", "gpu_hour": 3.5, "dram_gb_hour": 0.01,
    "ssd_gb_hour": 0,
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def read(text: str) -> Prices:
        path = tmp_path / "prices.json"
        path.write_text(text)
        return read_prices(str(path))

    return read


@pytest.mark.parametrize(
    ("gpus", "gain", "percent"), [(2, 4.0, 70), (4, 1.9, 42), (4, 3.3, 67), (4, 3.4, 68)]
)
def test_the_savings_of_attentionstore_follow_from_its_gains_and_prices(gpus, gain, percent):
    """13B, 65B, 70B, Falcon by figure 16; figure 17 says 70, 43, 66, 68 %, and section 4.2 that
    storage is 16.4 % of the cost of 13B, and 9 % of the others'."""
    prices = sample_prices()
    assert 100 * prices.saved(gain, gpus, 128e9, 10e12) == pytest.approx(percent, abs=1)
    storage = 1 - prices.per_hour(gpus, 0, 0) / prices.per_hour(gpus, 128e9, 10e12)
    assert storage == pytest.approx({2: 0.164, 4: 0.09}[gpus], abs=0.002)


def test_a_price_file_of_ones_own(read):
    prices = read(json.dumps(OWN))
    assert (prices.currency, prices.source) == ("euro", "an invoice")
    assert prices.per_hour(8, 1e12, 1e15) == pytest.approx(8 * 3.5 + 1000 * 0.01)


@given(st.floats(0.01, 100), st.integers(1, 64), st.floats(0, 1e13), st.floats(0, 1e16))
def test_what_is_saved_is_the_difference_of_two_bills(gain, gpus, dram, ssd):
    prices = sample_prices()
    hours = 24.0
    without, tiers = hours * prices.per_hour(gpus, 0, 0), prices.per_hour(gpus, dram, ssd)
    saved = prices.saved(gain, gpus, dram, ssd)
    assert without * (1 - saved) == pytest.approx(hours / gain * tiers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"currency": ""}, r"length >= 1 - at `\$\.currency`"),
        ({"source": None}, r"Expected `str`, got `null` - at `\$\.source`"),
        ({"gpu_hour": "3"}, r"Expected `float`, got `str` - at `\$\.gpu_hour`"),
        ({"dram_gb_hour": -1}, r">= 0.0 - at `\$\.dram_gb_hour`"),
        ({"ssd_gb_hour": 1e300}, r"< 1000000000.0 - at `\$\.ssd_gb_hour`"),
        ({"ssd_hour": 1}, "unknown field `ssd_hour`"),
    ],
)
def test_one_clear_error_per_mistake(read, change, message):
    with pytest.raises(ConfigError, match=f"prices.json: .*{message}"):
        read(json.dumps(OWN | change))


@pytest.mark.parametrize("field", OWN)
def test_every_field_is_needed(read, field):
    kept = {name: value for name, value in OWN.items() if name != field}
    with pytest.raises(ConfigError, match=f"missing required field `{field}`"):
        read(json.dumps(kept))


def test_a_file_that_is_no_json_or_not_there(read, tmp_path):
    with pytest.raises(ConfigError, match=r"prices.json: not valid JSON"):
        read("{")
    with pytest.raises(ConfigError, match=r"nowhere.json: cannot be read"):
        read_prices(str(tmp_path / "nowhere.json"))
