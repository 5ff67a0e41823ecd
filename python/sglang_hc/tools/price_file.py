"""What a machine costs by the hour, from a file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from sglang_hc.errors import decode_json, read_text

MOST = 1e9
Price = Annotated[float, Meta(ge=0, lt=MOST)]

SAMPLE = "attentionstore.json"


class Prices(Struct, frozen=True, forbid_unknown_fields=True):
    """Of one GPU and of 1e9 bytes of DRAM and of SSD for an hour.

    currency, source: in words, for whoever reads the result.
    """

    currency: Annotated[str, Meta(min_length=1)]
    source: Annotated[str, Meta(min_length=1)]
    gpu_hour: Annotated[float, Meta(gt=0, lt=MOST)]
    dram_gb_hour: Price
    ssd_gb_hour: Price

    def per_hour(self, gpus: int, dram: float, ssd: float) -> float:
        """Of GPUs with tiers of so many bytes."""
        return gpus * self.gpu_hour + (dram * self.dram_gb_hour + ssd * self.ssd_gb_hour) / 1e9

    def saved(self, gain: float, gpus: int, dram: float, ssd: float) -> float:
        """Share of the cost that is saved by tiers of so many bytes with which the GPUs work `gain`
        times shorter."""
        return 1 - self.per_hour(gpus, dram, ssd) / gain / self.per_hour(gpus, 0, 0)


def sample_prices() -> Prices:
    """Those that ship."""
    text = (resources.files("sglang_hc.tools") / "prices" / SAMPLE).read_text()
    return decode_json(text, Prices, SAMPLE)


def read_prices(path: str) -> Prices:
    """Raises ConfigError that names the file and what is missing or nonsense."""
    return decode_json(read_text(Path(path), path), Prices, path)
