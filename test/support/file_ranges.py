"""Places in the files of blocks, for faults that strike one block or one layer of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Range(NamedTuple):
    """Bytes [begin, end) of a block's file."""

    path: Path
    begin: int
    end: int

    def overlaps(self, path: str, begin: int, end: int) -> bool:
        return Path(path) == self.path and begin < self.end and self.begin < end

    def flip(self) -> None:
        """A bit in the middle."""
        with self.path.open("r+b") as file:
            file.seek((self.begin + self.end) // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
