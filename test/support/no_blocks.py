"""The emptiest `BlockIo`; doubles override what their test is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.disk import Block


class NoBlocks:
    """Holds nothing, refuses writes, and must not be read from."""

    name = "disk"
    capacity = 0

    def contains(self, block_ids: Sequence[bytes]) -> int:
        return 0

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        return False

    def wants(self, block_id: bytes) -> bool:
        return True

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> bool:
        return False

    def read(self, ticket: int, block_id: bytes, slot: int, deadline: float) -> None:
        raise AssertionError("nothing is here")

    def flush(self) -> None:
        return None

    def poll(self) -> list[BlockDone]:
        return []

    def touch(self, block_ids: Sequence[bytes]) -> None:
        return None

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        return None

    def clear(self) -> None:
        return None

    def levels(self) -> dict[str, int]:
        return {}

    def counts(self) -> Counter[str]:
        return Counter()

    def close(self) -> None:
        return None
