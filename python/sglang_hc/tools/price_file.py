"""What machines cost: price files, an hour, a million tokens (AttentionStore section 4.2)."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from sglang_hc.errors import ConfigError, decode_json, read_text

Price = Annotated[float, Meta(ge=0, le=1e9)]


class Prices(Struct, frozen=True, forbid_unknown_fields=True):
    """Prices by the hour, in `currency` (three capital letters, as in ISO 4217).

    source: where they are from, and when; printed beside every cost. gpu_hour: of one GPU, by its
    name. dram_gb_hour, ssd_gb_hour: of 1e9 bytes; 0 for what is there anyway. For a machine that is
    bought, divide its price, with what it consumes, by the hours of its life.
    """

    currency: Annotated[str, Meta(pattern="^[A-Z]{3}$")]
    source: Annotated[str, Meta(min_length=1)]
    gpu_hour: Annotated[dict[str, Annotated[float, Meta(gt=0, le=1e9)]], Meta(min_length=1)]
    dram_gb_hour: Price
    ssd_gb_hour: Price

    def hour(self, gpu: str | None, gpus: int = 1, dram: float = 0.0, ssd: float = 0.0) -> float:
        """An hour of a machine with so many GPUs and bytes for state. gpu: its name in any case;
        None for the only one that has a price. Raises ConfigError that lists those that have."""
        found = [
            price
            for name, price in self.gpu_hour.items()
            if gpu is None or name.lower() == gpu.lower()
        ]
        if len(found) != 1:
            raise ConfigError(
                f"prices of GPUs are of {', '.join(self.gpu_hour)}; "
                + ("say which it is" if gpu is None else f"add one of {gpu!r} to gpu_hour")
            )
        storage = dram * self.dram_gb_hour + ssd * self.ssd_gb_hour
        return gpus * found[0] + storage / 1e9


def load_prices(name_or_path: str) -> Prices:
    """A shipped price file by its name, or one from a file in the same format.

    Raises ConfigError with the known names, or with the field that is missing or nonsense.
    """
    folder = resources.files("sglang_hc.tools") / "prices"
    known = {Path(entry.name).stem: entry for entry in folder.iterdir()}
    where = f"price file {name_or_path}"
    if name_or_path in known:
        return decode_json(known[name_or_path].read_text(), Prices, where)
    path = Path(name_or_path)
    if not path.is_file():
        raise ConfigError(f"{where}: there is none; give a file, or one of {', '.join(known)}")
    return decode_json(read_text(path, where), Prices, where)


def per_million_tokens(hour: float, tokens_per_second: float) -> float:
    """What a million tokens cost on a machine of so much an hour, at a rate above 0."""
    return hour / 3600 / tokens_per_second * 1e6


def saved(before: float, after: float, gain: float) -> float:
    """Share of the cost that is saved when a machine of `after` an hour does in 1 / gain of the
    time what one of `before` an hour did. Negative where it costs more."""
    return 1 - after / gain / before
