import json

import msgspec
import pytest

from sglang_hc.errors import ConfigError
from sglang_hc.tools.datasheet import known_gpus, load_hardware

TABLE_2 = {"A100-40G": (312, 40, 32), "A30": (165, 24, 32), "4090": (330, 24, 32),
           "L20": (120, 48, 32), "H800": (990, 80, 64)}  # fmt: skip


@pytest.mark.parametrize(("name", "row"), TABLE_2.items())
def test_profiles_agree_with_table_2(name, row):
    gpu = load_hardware(name)
    found = gpu.fp16_tflops.value, gpu.memory_gb.value, gpu.link_gbps.value
    assert found == row


def test_every_shipped_number_says_where_it_comes_from():
    assert set(known_gpus()) == {*TABLE_2, "H100", "H200"}
    for name in known_gpus():
        values = msgspec.to_builtins(load_hardware(name)).items()
        origins = {field: q["origin"] for field, q in values if isinstance(q, dict)}
        assert origins.pop("flop_fraction") == "assumption"
        assert set(origins.values()) == {"data sheet"}


def test_names_are_found_in_any_case_and_files_by_path(tmp_path):
    assert load_hardware("h200") == load_hardware("H200")
    own = json.loads(known_gpus()["A30"]) | {"name": "mine"}
    own["fp16_tflops"] = {"value": 140.5, "origin": "measured"}
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(own))
    gpu = load_hardware(str(path))
    assert (gpu.name, gpu.fp16_tflops.origin) == ("mine", "measured")
    assert gpu.flops == pytest.approx(140.5e12 * 0.65)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown GPU 'B300': give one of .*A100-40G.*H200"):
        load_hardware("B300")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"link_gbps": None}, r"Expected `object`, got `null` - at `\$\.link_gbps`"),
        (
            {"link_gbps": {"value": 0, "origin": "measured"}},
            r"> 0.0 - at `.*link_gbps\.value`",
        ),
        (
            {"link_gbps": {"value": "32", "origin": "measured"}},
            r"`float`, got `str` - at `.*link_gbps",
        ),
        ({"link_gbps": {"value": 32}}, r"missing required field `origin` - at `\$\.link_gbps`"),
        (
            {"link_gbps": {"value": 32, "origin": "guess"}},
            "Invalid enum value 'guess'",
        ),
        (
            {"flop_fraction": {"value": 1.5, "origin": "measured"}},
            r"fraction.value must be at most 1",
        ),
        ({"name": ""}, r"length >= 1 - at `\$\.name`"),
        ("name: A30", "not valid JSON"),
    ],
)
def test_profile_files_that_make_no_sense_are_refused(tmp_path, change, message):
    path = tmp_path / "gpu.json"
    if isinstance(change, dict):
        change = json.dumps(json.loads(known_gpus()["A30"]) | change)
    path.write_text(change)
    with pytest.raises(ConfigError, match=message):
        load_hardware(str(path))
